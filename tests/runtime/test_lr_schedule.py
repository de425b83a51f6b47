from typing import Any

import pytest
import torch
from pydantic import ValidationError

from mmtrain.recipe.settings.train_settings import OptimizerSettings
from mmtrain.runtime.training.hooks.learning_rate import learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.8681980515339464, 0.55, 0.2318019484660536]),
    ],
)
def test_warm_up_then_decay(schedule: str, expected: list[float]) -> None:
    settings = OptimizerSettings(lr=1.0, min_lr=0.1, warmup_steps=2, schedule=schedule)
    assert [learning_rate(settings, step, 6) for step in range(6)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "wsd", "cooldown_ratio": 0.4}, [0.5, 1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325]),
        ({"schedule": "wsd"}, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "constant", "cooldown_ratio": 0.2}, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.55]),
        ({"schedule": "inverse_sqrt"}, [0.5, 1, *(0.1 + 0.9 * (2 / step) ** 0.5 for step in range(2, 10))]),
    ],
)
def test_cool_downs(settings: dict[str, Any], expected: list[float]) -> None:
    optimizer = OptimizerSettings(lr=1.0, min_lr=0.1, warmup_steps=2, **settings)
    assert [learning_rate(optimizer, step, 10) for step in range(10)] == pytest.approx(expected)


def test_a_cool_down_starts_where_the_schedule_is() -> None:
    optimizer = OptimizerSettings(lr=1.0, warmup_steps=4, schedule="inverse_sqrt", cooldown_ratio=0.5)
    rates = [learning_rate(optimizer, step, 20) for step in range(20)]
    assert rates[10] == pytest.approx((4 / 10) ** 0.5)
    assert rates[10:] == pytest.approx([rates[10] * (1 - step / 10) for step in range(10)])


@pytest.mark.parametrize(("ratio", "num_steps", "expected"), [(0.03, 5196, 156), (0.1, 30, 3), (0.1, 31, 4), (0, 9, 0)])
def test_the_warm_up_is_a_share_of_all_steps(ratio: float, num_steps: int, expected: int) -> None:
    assert OptimizerSettings(lr=1.0, warmup_ratio=ratio).num_warmup_steps(num_steps) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_ratio": 0.1, "warmup_steps": 3},
        {"schedule": "cosine", "cooldown_ratio": 0.1},
        {"schedule": "wsd", "warmup_ratio": 0.5, "cooldown_ratio": 0.6},
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="allowed"):
        OptimizerSettings(lr=1.0, **settings)


STEPS, WARMUP = 40, 6
WSD = {"num_decay_steps": 10, "num_stable_steps": STEPS - WARMUP - 10}
COMPARED = {  # our settings, and the schedule of transformers with its arguments
    "linear": ({"schedule": "linear"}, "linear", {}),
    "cosine": ({"schedule": "cosine"}, "cosine", {}),
    "constant": ({"schedule": "constant"}, "constant_with_warmup", {}),
    "inverse_sqrt": ({"schedule": "inverse_sqrt"}, "inverse_sqrt", {}),
    "min_lr": ({"schedule": "cosine", "min_lr": 0.2}, "cosine_with_min_lr", {"min_lr": 0.2}),
    "wsd linear": ({"schedule": "wsd", "cooldown_ratio": 0.25}, "warmup_stable_decay", {**WSD, "decay_type": "linear"}),
    "wsd cosine": (
        {"schedule": "wsd", "cooldown_ratio": 0.25, "cooldown": "cosine"},
        "warmup_stable_decay",
        {**WSD, "decay_type": "cosine"},
    ),
    "wsd sqrt": (
        {"schedule": "wsd", "cooldown_ratio": 0.25, "cooldown": "sqrt"},
        "warmup_stable_decay",
        {**WSD, "decay_type": "1-sqrt"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize("name", COMPARED)
def test_learning_rates_are_those_of_transformers(name: str, warmup: int) -> None:
    """In the warm-up we are one step ahead: its first step has a learning rate of 0, ours trains."""
    optimization = pytest.importorskip("transformers.optimization")
    ours, theirs, arguments = COMPARED[name]
    settings = OptimizerSettings(lr=1.0, **{**ours, "warmup_ratio": warmup / STEPS})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if "num_stable_steps" in arguments:
        arguments = {**arguments, "num_stable_steps": STEPS - warmup - 10}
    num_steps = None if "num_stable_steps" in arguments or theirs.startswith(("constant", "inverse")) else STEPS
    schedule = optimization.get_scheduler(theirs, optimizer, warmup, num_steps, scheduler_specific_kwargs=arguments)
    rates = []
    for _ in range(STEPS):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    expected = [*rates[1 : warmup + 1], *rates[warmup:]]
    assert [learning_rate(settings, step, STEPS) for step in range(STEPS)] == pytest.approx(expected, abs=1e-9)
