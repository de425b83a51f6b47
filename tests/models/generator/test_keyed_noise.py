"""Noise, timesteps and dropped conditions follow from the image's key alone, and are distributed as they should be."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from mmtrain.models.generator.keyed_noise import (
    ImageKey,
    draw_dropped_conditions,
    draw_flow_times,
    draw_noise,
    draw_steps,
)

KEY = ImageKey(seed=1, step=2, sample=3, item=0)
MANY = [ImageKey(seed=1, step=2, sample=sample, item=0) for sample in range(2000)]
MIN_P_VALUE = 0.01  # of tests for a distribution, under fixed seeds


def test_an_images_noise_does_not_depend_on_the_images_beside_it() -> None:
    other = replace(KEY, sample=4)
    both = draw_noise([KEY, other], [5, 7], width=6)
    assert both.shape == (12, 6)
    assert np.array_equal(both[:5], draw_noise([KEY], [5], width=6))
    assert np.array_equal(both[5:], draw_noise([other], [7], width=6))
    assert draw_noise([], [], width=6).shape == (0, 6)


@pytest.mark.parametrize("change", [{"seed": 9}, {"step": 9}, {"sample": 9}, {"item": 9}], ids=lambda c: next(iter(c)))
def test_every_part_of_the_key_changes_the_noise(change: dict[str, Any]) -> None:
    first, second = (draw_noise([key], [8], width=8) for key in (KEY, replace(KEY, **change)))
    assert not np.isclose(first, second).any()


def test_equal_numbers_of_any_type_are_one_key() -> None:
    same = ImageKey(seed=np.int64(1), step=np.int64(2), sample=np.int64(3), item=np.int32(0))  # type: ignore[arg-type]
    assert np.array_equal(draw_noise([KEY], [3], 2), draw_noise([same], [3], 2))


def test_noise_is_normal_and_steps_are_uniform() -> None:
    noise = draw_noise(MANY, [4] * len(MANY), width=2)
    assert stats.kstest(noise.ravel(), "norm").pvalue > MIN_P_VALUE
    steps = draw_steps(MANY, 10)
    assert stats.chisquare(np.bincount(steps, minlength=10)).pvalue > MIN_P_VALUE


def test_flow_times_have_the_chosen_density() -> None:
    assert stats.kstest(draw_flow_times(MANY), "uniform").pvalue > MIN_P_VALUE
    times = draw_flow_times(MANY, "logit_normal").astype(np.float64)
    logits = np.log(times / (1 - times))
    assert stats.kstest(logits, "norm").pvalue > MIN_P_VALUE


def test_conditions_are_dropped_with_their_probability() -> None:
    assert not draw_dropped_conditions(MANY, 0.0).any()
    assert draw_dropped_conditions(MANY, 1.0).all()
    dropped = draw_dropped_conditions(MANY, 0.1)
    assert stats.binomtest(int(dropped.sum()), len(MANY), 0.1).pvalue > MIN_P_VALUE
    more = draw_dropped_conditions(MANY, 0.2)
    assert (more | ~dropped).all(), "an image that is dropped stays dropped when more are"
