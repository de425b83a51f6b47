"""Top up half-empty groups with small samples of many others: no sample is lost and no group overflows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import SampleGroups
from mmtrain.balance.grouping.slack_packing import LOW_LOAD_SHARE, MAX_GIVEN_LOAD_SHARE, top_up


def make(seed: int, num: int, low: int) -> tuple[SampleGroups, np.ndarray]:
    """Make groups of 100 tokens, `low` of them half as full; every third sample has two tokens of another kind."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 12, num * 40)
    members: list[np.ndarray] = []
    end = 0
    for group in range(num):
        start = end
        while sizes[start:end].sum() < (50 if group < low else 100):
            end += 1
        members.append(np.arange(start, end))
    order = rng.permutation(num)
    groups = [members[g] for g in order]
    first = np.concatenate([[0], np.cumsum([len(group) for group in groups])])
    return SampleGroups(first, np.concatenate(groups)), np.stack([sizes, 2 * (np.arange(len(sizes)) % 3 == 0)], axis=1)


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(0, 4))
def test_full_groups_give_little_and_none_overflows(seed: int, num: int, low: int) -> None:
    groups, tokens = make(seed, num, min(low, num))
    topped_up = top_up(groups, tokens)
    assert sorted(topped_up.samples) == sorted(groups.samples)
    assert len(topped_up) == len(groups)
    before = groups.loads(tokens)
    after = topped_up.loads(tokens)
    mean = before[:, 0].mean()
    was_low = before[:, 0] < LOW_LOAD_SHARE * mean
    assert (after[was_low] >= before[was_low]).all()
    assert (after[:, 0] <= np.maximum(mean, before[:, 0])).all()
    given_away = (before - after)[~was_low]
    assert (given_away[:, 0] >= 0).all()
    assert (given_away[:, 0] <= MAX_GIVEN_LOAD_SHARE * mean).all()
    assert (after[:, 1] == before[:, 1]).all(), "samples with items of another unit stay"


def test_two_halves_among_many_are_filled() -> None:
    groups, tokens = make(0, 60, 2)
    before, after = groups.loads(tokens)[:, 0], top_up(groups, tokens).loads(tokens)[:, 0]
    assert (before < LOW_LOAD_SHARE * before.mean()).sum() == 2
    assert (after > LOW_LOAD_SHARE * before.mean()).all()
