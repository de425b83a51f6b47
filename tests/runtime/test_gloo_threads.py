"""Threads that listen for messages are scheduled as batch work in every process group of a run."""

import os
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from mmtrain.runtime.execution.process_groups import build_groups
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.world import Address, join, leave
from tests.distributed import fork_ranks
from tests.program.graphs import Unit, chain

LISTENS = "gloo_tcp_loop"


def _policies() -> list[tuple[str, int]]:
    """Return the name and the scheduling policy of each thread of this process."""
    threads = list(Path("/proc/self/task").iterdir())
    return [((thread / "comm").read_text().strip(), os.sched_getscheduler(int(thread.name))) for thread in threads]


def _policies_of_a_run(rank: int, size: int, folder: Path, port: int) -> list[list[tuple[str, int]]]:
    """Return the policies after each of the places in which a run creates groups."""
    world = join(Address(rank, size, rank, "127.0.0.1", port, "test"))
    policies = [_policies()]
    patient = world.without_timeout()
    policies.append(_policies())
    groups = build_groups(chain(Unit("vision"), Unit("llm")), world)
    policies.append(_policies())
    assert patient.all_gather(rank) == [0, 1]
    assert len(groups.channels) == 2
    leave()
    return policies


@pytest.mark.skipif(sys.platform != "linux", reason="the policy is Linux'")
@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="this torch does not name its threads")
def test_threads_that_listen_are_batch_work_and_no_other_is() -> None:
    for of_rank in fork_ranks(2, _policies_of_a_run, free_port()):
        num_listening = [sum(name == LISTENS for name, _ in policies) for policies in of_rank]
        assert num_listening[0] >= 1
        assert num_listening == sorted(set(num_listening)), "each place added a group"
        for policies in of_rank:
            for name, policy in policies:
                assert policy == (os.SCHED_BATCH if name == LISTENS else os.SCHED_OTHER), name
