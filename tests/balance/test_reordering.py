import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import reordering as reorder
from mmtrain.balance import uneven_stage as uneven
from mmtrain.balance.makespan_1f1b import makespans_1f1b


def _one_pipeline(forward: np.ndarray, backward: np.ndarray, order: list[int]) -> float:
    """1F1B told action by action: every stage its list, each action after its stage's last and its neighbour's."""
    p, num = forward.shape
    todo: list[list[tuple[str, int]]] = []
    for s in range(p):
        warm = min(p - s - 1, num)
        actions = [("F", i) for i in range(warm)]
        for j in range(num):
            if warm + j < num:
                actions.append(("F", warm + j))
            actions.append(("B", j))
        todo.append(actions)
    end: dict[tuple[str, int, int], float] = {}
    clock = [0.0] * p
    while any(todo):
        for s in range(p):
            if not todo[s]:
                continue
            kind, i = todo[s][0]
            into = ("F", s - 1, i) if s else None
            back = ("B", s + 1, i) if s < p - 1 else ("F", s, i)
            needs = into if kind == "F" else back
            if needs is not None and needs not in end:
                continue
            seconds = (forward if kind == "F" else backward)[s, order[i]]
            clock[s] = max(clock[s], end[needs] if needs else 0.0) + float(seconds)
            end[kind, s, i] = clock[s]
            todo[s].pop(0)
    return max(clock)


def _times(seed: int, p: int, num: int, chains: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.gamma(2.0, 0.5, (chains, p, num)), rng.gamma(2.0, 1.0, (chains, p, num))


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 14), st.integers(1, 3))
def test_the_recurrence_is_1f1b(seed: int, p: int, num: int, chains: int) -> None:
    forward, backward = _times(seed, p, num, chains)
    rng = np.random.default_rng(seed)
    orders = np.stack([rng.permutation(num) for _ in range(3)])
    found = makespans_1f1b(forward, backward, orders)
    for order, span in zip(orders.tolist(), found.tolist(), strict=True):
        told = [_one_pipeline(f, b, order) for f, b in zip(forward, backward, strict=True)]
        assert span == pytest.approx(max(told))
        for f, b, chain in zip(forward, backward, told, strict=True):
            assert reorder.makespan_lower_bound(f, b) <= chain + 1e-9


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 16), st.integers(1, 2))
def test_an_order_is_a_permutation_and_never_worse_than_given(seed: int, p: int, num: int, chains: int) -> None:
    forward, backward = _times(seed, p, num, chains)
    given_order = np.random.default_rng(seed).permutation(num)
    found, again = (
        reorder.reorder_microbatches(forward, backward, given_order, 2, np.random.default_rng(seed)) for _ in range(2)
    )
    assert sorted(found.tolist()) == list(range(num))
    before, after = makespans_1f1b(forward, backward, np.stack([given_order, found]))
    assert after <= before
    assert found.tolist() == again.tolist()
    built = reorder.construct_order(forward[0], backward[0], given_order)
    assert sorted(built.tolist()) == list(range(num))


def test_the_search_is_near_the_best_of_all_orders() -> None:
    everything = np.array(list(itertools.permutations(range(6))))
    ratios = []
    for seed, p in itertools.product(range(10), (2, 3, 4)):
        forward, backward = _times(seed, p, 6)
        found = reorder.reorder_microbatches(forward, backward, np.arange(6), 10, np.random.default_rng(seed))
        span = makespans_1f1b(forward, backward, found[None])[0]
        ratios.append(span / makespans_1f1b(forward, backward, everything).min())
    assert np.mean(ratios) < 1.04
    assert max(ratios) < 1.15


