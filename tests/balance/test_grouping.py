"""Packing by best fit against its definition and the best possible number of groups."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import pack_groups
from mmtrain.balance.grouping.pack_groups import best_fit
from tests.call_counter import count_calls


def _fewest_groups(sizes: list[int], budget: int) -> int:
    """Pack bins exactly: try every assignment, each set of bins once."""
    best = len(sizes)

    def place(i: int, loads: list[int]) -> None:
        nonlocal best
        if len(loads) >= best:
            return
        if i == len(sizes):
            best = len(loads)
            return
        for b in range(len(loads)):
            if loads[b] + sizes[i] <= budget:
                place(i + 1, [*loads[:b], loads[b] + sizes[i], *loads[b + 1 :]])
        place(i + 1, [*loads, sizes[i]])

    place(0, [])
    return best


@given(st.data())
def test_every_sample_once_within_every_budget_and_window(data: st.DataObject) -> None:
    m = data.draw(st.integers(1, 3))
    budgets = np.array(data.draw(st.lists(st.integers(1, 40), min_size=m, max_size=m)))
    n = data.draw(st.integers(0, 40))
    tokens = np.array([[data.draw(st.integers(0, int(b))) for b in budgets] for _ in range(n)], dtype=np.int64)
    tokens = tokens.reshape(n, m)
    order = np.array(data.draw(st.permutations(range(n))), dtype=np.int64)
    window = data.draw(st.integers(1, 15))

    groups = pack_groups(tokens, budgets, order, window)
    again = pack_groups(tokens, budgets, order, window)

    assert sorted(groups.samples.tolist()) == list(range(n))
    assert all((tokens[groups[i]].sum(axis=0) <= budgets).all() and len(groups[i]) for i in range(len(groups)))
    place = {int(s): p for p, s in enumerate(order)}
    windows = [[place[int(s)] // window for s in groups[i]] for i in range(len(groups))]
    assert all(len(set(w)) == 1 for w in windows), "a group mixes windows"
    assert [w[0] for w in windows] == sorted(w[0] for w in windows), "windows come out of order"
    assert all(sorted(g, key=place.__getitem__) == g.tolist() for g in map(groups.__getitem__, range(len(groups))))
    assert groups.samples.tolist() == again.samples.tolist()
    assert groups.first.tolist() == again.first.tolist()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_number_of_groups_is_near_the_best_possible(sizes: list[int]) -> None:
    tokens = np.array(sizes)[:, None]
    groups = pack_groups(tokens, np.array([20]), np.arange(len(sizes)), window=64)
    assert len(groups) <= 11 / 9 * _fewest_groups(sizes, 20) + 6 / 9  # the bound of best-fit decreasing


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.booleans())
def test_each_sample_joins_the_fullest_group_that_can_take_it(sizes: list[int], bound_twice: bool) -> None:
    order = np.random.default_rng(len(sizes) + sum(sizes)).permutation(len(sizes))
    tokens = np.array([sizes, [1] * len(sizes)]).T
    budgets = np.array([20, 4 if bound_twice else len(sizes)])
    rooms: list[list[int]] = []
    expected = [0] * len(sizes)
    for i in order.tolist():
        fits = [g for g, room in enumerate(rooms) if (tokens[i] <= room).all()]
        if bound_twice and int((tokens.sum(axis=0) / budgets).argmax()) == 1:
            return  # another group is the fullest then
        best = min(fits, key=lambda g: (rooms[g][0], g), default=len(rooms))
        if best == len(rooms):
            rooms.append(budgets.tolist())
        rooms[best] = [room - part for room, part in zip(rooms[best], tokens[i].tolist(), strict=True)]
        expected[i] = best
    assert best_fit(tokens, budgets, order).tolist() == expected


def test_repeated_samples_are_packed_as_often_as_the_order_names_them() -> None:
    groups = pack_groups(np.array([[6], [3]]), np.array([10]), np.array([0, 1, 0, 1, 1]), window=8)
    assert sorted(groups.samples.tolist()) == [0, 0, 1, 1, 1]


def test_groups_do_not_come_out_by_size() -> None:
    rng = np.random.default_rng(3)
    tokens = np.concatenate([rng.integers(1, 10, 500), rng.integers(60, 100, 500)])[:, None]
    groups = pack_groups(tokens, np.array([100]), rng.permutation(1000), window=1000)
    largest = [tokens[groups[i]].max() for i in range(len(groups))]
    counts = [len(groups[i]) for i in range(len(groups))]
    places = np.arange(len(groups))
    assert abs(np.corrcoef(places, largest)[0, 1]) < 0.15
    assert abs(np.corrcoef(places, counts)[0, 1]) < 0.15


def test_a_sample_above_the_budget_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="above a budget"):
        pack_groups(np.array([[11]]), np.array([10]), np.array([0]), window=4)


def test_a_hundred_thousand_samples_pack_tightly() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(50, 1000, (100_000, 1))
    groups = pack_groups(tokens, np.array([4096]), rng.permutation(100_000), window=16384)
    assert tokens.sum() / (4096 * len(groups)) > 0.99


def test_the_work_of_packing_grows_with_the_number_of_samples() -> None:
    """Check that twice as many samples in windows of one size take about twice as many calls."""

    def calls(num: int) -> int:
        rng = np.random.default_rng(0)
        tokens = rng.integers(50, 1000, (num, 1))
        return count_calls(lambda: pack_groups(tokens, np.array([4096]), rng.permutation(num), window=2048))

    assert calls(16_384) < 2.5 * calls(8_192) < 250_000


@pytest.mark.parametrize("num_budgets", [1, 2])
def test_memory_of_best_fit_does_not_grow_with_the_budget(num_budgets: int) -> None:
    budget = 2**20
    rng = np.random.default_rng(0)
    tokens = np.clip(rng.lognormal(11, 1, (500, num_budgets)), 1, budget).astype(np.int64)
    tracemalloc.start()
    best_fit(tokens, np.full(num_budgets, budget), rng.permutation(500))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2 * 2**20
