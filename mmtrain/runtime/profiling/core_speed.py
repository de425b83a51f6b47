"""Time one GEMM and one copy on a core: by these, the costs of a CPU of one day are corrected for another."""

import statistics
import time
from collections.abc import Callable

import torch

from mmtrain.costs.core_ratios import COPIED_BYTES, GEMM_SIDE
from mmtrain.costs.cost_table import CoreSpeed

SECONDS_OF_EACH = 0.5  # of repeating the GEMM, and of repeating the copy


def measure_core_speed() -> CoreSpeed:
    """Return the median seconds of a GEMM in fp32 and of a copy, on the threads that torch uses."""
    a, b = (torch.randn(GEMM_SIDE, GEMM_SIDE) for _ in range(2))
    source = torch.zeros(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    return CoreSpeed(gemm_s=_median_seconds(lambda: a @ b), copy_s=_median_seconds(lambda: target.copy_(source)))


def _median_seconds(work: Callable[[], object]) -> float:
    """Return the median of repetitions that take `SECONDS_OF_EACH` together."""
    seconds: list[float] = []
    while sum(seconds) < SECONDS_OF_EACH or len(seconds) < 3:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
