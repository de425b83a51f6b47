"""A reduction in bf16 is that of rounded contributions, whatever the size and the numbers, and leaves nothing else."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmtrain.models.optim import bf16_reduction
from mmtrain.models.optim.bf16_reduction import RoundedReduceScatter, RoundedReduction
from tests.distributed import run_ranks


def _contribution(rank: int, size: int) -> torch.Tensor:
    """Return gradients of many magnitudes; some are no numbers, infinite, zero, or tiny."""
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(rank))
    numbers *= 10.0 ** torch.randint(-30, 30, (size,), generator=torch.Generator().manual_seed(100 + rank))
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1e-45, 3.4e38])
    numbers[rank : rank + len(special)] = special[: max(0, size - rank)]
    return numbers


def _reduce(size: int, num_first: int, of_fsdp: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's shard of the sum, and that of the oracle."""
    group = dist.group.WORLD
    assert group is not None
    contributions = [_contribution(rank, size) for rank in range(group.size())]
    total = torch.zeros(size)
    for contribution in contributions:
        total += contribution.to(torch.bfloat16).float()
    # A bucket lies somewhere in the memory of its buffer.
    memory = torch.full((size + 8,), -1.0)
    buffer = memory[5 : 5 + size].copy_(contributions[group.rank()])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bf16_reduction, "NUM_ROUNDED_FIRST", num_first)
        if of_fsdp:
            shard = torch.empty(size // group.size())
            RoundedReduceScatter()(shard, buffer, group, dist.ReduceOp.SUM)
        else:
            shard = RoundedReduction(buffer, group).sum()
    assert memory[:5].eq(-1).all()
    assert memory[5 + size :].eq(-1).all()
    return shard, total.view(group.size(), -1)[group.rank()]


@pytest.mark.parametrize("of_fsdp", [False, True])
@pytest.mark.parametrize(("size", "num_first"), [(12, 1), (12, 100), (3, 1), (999, 7), (3 << 12, 1 << 10)])
def test_the_sum_is_that_of_rounded_contributions(size: int, num_first: int, of_fsdp: bool) -> None:
    found: list[Any] = run_ranks(3, _reduce, size, num_first, of_fsdp)
    for shard, expected in found:
        torch.testing.assert_close(shard, expected, rtol=0.0, atol=0.0, equal_nan=True)
    if size > 3:
        assert not torch.cat([shard for shard, _ in found]).isfinite().all(), "a gradient that is no number stays one"
