"""Measure how far the ranks' clocks are apart, so that their records fit on one time axis."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mmtrain.runtime.world import World

NUM_CLOCK_ROUNDS = 16  # all-gathers; the tightest bounds of them count
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ClockOffset:
    """What this rank's clock reads beyond rank 0's, and how wrong that may be at most, in seconds."""

    offset_s: float
    error_s: float


@dataclass(frozen=True)
class _Round:
    """Readings of one all-gather."""

    first_entered_s: float  # rank 0's clock
    entered_s: float  # this rank's clock
    left_s: float  # this rank's clock


def measure_clock_offset(world: World, clock: Callable[[], float] = time.perf_counter) -> ClockOffset:
    """Compare this rank's clock with rank 0's; every rank must call this at the same time.

    No rank leaves an all-gather before every rank has entered it. So this rank's clock on leaving, less rank 0's on
    entering, is at least their difference; this rank's clock on entering, less rank 0's on leaving, is at most that.
    The tightest bounds of some rounds leave the true value within half a round trip, mostly tens of microseconds.
    Ranks that share a kernel share its clock: there the difference is zero, unless the bounds contradict it.
    """
    if world.size == 1:
        return ClockOffset(0.0, 0.0)
    boot_ids = world.all_gather(BOOT_ID.read_text() if BOOT_ID.exists() else None)
    rounds: list[_Round] = []
    first_left_s: list[float] = []  # rank 0's clock on leaving the round before; it travels with the next round
    left_s = 0.0
    for _ in range(NUM_CLOCK_ROUNDS + 1):
        mine = torch.tensor([clock(), left_s], dtype=torch.float64, device=world.device)
        rows = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(rows, mine)
        first_entered_s, first_left_before_s = rows[0].tolist()
        left_s = clock()
        rounds.append(_Round(first_entered_s, float(mine[0]), left_s))
        first_left_s.append(first_left_before_s)
    upper_s = min(r.left_s - r.first_entered_s for r in rounds[:-1])
    lower_s = max(r.entered_s - left for r, left in zip(rounds, first_left_s[1:], strict=False))
    same_kernel = boot_ids[0] is not None and boot_ids[0] == boot_ids[world.rank]
    if world.is_first or (same_kernel and lower_s <= 0.0 <= upper_s):
        return ClockOffset(0.0, 0.0)
    return ClockOffset((upper_s + lower_s) / 2, (upper_s - lower_s) / 2)
