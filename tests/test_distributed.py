import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RanksFailed, fork_ranks, run_ranks
from tests.waiting import MAX_WAIT_S


def _sum_of_ranks(extra: int) -> float:
    total = torch.tensor(float(dist.get_rank() + extra))
    dist.all_reduce(total)
    return total.item()


def _tensor_with_gradient(rank: int, world_size: int, folder: object) -> torch.Tensor:
    x = torch.full((2,), float(rank), requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    return x.grad


def _one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def _hangs() -> None:
    if dist.get_rank() == 0:
        time.sleep(MAX_WAIT_S)


def test_ranks_talk_to_each_other() -> None:
    assert run_ranks(2, _sum_of_ranks, 10) == [21.0, 21.0]


def test_ranks_can_run_backward_after_this_process_has() -> None:
    torch.ones(1, requires_grad=True).sum().backward()
    first, second = fork_ranks(2, _tensor_with_gradient)
    assert first.tolist() == [0.0, 0.0]
    assert second.tolist() == [2.0, 2.0]


def test_a_failing_rank_is_quoted() -> None:
    with pytest.raises(RanksFailed, match="rank one is unwell"):
        run_ranks(2, _one_fails)


def _pid() -> int:
    return os.getpid()


def test_ranks_serve_later_calls_until_one_fails() -> None:
    first = run_ranks(2, _pid)
    assert run_ranks(3, _pid)[:2] == first
    with pytest.raises(RanksFailed):
        run_ranks(2, _one_fails)
    assert not set(run_ranks(2, _pid)) & set(first)


def test_a_hanging_rank_shows_where_it_hangs() -> None:
    run_ranks(2, _pid)  # from here on both processes run, so that the time below is only that of the hang
    with pytest.raises(RanksFailed, match=r"rank 0: did not finish(.|\n)*in _hangs"):
        run_ranks(2, _hangs, timeout=2.0)
