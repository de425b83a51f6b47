"""Steps drawn at random and matched inside: as random as chance, every sample kept, rows of alike groups."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import dist_ratio
from mmtrain.balance.grouping.pack_groups import SampleGroups
from mmtrain.balance.grouping.random_order import random_order
from mmtrain.balance.matched import group_exchange
from mmtrain.balance.matched.group_exchange import GroupTable
from mmtrain.balance.matched.regroup_step import match_step
from mmtrain.balance.matched.row_targets import CoarseLoad, adapt_targets, raise_to_row, row_targets
from mmtrain.balance.matched.step_matching import draw_steps


@pytest.mark.parametrize("step_size", [8, 48, 64])
def test_steps_vary_as_chance_would_make_them_and_divide_evenly(step_size: int) -> None:
    rng = np.random.default_rng(0)
    tiles = np.clip(rng.normal(12, 3, 64 * step_size).round(), 0, 20).astype(np.int64)
    steps = []
    for seed in range(20):
        draw = np.random.default_rng(seed)
        order = draw_steps(1024 * tiles, (draw.permutation(len(tiles)), 1.0), step_size, 0, draw)
        steps.append(tiles[order].reshape(-1, step_size))
    means = np.stack(steps).mean(axis=2)
    assert 0.8 < means.var() / (tiles.var() / step_size) < 1.2
    divisor, num_missing = {8: (4, 0), 48: (16, 1), 64: (16, 1)}[step_size]
    assert ((np.stack(steps).sum(axis=2) + num_missing) % divisor == 0).mean() > 0.95


def test_totals_that_no_single_exchange_makes_even_are_reached_by_several() -> None:
    rng = np.random.default_rng(0)
    tiles = rng.integers(10, 15, 40 * 2048)  # no two groups differ by more than 4, and the divisor is 32
    order = draw_steps(tiles, (rng.permutation(len(tiles)), 1.0), 2048, 0, rng)
    totals = tiles[order].reshape(-1, 2048).sum(axis=1)
    assert ((totals + 2) % 32 == 0).mean() > 0.95
    assert 0.5 < totals.var() / (2048 * tiles.var()) < 1.7, "of 40 steps"


@given(st.integers(0, 1000), st.integers(0, 40), st.integers(1, 12), st.integers(0, 30))
def test_every_group_is_in_one_step(seed: int, num_groups: int, step_size: int, num_before: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, num_groups)
    tokens = rng.integers(0, 6, (int(sizes.sum()), 3))
    groups = SampleGroups(np.concatenate([[0], np.cumsum(sizes)]), rng.permutation(len(tokens)))
    drawn = random_order(groups, tokens, step_size, num_before, rng)
    assert sorted(drawn[0].tolist()) == list(range(num_groups))
    order = draw_steps(rng.integers(0, 6, num_groups), drawn, step_size, num_before, rng)
    assert sorted(order.tolist()) == list(range(num_groups))


def test_steps_of_groups_of_alike_samples_vary_as_shuffled_samples_do() -> None:
    """Samples are packed by size, as where two or three of them fill a group: those of one kind share groups."""
    rng = np.random.default_rng(0)
    tiles = rng.choice([3, 5, 7, 9], 12_000)
    tokens = np.stack([256 * tiles + rng.integers(20, 300, len(tiles)), tiles], axis=1)
    num_tokens, num_groups = tokens.sum(axis=0), len(tiles) // 3
    surplus = tiles - num_tokens[1] / num_tokens[0] * tokens[:, 0]
    groups = SampleGroups(np.arange(0, len(tiles) + 1, 3), np.argsort(surplus))
    of_groups = surplus[groups.samples].reshape(-1, 3).sum(axis=1)

    def variance_over_chance(orders: list[np.ndarray]) -> float:
        steps = np.concatenate([of_groups[order].reshape(-1, 40).sum(axis=1) for order in orders])
        return float(steps.var() / (40 * 3 * surplus.var()))

    drawn = [random_order(groups, tokens, 40, 0, np.random.default_rng(seed)) for seed in range(20)]
    shuffled = [np.random.default_rng(seed).permutation(num_groups) for seed in range(20)]
    assert variance_over_chance(shuffled) > 2.5
    assert 0.2 < variance_over_chance([order for order, _ in drawn]) < 1.2
    fullness = tokens[groups.samples, 0].reshape(-1, 3).sum(axis=1)
    spreads = [
        np.std([fullness[order].reshape(-1, 40).sum(axis=1) for order in orders])
        for orders in (shuffled, [order for order, _ in drawn])
    ]
    assert spreads[1] < 0.5 * spreads[0], "steps hold as many tokens"
    steps_of_first = {int(np.flatnonzero(order == 0)[0]) // 40 for order, _ in drawn}
    assert len(steps_of_first) > 15, "any group may come into any step"


def test_groups_that_vary_as_chance_makes_them_come_in_plain_random_order() -> None:
    rng = np.random.default_rng(0)
    tokens = np.stack([np.full(600, 50), rng.integers(0, 9, 600)], axis=1)
    groups = SampleGroups(np.arange(0, 601, 3), rng.permutation(600))
    order, left_share = random_order(groups, tokens, 8, 3, np.random.default_rng(4))
    assert order.tolist() == np.random.default_rng(4).permutation(200).tolist()
    assert left_share == 1.0


@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2**30]))
def test_matching_keeps_samples_and_budgets(seed: int, num_rows: int, num_replicas: int, cost: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, num_rows * num_replicas)
    samples = rng.permutation(int(sizes.sum()))
    groups = np.split(samples, np.cumsum(sizes)[:-1])
    tokens = np.stack([rng.integers(1, 12, len(samples)), rng.integers(0, 4, len(samples))], axis=1)
    loads = tokens[:, ::-1] * cost
    matched, again = (match_step(groups, tokens, np.array([48, 12]), loads, [0.7, 0.3], num_replicas) for _ in range(2))
    assert [group.tolist() for group in matched] == [group.tolist() for group in again]
    assert len(matched) == len(groups)
    assert all(len(group) for group in matched)
    assert sorted(np.concatenate(matched).tolist()) == sorted(samples.tolist())
    tokens_of_sample = tokens[np.argsort(samples)]
    assert all((tokens_of_sample[group].sum(axis=0) <= [48, 12]).all() for group in matched)


def test_rows_of_a_random_step_are_alike() -> None:
    rng = np.random.default_rng(1)
    tiles = rng.choice([0, 1, 3, 5, 7], 64 * 5, p=[0.48, 0.1, 0.08, 0.2, 0.14])
    tokens = np.stack([256 * tiles + rng.integers(40, 300, len(tiles)), tiles], axis=1)
    groups = np.split(np.arange(len(tiles)), 64)
    budgets = np.array([int(max(tokens[group, 0].sum() for group in groups)), 1000])
    matched = match_step(groups, tokens, budgets, tokens[:, ::-1], [0.7, 0.3], 8)
    before, after = (
        dist_ratio(np.stack([tokens[group].sum(axis=0) for group in step]).reshape(8, 8, 2))
        for step in (groups, matched)
    )
    assert (after < [0.01, 0.02]).all()
    assert (before > [0.1, 0.3]).all()


@given(st.integers(0, 10_000))
def test_a_round_makes_the_best_exchange_of_a_pair(seed: int) -> None:
    """Compare with every exchange of at most two samples each way."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 9, (6, 2)).astype(np.float64)
    weights, targets = np.array([0.7, 0.3]), rng.integers(8, 16, (2, 2)).astype(np.float64)

    def squares(groups: list[list[int]]) -> float:
        loads = np.stack([sizes[group].sum(axis=0) for group in groups])
        return float(((loads - targets) ** 2 @ weights).sum())

    first, second = [0, 1, 2], [3, 4, 5]
    offers = [[list(c) for k in range(3) for c in itertools.combinations(group, k)] for group in (first, second)]
    before = [int(sizes[group, 0].sum()) for group in (first, second)]
    best = squares([first, second])
    for giving, taking in itertools.product(*offers):
        after = [
            [*(s for s in first if s not in giving), *taking],
            [*(s for s in second if s not in taking), *giving],
        ]
        used = [int(sizes[group, 0].sum()) for group in after]
        if all(after) and all(now <= max(22, then) for now, then in zip(used, before, strict=True)):
            best = min(best, squares(after))
    table = GroupTable(np.repeat([0, 1], 3), 2, sizes, targets, weights)
    table.limit(sizes[:, 0].astype(np.int64), 22)
    table.bring_to_targets(0, -1.0, 1, num_exchanged=2)
    exchanged = [group.tolist() for group in table.groups()]
    assert squares(exchanged) == pytest.approx(best, abs=1e-6)
    assert table.excess[1] == pytest.approx([sizes[group, 1].sum() for group in exchanged] - targets[:, 1])


