import subprocess
import sys

from mmtrain.models.megatron import ParallelGroups

CODE = """
import atexit
import torch.distributed as dist
from mmtrain.models.megatron import ParallelGroups
atexit.register(lambda: print("groups at the end:", dist.is_initialized()))  # runs after what is registered later
ParallelGroups.single()
print("groups before:", dist.is_initialized())
"""


def test_a_world_of_one_process_ends_with_it() -> None:
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["groups before: True", "groups at the end: False"]


def test_a_world_has_one_group_of_a_single_rank() -> None:
    first, second = ParallelGroups.single(), ParallelGroups.single()
    assert first.tp is second.tp
    assert first.collection().cp is second.collection().ep
