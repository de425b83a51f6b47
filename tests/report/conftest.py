"""Steps and clocks for the tests of what people see."""

import math
from dataclasses import dataclass
from typing import Any

from mmtrain.report import StepMetrics, TimeSplit


def metrics(step: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step,
        "loss": 4 * math.exp(-step / 100) + 0.0345,
        "grad_norm": 0.81,
        "lr": 3e-4,
        "step_time_s": 0.5,
        "samples": 22,
        "tokens": 6150,
        "epoch": 0.3,
        "mfu": 0.031,
        "peak_flops": 2e12,
        "time_s": TimeSplit(compute=0.355, wait=0.1, communication=0.025, data=0.02),
        "peak_memory_bytes": 3 * 2**29,
    }
    return StepMetrics(**{**values, **changes})


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now