def test_a_group_above_the_budget_gives_to_others() -> None:
    tokens = np.array([50, 40, 30, 45, 20, 5, 40, 30])
    table = GroupTable(np.array([0, 0, 0, 1, 1, 1, 2, 2]), 3, tokens[:, None] / 90, np.ones((3, 1)), np.ones(1))
    table.limit(tokens, 90)
    assert not table.is_within_limits
    table.bring_within_limits(10)
    assert table.is_within_limits
    assert sorted(np.concatenate(table.groups()).tolist()) == list(range(8))


def test_a_group_alone_above_a_budget_finds_the_partner_that_can_take_its_tokens_in_one_round() -> None:
    tokens = np.array([60, 50, 85, 86, 87, 50, 38, 95, 96, 97])
    group = np.array([0, 0, 1, 2, 3, 4, 4, 5, 6, 7])
    table = GroupTable(group, 8, tokens[:, None] / 88, np.ones((8, 1)), np.ones(1))
    table.limit(tokens, 100)
    table.bring_within_limits(1)
    assert table.is_within_limits
    assert [members.tolist() for number, members in enumerate(table.groups()) if number not in (0, 4)] == [
        np.flatnonzero(group == number).tolist() for number in (1, 2, 3, 5, 6, 7)
    ]


def test_what_a_group_has_too_much_reaches_the_one_that_lacks_it_through_others() -> None:
    """The first two groups have no exchange of one unit that keeps to the budget; the third has one with each."""
    units = np.array([7, 7, 7, 5, 6, 6, 1])
    tokens = np.array([50, 50, 50, 42, 45, 45, 4])
    group = np.array([0, 0, 1, 1, 2, 2, 2])
    table = GroupTable(group, 3, units[:, None] / 13, np.ones((3, 1)), np.ones(1))
    table.limit(tokens, 100)
    table.relieve(0, 0.01, 30)  # more than a sixteenth of the groups: nothing is done
    assert table.group_of_samples().tolist() == group.tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_exchange, "MAX_RELIEVED_SHARE", 0.5)
        table.relieve(0, 0.01, 30)
    assert [units[members].sum() for members in table.groups()] == [13, 13, 12 + 1]
    assert table.is_within_limits


