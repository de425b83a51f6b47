"""Which step is the best, and when a run ends early: the rules of transformers, and a state that goes on."""

import json
import math
import random

import pytest
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from mmtrain.recipe.settings.train_settings import BestSettings
from mmtrain.runtime.training.hooks.best_checkpoint import BestTracker

SEQUENCES = 60
MEASUREMENTS = 12


def settings(rises: bool = False, patience: int | None = None, min_gain: float = 0.0) -> BestSettings:
    return BestSettings(metric="val_loss", higher_is_better=rises, patience=patience, min_gain=min_gain)


def drawn_values(seed: int) -> list[float]:
    """Draw values on a grid, so that equal ones and gains of exactly the threshold occur."""
    draw = random.Random(seed)
    return [draw.randrange(8) / 4 for _ in range(MEASUREMENTS)]


def ends_and_bests_of_transformers(values: list[float], rises: bool, patience: int, threshold: float) -> list[object]:
    """Return after each measurement the best value so far, and whether its Trainer would stop."""
    arguments = TrainingArguments(
        output_dir="unused", metric_for_best_model="loss", greater_is_better=rises, report_to=[], use_cpu=True
    )
    callback, state = EarlyStoppingCallback(patience, threshold), TrainerState()
    steps: list[object] = []
    for value in values:
        control = TrainerControl()
        callback.on_evaluate(arguments, state, control, {"eval_loss": value})
        # Its Trainer does so after the callbacks (`_determine_best_metric`).
        if state.best_metric is None or (value > state.best_metric if rises else value < state.best_metric):
            state.best_metric = value
        steps.append((state.best_metric, control.should_training_stop))
        if control.should_training_stop:
            break
    return steps


@pytest.mark.parametrize("rises", [False, True])
@pytest.mark.parametrize("min_gain", [0.0, 0.25])
def test_best_and_end_are_those_of_transformers(rises: bool, min_gain: float) -> None:
    num_ended = 0
    for seed in range(SEQUENCES):
        values, patience = drawn_values(seed), 1 + seed % MEASUREMENTS
        tracker = BestTracker(settings(rises, patience, min_gain))
        ours: list[object] = []
        for step, value in enumerate(values, 1):
            tracker.observe(step, value)
            ours.append((tracker.best_value, tracker.early_end() is not None))
            if tracker.early_end() is not None:
                num_ended += 1
                break
        assert ours == ends_and_bests_of_transformers(values, rises, patience, min_gain), seed
    assert 0 < num_ended < SEQUENCES


def test_a_state_goes_on_as_if_nothing_had_been_between() -> None:
    for seed in range(SEQUENCES):
        values = drawn_values(seed)
        unbroken = BestTracker(settings(patience=3))
        resumed = BestTracker(settings(patience=3))
        for step, value in enumerate(values, 1):
            resumed = BestTracker(settings(patience=3), json.loads(json.dumps(resumed.state()["best"])))
            assert resumed.observe(step, value / 3) == unbroken.observe(step, value / 3)
            assert resumed.state() == unbroken.state()
            assert resumed.early_end() == unbroken.early_end()


def test_a_value_that_is_not_finite_is_never_the_best() -> None:
    tracker = BestTracker(settings(patience=2))
    assert not tracker.observe(1, math.nan)
    assert tracker.state()["best_step"] is None
    assert tracker.observe(2, 1.0)
    assert not tracker.observe(3, math.nan)
    assert not tracker.observe(4, -math.inf)
    assert (tracker.best_step, tracker.best_value) == (2, 1.0)
    assert tracker.early_end() == (
        "val_loss was not better in 2 measurements in a row; the best val_loss so far is 1, of step 2. A larger "
        "train.best.patience and --resume go on"
    )


def test_another_metric_starts_anew() -> None:
    tracker = BestTracker(settings())
    tracker.observe(1, 0.5)
    saved = json.loads(json.dumps(tracker.state()["best"]))
    assert BestTracker(settings(), saved).best_step == 1
    assert BestTracker(settings(rises=True), saved).best_step is None
    other = BestSettings(metric="val_wer", higher_is_better=False)
    assert BestTracker(other, saved).best_step is None


@pytest.mark.parametrize(
    ("metric", "rises"),
    [("val_loss", False), ("val_drawing_loss", False), ("val_wer", False), ("val_exact", True), ("val_regex", True)],
)
def test_which_values_are_better_follows_from_the_metric(metric: str, rises: bool) -> None:
    assert BestSettings(metric=metric).rises is rises
    assert BestSettings(metric="val_of_a_plugin").rises is None