def _encoder_first(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten stages, the first an encoder whose times vary; 64 microbatches."""
    forward = np.ones((1, 10, 64))
    forward[0, 0] = np.random.default_rng(seed).gamma(1 / 0.36, 0.9 * 0.36, 64)
    return forward, 2 * forward


def test_reordering_removes_most_of_what_chance_costs() -> None:
    removed, by_rule = [], []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        forward, backward = _encoder_first(seed)
        chance = makespans_1f1b(forward, backward, np.stack([rng.permutation(64) for _ in range(50)])).mean()
        found = reorder.reorder_microbatches(forward, backward, np.arange(64), 12, rng)
        built = reorder.construct_order(forward[0], backward[0], np.arange(64))
        left, left_by_rule = makespans_1f1b(forward, backward, np.stack([found, built]))
        excess = chance - reorder.makespan_lower_bound(forward[0], backward[0])
        removed.append((chance - left) / excess)
        by_rule.append((chance - left_by_rule) / excess)
    assert np.mean(removed) > 0.85
    assert 0.2 < np.mean(by_rule) < np.mean(removed)


def test_the_constructed_order_begins_and_ends_small() -> None:
    forward, backward = _encoder_first(0)
    order = reorder.construct_order(forward[0], backward[0], np.arange(64))
    by_size = np.argsort(forward[0, 0], kind="stable")
    assert order[0] == by_size[0]
    assert set(order[-9:].tolist()) == set(by_size[1:10].tolist())


@given(st.integers(0, 10_000), st.sampled_from([(3, 12), (6, 14), (10, 30)]))
def test_where_the_first_stage_is_uneven_a_swap_gains_what_the_formula_says(seed: int, case: tuple[int, int]) -> None:
    p, num = case
    rng = np.random.default_rng(seed)
    forward = np.ones((1, p, num))
    forward[0, 0] = rng.gamma(1 / 0.36, 0.9 * 0.36, num)
    backward = 2 * forward
    order = rng.permutation(num)
    change = uneven.replacement_changes(uneven.uneven_stage(forward[0], backward[0]), order)[:, order]
    gain = change + change.T
    uneven.forbid_dependent_swaps(gain, p)
    assert (gain < 0).any()
    pairs = np.argwhere(gain)
    orders = np.repeat(order[None], len(pairs) + 1, axis=0)  # the last stays as it is
    for row, (i, j) in zip(orders, pairs, strict=False):
        row[[i, j]] = row[[j, i]]
    makespans = makespans_1f1b(forward, backward, orders)
    predicted = [0.0, *gain[tuple(pairs.T)]]
    measured = [0.0, *(makespans[:-1] - makespans[-1])]
    exact = np.isclose(predicted, measured, atol=1e-9)
    assert exact.mean() > (0.99 if p == 10 else 0.5), "with few stages the warm-up is not always hidden"
    assert np.corrcoef(predicted, measured)[0, 1] > (0.99 if p == 10 else 0.5)


def test_an_expired_search_returns_its_start() -> None:
    forward, backward = _encoder_first(1)
    calls = iter([False, True])
    one_round = reorder.reorder_microbatches(
        forward, backward, np.arange(64), 50, np.random.default_rng(0), expired=lambda: next(calls)
    )
    alone = reorder.reorder_microbatches(forward, backward, np.arange(64), 1, np.random.default_rng(0))
    assert one_round.tolist() == alone.tolist()


@given(st.lists(st.integers(1, 50), min_size=6, max_size=6), st.sampled_from([2, 3]))
def test_samples_are_dealt_longest_first_in_equal_numbers(sizes: list[int], replicas: int) -> None:
    replica = reorder.across_replicas(np.array(sizes), replicas, equal_counts=True)
    assert np.bincount(replica, minlength=replicas).tolist() == [6 // replicas] * replicas
    loads = np.bincount(replica, weights=sizes, minlength=replicas)
    best = min(
        max(sum(s for s, c in zip(sizes, choice, strict=True) if c == r) for r in range(replicas))
        for choice in itertools.product(range(replicas), repeat=6)
        if all(choice.count(r) == 6 // replicas for r in range(replicas))
    )
    assert loads.max() <= 4 / 3 * best


def test_unequal_counts_are_refused_where_they_must_match() -> None:
    with pytest.raises(ValueError, match="5 samples cannot be dealt to 2 replicas"):
        reorder.across_replicas(np.arange(5), 2, equal_counts=True)
    assert len(reorder.across_replicas(np.arange(5), 2, equal_counts=False)) == 5
