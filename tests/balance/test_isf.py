"""ISF against the algorithm one sample at a time, and the baselines that it is compared with."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import IntArray, SampleGroups, dist_ratio, pad_ratio
from mmtrain.balance.grouping import group_across_devices, group_by_isf, group_by_length, group_randomly


def _isf_by_hand(
    tokens: IntArray, budgets: IntArray, fill: IntArray, rounds: int, rng: np.random.Generator
) -> list[list[int]]:
    """Run OmniBal's algorithm as its paper describes it, one sample after another."""

    def fill_groups(order: list[int]) -> list[list[int]]:
        groups: list[list[int]] = []
        for sample in order:
            if groups and (tokens[[*groups[-1], sample]].sum(axis=0) <= budgets).all():
                groups[-1].append(sample)
            else:
                groups.append([sample])
        return groups

    pool = list(range(len(tokens)))
    full_groups: list[list[int]] = []
    for _ in range(rounds):
        closed = fill_groups(rng.permutation(np.array(pool, dtype=np.int64)).tolist())
        full = [(tokens[g].sum(axis=0) >= fill).any() for g in closed]
        full_groups += [g for g, is_full in zip(closed, full, strict=True) if is_full]
        pool = [s for g, is_full in zip(closed, full, strict=True) if not is_full for s in g]
    return full_groups + fill_groups(rng.permutation(np.array(pool, dtype=np.int64)).tolist())


def _as_sets(groups: SampleGroups) -> list[tuple[int, ...]]:
    return sorted(tuple(groups[i].tolist()) for i in range(len(groups)))


@given(st.integers(0, 10_000), st.integers(0, 60), st.integers(1, 3), st.integers(0, 4))
def test_isf_equals_the_algorithm_one_sample_at_a_time(seed: int, n: int, m: int, rounds: int) -> None:
    rng = np.random.default_rng(seed)
    budgets = rng.integers(5, 30, m)
    tokens = rng.integers(0, 12, (n, m))  # some above a budget alone
    fill = budgets - rng.integers(0, 4, m)

    groups = group_by_isf(tokens, budgets, fill, rounds, np.random.default_rng(seed))

    by_hand = _isf_by_hand(tokens, budgets, fill, rounds, np.random.default_rng(seed))
    assert _as_sets(groups) == sorted(map(tuple, by_hand))
    assert sorted(groups.samples.tolist()) == list(range(n))
    assert groups.loads(tokens).tolist() == [tokens[groups[i]].sum(axis=0).tolist() for i in range(len(groups))]
    for i in range(len(groups)):
        assert len(groups[i]) == 1 or (tokens[groups[i]].sum(axis=0) <= budgets).all()


def test_isf_makes_mostly_full_groups_and_strands_the_rest() -> None:
    rng = np.random.default_rng(0)
    tokens = np.stack([rng.integers(50, 1500, 5000), rng.integers(0, 6, 5000)], axis=1)
    budgets, fill = np.array([4096, 12]), np.array([4096 - 128, 12])
    loads = group_by_isf(tokens, budgets, fill, 10, rng).loads(tokens)
    full = (loads >= fill).any(axis=1)
    assert 0.5 < full.mean() < 0.98
    assert (loads / budgets).max(axis=1)[full].mean() > 0.98


@given(st.integers(0, 1000), st.integers(0, 80), st.integers(1, 6), st.integers(1, 4))
def test_baselines_use_every_sample_once_in_batches_of_the_given_size(
    seed: int, n: int, batch: int, replicas: int
) -> None:
    tokens = np.random.default_rng(seed).integers(1, 100, (n, 2))
    loose = np.full(2, 100 * batch)
    tight = np.array([250, 180])
    by_budgets = [
        (
            group_randomly(tokens, budgets, batch, np.random.default_rng(seed)),
            group_by_length(tokens, budgets, batch, 20, np.random.default_rng(seed)),
            group_across_devices(tokens, budgets, batch, replicas, 20, np.random.default_rng(seed)),
        )
        for budgets in (loose, tight)
    ]
    for groups in by_budgets[0]:
        assert sorted(groups.samples.tolist()) == list(range(n))
        assert sorted(groups.sizes.tolist(), reverse=True)[: n // batch] == [batch] * (n // batch)
        assert len(groups) == -(-n // batch)
    for groups in by_budgets[1]:
        assert sorted(groups.samples.tolist()) == list(range(n))
        assert (groups.loads(tokens) <= tight).all()
        assert n == 0 or 0 < groups.sizes.min() <= groups.sizes.max() <= batch


def test_each_baseline_is_good_at_what_it_is_named_for() -> None:
    rng = np.random.default_rng(5)
    lengths = rng.integers(10, 1000, 4000)
    tokens = lengths[:, None]
    loose = np.array([5000])
    by_method = {
        "random": group_randomly(tokens, loose, 5, rng),
        "length": group_by_length(tokens, loose, 5, 2000, rng),
        "device": group_across_devices(tokens, loose, 5, 8, 2000, rng),
    }
    pad = {name: pad_ratio(lengths, groups) for name, groups in by_method.items()}
    dist = {name: dist_ratio(g.loads(lengths[:, None]).reshape(-1, 8, 1))[0] for name, g in by_method.items()}
    assert pad["length"] < 0.05 < 0.3 < min(pad["random"], pad["device"])
    assert dist["device"] < 0.05 < 0.2 < min(dist["random"], dist["length"])


def test_the_same_generator_gives_the_same_groups() -> None:
    tokens = np.random.default_rng(1).integers(1, 9, (200, 2))
    first, second = (
        group_by_isf(tokens, np.array([30, 30]), np.array([28, 29]), 5, np.random.default_rng(7)) for _ in range(2)
    )
    assert first.samples.tolist() == second.samples.tolist()
    assert first.first.tolist() == second.first.tolist()


def test_reordered_groups_keep_their_samples() -> None:
    groups = SampleGroups(np.array([0, 2, 3, 6]), np.array([5, 4, 3, 2, 1, 0]))
    reordered = groups.reordered(np.array([2, 0]))
    assert [reordered[i].tolist() for i in range(len(reordered))] == [[2, 1, 0], [5, 4]]
    with pytest.raises(IndexError):
        groups.reordered(np.array([3]))
