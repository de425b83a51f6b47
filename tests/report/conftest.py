"""Steps and clocks for the tests of what people see."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from mmtrain.plan import Plan, plan
from mmtrain.plan.rehearse import rehearse
from mmtrain.program import Timeline
from mmtrain.report import StepMetrics, TimeSplit
from tests.plan import factory


@pytest.fixture(scope="package")
def rehearsed() -> tuple[Plan, Timeline]:
    """A plan on two ranks, and its step simulated."""
    settings = factory.recipe()
    chosen = plan(settings, factory.lengths(), world_size=2, hardware="cpu-core", recipe_sha256="x")
    pricing, _ = factory.pricing_for(settings)
    dp = {name: unit.dp for name, unit in chosen.units.items()}
    [batch, *_] = pricing.batches.lay_out(dp, chosen.schedule.num_microbatches)
    return chosen, rehearse(settings, chosen, batch)


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
