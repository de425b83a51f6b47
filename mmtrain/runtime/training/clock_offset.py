"""How far the clocks of the ranks are apart, so that what they recorded can be laid side by side."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mmtrain.runtime.world import World

NUM_ROUNDS = 16
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ClockOffset:
    """What this rank's clock reads beyond rank 0's, and how wrong that may be at most, in seconds."""

    offset_s: float
    error_s: float


def clock_offset(world: World, clock: Callable[[], float] = time.perf_counter) -> ClockOffset:
    """Compare this rank's clock with rank 0's; every rank must call this at the same time.

    Nobody leaves an all-gather before everybody has entered it. So this rank's clock on leaving one, less rank 0's on
    entering it, is at least their difference, and the other way round at most. The best of some rounds leaves the true
    value within half a round trip, mostly tens of microseconds. Ranks that share a kernel share its clock: there the
    difference is zero, unless the bounds say otherwise.
    """
    if world.size == 1:
        return ClockOffset(0.0, 0.0)
    boots = world.all_gather(BOOT_ID.read_text() if BOOT_ID.exists() else None)
    entered: list[Sequence[float]] = []  # of a round: rank 0's clock on entering, mine on entering, mine on leaving
    left_first: list[float] = []  # rank 0's clock on leaving a round, told in the next
    last_left = 0.0
    for _ in range(NUM_ROUNDS + 1):
        mine = torch.tensor([clock(), last_left], dtype=torch.float64, device=world.device)
        rows = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(rows, mine)
        first, before_left = rows[0].tolist()
        last_left = clock()
        entered.append((first, float(mine[0]), last_left))
        left_first.append(before_left)
    most = min(left - first for first, _, left in entered[:-1])
    least = max(mine - left for (_, mine, _), left in zip(entered, left_first[1:], strict=False))
    shared = boots[0] is not None and boots[0] == boots[world.rank]
    if world.is_first or (shared and least <= 0.0 <= most):
        return ClockOffset(0.0, 0.0)
    return ClockOffset((most + least) / 2, (most - least) / 2)
