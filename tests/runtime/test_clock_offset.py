import time

import torch
import torch.distributed as dist

from mmtrain.runtime.training.clock_offset import ClockOffset, measure_clock_offset
from mmtrain.runtime.world import World
from tests.distributed import run_ranks

APART_S = 100.0


def offsets() -> tuple[ClockOffset, ClockOffset]:
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return measure_clock_offset(world), measure_clock_offset(world, lambda: time.perf_counter() + APART_S * world.rank)


def test_clocks_of_one_machine_agree_and_shifted_clocks_are_corrected() -> None:
    offsets_by_rank = run_ranks(3, offsets)
    for rank, (same, shifted) in enumerate(offsets_by_rank):
        assert same == ClockOffset(0.0, 0.0)
        assert abs(shifted.offset_s - APART_S * rank) <= shifted.error_s + 1e-9, "the bounds hold the truth"
        assert shifted.error_s < APART_S / 4, "and are far closer than the clocks are apart"


def test_a_single_rank_has_no_clock_offset() -> None:
    assert measure_clock_offset(World(0, 1, torch.device("cpu"))) == ClockOffset(0.0, 0.0)