def test_few_groups_that_lack_a_unit_may_have_as_much_as_their_row() -> None:
    targets = np.array([3, *[4] * 7, *[4] * 4, *[5] * 4, *[0] * 2, *[6] * 6])
    raised = raise_to_row(targets, 8)
    assert raised.reshape(3, 8).tolist() == [[4] * 8, [4] * 4 + [5] * 4, [0, 0] + [6] * 6]


def test_a_row_with_a_text_that_fills_a_group_gets_few_images() -> None:
    units = np.repeat([0, 5, 4], [16, 20, 1])  # of samples
    tokens = np.repeat([300, 100, 4000], [1, 1, 1])[np.repeat([0, 1, 2], [16, 20, 1])]
    load = CoarseLoad.of(1024 * np.concatenate([units[:-5], units[-5:-1], [0]]), tokens, 8)
    targets = row_targets(load, 8, 2)
    assert targets.sum() == load.units.sum()
    assert targets[0] < 5
    assert (np.diff(targets.reshape(4, 2), axis=1)[1:] <= 1).all()


@given(st.integers(0, 1000), st.sampled_from([(1, 8), (4, 4), (8, 2)]))
def test_adapted_targets_have_as_many_units(seed: int, size: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    units = rng.integers(10, 14, size[0] * size[1])
    sums = np.round(np.arange(len(units) + 1) * units.mean()).astype(np.int64)
    targets = np.sort(np.diff(sums))
    adapted = adapt_targets(units, targets, size[1])
    assert adapted.sum() == units.sum()
    assert np.abs(adapted - units).sum() <= np.abs(targets - units).sum()


def test_fine_loads_leave_out_what_every_token_has() -> None:
    """Beside images, which cost twice as much per token, texts are light although they cost something."""
    tokens = np.repeat([300, 2000], [50, 50])
    load = CoarseLoad.of(tokens * np.repeat([1000, 2000], 50), tokens, 10)
    assert load.is_light.tolist() == [True] * 50 + [False] * 50
    assert np.abs(load.units[:50]).max() <= 1
    assert not load.is_coarse
