"""Which steps are unusual, and what a resumed run remembers of the steps before it."""

import json
import math

import numpy as np
import pytest

from mmtrain.runtime.resilience.divergence import MIN_WINDOW_STEPS, RECOVERY_STEPS, WINDOW_STEPS, CourseMonitor


def _usual(count: int, seed: int = 0) -> list[tuple[float, float]]:
    """Make falling losses and scattered gradient norms, as training has them."""
    rng = np.random.default_rng(seed)
    losses = 3 * np.exp(-np.arange(count) / 400) + 2 + 0.05 * rng.standard_normal(count)
    return list(zip(losses.tolist(), rng.lognormal(0, 0.3, count).tolist(), strict=True))


def _monitor(count: int = WINDOW_STEPS) -> CourseMonitor:
    monitor = CourseMonitor()
    for step, (loss, grad_norm) in enumerate(_usual(count), 1):
        assert monitor.observe(step, loss, grad_norm) is None
    return monitor


@pytest.mark.parametrize("seed", range(4))
def test_healthy_training_is_never_suspect(seed: int) -> None:
    monitor = CourseMonitor()
    for step, (loss, grad_norm) in enumerate(_usual(1500, seed), 1):
        assert monitor.observe(step, loss, grad_norm) is None


@pytest.mark.parametrize(
    ("loss", "grad_norm", "reason"),
    [
        (4.0, math.nan, "gradient norm is nan"),
        (math.inf, 1.0, "loss is inf"),
        (4.0, 30.0, "gradient norm 30 is far above the usual 0.9962"),
        (9.0, 1.0, "loss 9 is far above the usual 4."),
    ],
)
def test_a_stretch_starts_with_an_unusual_step_and_ends_after_usual_ones(
    loss: float, grad_norm: float, reason: str
) -> None:
    monitor = _monitor()
    change = monitor.observe(101, loss, grad_norm)
    assert change is not None
    assert change.reason is not None
    assert change.reason.startswith(reason)
    assert monitor.suspect_since == 101
    assert monitor.observe(102, loss, grad_norm) is None, "it is the same stretch"
    for step in range(103, 102 + RECOVERY_STEPS):
        assert monitor.observe(step, 4.0, 1.0) is None
    assert monitor.suspect_since == 101
    ended = monitor.observe(102 + RECOVERY_STEPS, 4.0, 1.0)
    assert ended is not None
    assert ended.reason is None
    assert monitor.suspect_since is None


def test_a_loss_that_stays_high_stays_suspect() -> None:
    monitor = _monitor()
    for step in range(101, 401):
        monitor.observe(step, 12.0, 1.0)
    assert monitor.suspect_since == 101


def test_at_the_start_only_infinite_numbers_are_suspect() -> None:
    monitor = _monitor(MIN_WINDOW_STEPS - 1)
    assert monitor.observe(MIN_WINDOW_STEPS, 50.0, 500.0) is None
    assert monitor.observe(MIN_WINDOW_STEPS + 1, math.nan, 1.0) is not None


def test_a_resumed_run_judges_as_one_that_was_not_interrupted() -> None:
    unbroken = _monitor()
    unbroken.observe(101, 9.0, 1.0)
    unbroken.observe(102, 4.0, 1.0)
    resumed = CourseMonitor(json.loads(json.dumps(unbroken.to_state())))
    assert resumed.suspect_since == 101
    for step, (loss, grad_norm) in enumerate(_usual(30, seed=9), 103):
        assert resumed.observe(step, loss + 1, grad_norm) == unbroken.observe(step, loss + 1, grad_norm)
    assert resumed.to_state() == unbroken.to_state()
    assert resumed.suspect_since is None
