"""ISF against the algorithm one sample at a time, and the baselines that it is compared with."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import Grouping, IntArray, ItemLengths, SampleGroups, SampleLengths, dist_ratio, pad_ratio
from mmtrain.balance.grouping.methods import IsfRules, grouping_sizes
from mmtrain.balance.grouping.pack_groups import (
    GroupingSizes,
    group_across_devices,
    group_by_isf,
    group_by_length,
    group_randomly,
)


def _isf_by_hand(
    tokens: IntArray, budgets: IntArray, fill: IntArray, rounds: int, rng: np.random.Generator
) -> tuple[list[list[int]], list[list[int]]]:
    """Run the algorithm as its paper describes it, one sample after another; return full groups and the others."""

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
    return full_groups, fill_groups(rng.permutation(np.array(pool, dtype=np.int64)).tolist())


def _as_sets(groups: SampleGroups) -> list[tuple[int, ...]]:
    return sorted(tuple(groups[i].tolist()) for i in range(len(groups)))


@given(st.integers(0, 10_000), st.integers(0, 60), st.integers(1, 3), st.integers(0, 4))
def test_isf_equals_the_algorithm_one_sample_at_a_time(seed: int, n: int, m: int, rounds: int) -> None:
    rng = np.random.default_rng(seed)
    budgets = rng.integers(5, 30, m)
    tokens = rng.integers(0, 12, (n, m))  # some above a budget alone
    fill = budgets - rng.integers(0, 4, m)

    groups = group_by_isf(tokens, budgets, fill, rounds, np.random.default_rng(seed))

    full, others = _isf_by_hand(tokens, budgets, fill, rounds, np.random.default_rng(seed))
    assert _as_sets(groups) == sorted(map(tuple, full + others))
    without_rest = group_by_isf(tokens, budgets, fill, rounds, np.random.default_rng(seed), keep_remainder=False)
    assert _as_sets(without_rest) == sorted(map(tuple, full or others))
    assert sorted(groups.samples.tolist()) == list(range(n))
    assert groups.loads(tokens).tolist() == [tokens[groups[i]].sum(axis=0).tolist() for i in range(len(groups))]
    for i in range(len(groups)):
        assert len(groups[i]) == 1 or (tokens[groups[i]].sum(axis=0) <= budgets).all()


def test_published_budgets_follow_from_the_data() -> None:
    tokens = np.array([300, 100, 200, 400])
    items = ItemLengths(np.array([0, 2, 2, 3, 5]), *(np.full(5, side) for side in (2, 2, 4, 1)))
    lengths = SampleLengths(tokens, tokens, {"vision": items})

    def sizes(**rules: object) -> GroupingSizes:
        return grouping_sizes(lengths, Grouping(1000, 64, 4, "isf", isf=IsfRules(**rules)))  # type: ignore[arg-type]

    assert sizes().budgets.tolist() == [1000, 20], "20 vision tokens in 1,000 of the LLM"
    published = sizes(token_budget="longest", encoder_budget="items")
    assert published.budgets.tolist() == [400, 2], "5 images in 1,000 tokens"
    assert published.tokens[np.arange(4)].tolist() == [[300, 2], [100, 0], [200, 1], [400, 2]]
    assert IsfRules(slack=0.25).least_loads(published.budgets).tolist() == [300, 2]
    assert IsfRules(slack=0.25, encoder_slack=0.5).least_loads(published.budgets).tolist() == [300, 1]


def test_slack_lets_native_resolutions_fill_a_budget() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(20, 60, 4000)  # tokens of one image of any size, few of which sum up to a budget exactly
    tokens = np.stack([8 + pixels // 4, pixels], axis=1)
    budgets = np.array([512, 512 * int(tokens[:, 1].sum()) // int(tokens[:, 0].sum())])

    def left_over(rules: IsfRules) -> float:
        least = rules.least_loads(budgets)
        groups = group_by_isf(tokens, budgets, least, rules.rounds, np.random.default_rng(1), keep_remainder=False)
        assert (groups.loads(tokens) >= least).any(axis=1).all()
        return 1 - len(groups.samples) / len(tokens)

    assert left_over(IsfRules()) < 0.05
    assert left_over(IsfRules(encoder_slack=0.0, slack=0.0)) > 0.2


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
