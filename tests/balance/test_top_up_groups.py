"""Half-empty groups take small samples from many: nothing is lost, and the step they fall into can be even."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import SampleGroups
from mmtrain.balance.top_up_groups import LOW, SMALL, top_up


def make(seed: int, num: int, low: int) -> tuple[SampleGroups, np.ndarray]:
    """Groups of about 100 tokens, `low` of them half as full; every third sample with two tokens of another kind."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 12, num * 40)
    members, at = [], 0
    for group in range(num):
        want, begin = (50 if group < low else 100), at
        while sizes[begin:at].sum() < want:
            at += 1
        members.append(np.arange(begin, at))
    order = rng.permutation(num)
    groups = [members[g] for g in order]
    first = np.concatenate([[0], np.cumsum([len(group) for group in groups])])
    return SampleGroups(first, np.concatenate(groups)), np.stack([sizes, 2 * (np.arange(len(sizes)) % 3 == 0)], axis=1)


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(0, 4))
def test_full_groups_give_little_and_none_overflows(seed: int, num: int, low: int) -> None:
    groups, tokens = make(seed, num, min(low, num))
    found = top_up(groups, tokens)
    assert sorted(found.samples) == sorted(groups.samples)
    assert len(found) == len(groups)
    before, after = groups.loads(tokens), found.loads(tokens)
    mean = before[:, 0].mean()
    was_low = before[:, 0] < LOW * mean
    assert (after[was_low] >= before[was_low]).all()
    assert (after[:, 0] <= np.maximum(mean, before[:, 0])).all()
    given_away = (before - after)[~was_low]
    assert (given_away[:, 0] >= 0).all()
    assert (given_away[:, 0] <= SMALL * mean).all()
    assert (after[:, 1] == before[:, 1]).all(), "samples with something of another unit stay"


def test_two_halves_among_many_are_filled() -> None:
    groups, tokens = make(0, 60, 2)
    before, after = groups.loads(tokens)[:, 0], top_up(groups, tokens).loads(tokens)[:, 0]
    assert (before < LOW * before.mean()).sum() == 2
    assert (after > LOW * before.mean()).all()
