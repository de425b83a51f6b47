"""A step of so many samples or tokens becomes a number of groups that holds them on average."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import Grouping, SampleLengths
from mmtrain.balance.grouping.groups_per_step import (
    MAX_ROUNDING_RATIO,
    BatchUnit,
    group_tokens_for,
    groups_in_step,
    mean_group,
)
from mmtrain.balance.grouping.methods import GROUPING_METHODS, GroupingMethod, num_spare_groups
from mmtrain.data import GroupStream


def make_lengths(num_samples: int = 2000, seed: int = 0) -> SampleLengths:
    rng = np.random.default_rng(seed)
    tokens = np.minimum(rng.geometric(0.02, num_samples), 400)
    return SampleLengths(tokens, np.ones_like(tokens), {})


@pytest.mark.parametrize("method", GROUPING_METHODS)
def test_mean_groups_are_those_of_training(method: GroupingMethod) -> None:
    lengths, grouping = make_lengths(), Grouping(1024, 16384, 8, method)
    stream = GroupStream(lengths, grouping, seed=3)
    in_epoch = [len(group) for group in stream.groups(0, stream.groups_per_epoch)]
    mean = mean_group(lengths, grouping)
    spare = num_spare_groups(len(in_epoch), grouping) / len(in_epoch)  # few in data that is not as small
    assert mean.samples == pytest.approx(np.mean(in_epoch), rel=0.01 + spare)
    assert mean.tokens == pytest.approx(lengths.tokens.sum() / len(in_epoch), rel=0.01 + spare)
    assert mean.groups_of({"samples": 100}) == 100 / mean.samples
    assert mean.groups_of({"tokens": 9000}) == 9000 / mean.tokens


@given(st.floats(0.1, 3000), st.integers(1, 12), st.integers(1, 64))
def test_a_number_of_groups_is_near_and_divisible(mean_groups: float, multiple_of: int, num_ranks: int) -> None:
    number = groups_in_step(mean_groups, multiple_of, num_ranks)
    assert number % multiple_of == 0
    multiples = range(multiple_of, math.ceil(2 * mean_groups) + 2 * multiple_of, multiple_of)
    near = [other for other in multiples if abs(other - mean_groups) <= MAX_ROUNDING_RATIO * mean_groups]
    if not near:
        assert abs(number - mean_groups) <= multiple_of / 2
        return
    assert number in near
    divided_by = num_ranks * 2**20
    assert math.gcd(number, divided_by) == max(math.gcd(other, divided_by) for other in near)


@pytest.mark.parametrize("method", GROUPING_METHODS)
@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_groups_of_the_size_for_a_step_make_it(method: GroupingMethod, unit: BatchUnit) -> None:
    lengths, num_groups = make_lengths(), 12
    batch = {unit: 300 if unit == "samples" else 14_000}
    grouping = Grouping(1, 16384, num_groups, method)
    size = group_tokens_for(lengths, grouping, batch)
    sized = Grouping(size, 16384, num_groups, method)
    rounding = 2 * MAX_ROUNDING_RATIO if method == "device" else MAX_ROUNDING_RATIO  # groups of as many samples
    assert mean_group(lengths, sized).groups_of(batch) == pytest.approx(num_groups, rel=rounding)
