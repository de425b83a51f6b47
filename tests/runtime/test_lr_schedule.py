import pytest

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
