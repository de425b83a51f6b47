import os
import signal

import pytest
import torch.distributed as dist

from mmtrain.errors import PlanError, RunError, UserError
from mmtrain.runtime.launch import launch_local
from mmtrain.runtime.world import Address, join, leave


def _sum_of_ranks(address: Address) -> None:
    world = join(address)
    assert world.gather(world.rank) == [0, 1, 2]
    leave()


def _rank_one_is_wrong(address: Address) -> None:
    join(address)
    if address.rank == 1:
        raise PlanError("plan.units.llm.tp: 3 found")
    dist.barrier()  # rank 0 waits for a peer that has failed


def _rank_one_is_killed(address: Address) -> None:
    join(address)
    if address.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_ranks_meet() -> None:
    launch_local(3, _sum_of_ranks)


def test_the_first_failure_is_raised_and_the_others_are_ended() -> None:
    with pytest.raises(UserError, match=r"plan\.units\.llm\.tp: 3 found"):
        launch_local(2, _rank_one_is_wrong)


def test_a_killed_rank_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL"):
        launch_local(2, _rank_one_is_killed)
