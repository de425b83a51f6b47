"""Post-balancing against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import BatchCost, rebalance
from mmtrain.balance.dispatch import post_balancing
from tests.call_counter import count_calls

COSTS = [
    BatchCost(),
    BatchCost(quadratic=0.1),
    BatchCost("padded"),
    BatchCost("padded", quadratic=0.05),
]
small = st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 3), st.integers(0, 1000))


def _by_formula(cost: BatchCost, batch: list[int]) -> float:
    """Return one rank's cost by the formula of OrchMLLM."""
    if not batch:
        return 0.0
    padded = len(batch) * max(batch)
    if cost.kind == "padded":
        return cost.linear * padded + cost.quadratic * padded**2 / len(batch)
    return cost.linear * sum(batch) + cost.quadratic * sum(x * x for x in batch)


def _largest(cost: BatchCost, lengths: list[int], rank: list[int], num_ranks: int) -> float:
    return max(
        _by_formula(cost, [x for x, r in zip(lengths, rank, strict=True) if r == rank_]) for rank_ in range(num_ranks)
    )


def _optimum(cost: BatchCost, lengths: list[int], num_ranks: int) -> float:
    choices = itertools.product(range(num_ranks), repeat=len(lengths))
    return min(_largest(cost, lengths, list(choice), num_ranks) for choice in choices)


@pytest.mark.parametrize("cost", COSTS, ids=lambda c: f"{c.kind}-{c.quadratic}")
@given(small)
def test_each_algorithm_is_near_the_optimum_of_its_objective(cost: BatchCost, case: tuple[list[int], int, int]) -> None:
    lengths, num_ranks, seed = case
    source = np.random.default_rng(seed).integers(0, num_ranks, len(lengths))
    rank = rebalance(np.array(lengths), source, num_ranks, cost)

    largest = _largest(cost, lengths, rank.tolist(), num_ranks)
    assert largest == pytest.approx(cost.of_ranks(np.array(lengths), rank, num_ranks).max())
    assert largest <= _largest(cost, lengths, source.tolist(), num_ranks) + 1e-9, "never worse than no move"
    optimum = _optimum(cost, lengths, num_ranks)
    bound = {"packed": 4 / 3, "padded": 1 + 1e-5}[cost.kind]
    assert largest <= bound * optimum + 1e-9


def _heavy_tailed(rng: np.random.Generator, n: int, tail: str) -> np.ndarray:
    """Draw lengths of which a few hold most of the tokens."""
    draws = {
        "pareto": lambda: 1 + 20 * rng.pareto(0.9, n),
        "lognormal": lambda: 1 + rng.lognormal(3, 2.5, n),
        "tiny and huge": lambda: np.where(rng.random(n) < 0.9, rng.integers(1, 4, n), 100_000),
        "equal": lambda: np.full(n, 7),
    }
    return np.minimum(draws[tail](), 2**30).astype(np.int64)


TAILS = st.sampled_from(["pareto", "lognormal", "tiny and huge", "equal"])


@given(st.integers(0, 10_000), st.integers(0, 300), st.integers(1, 40), TAILS)
def test_assigning_many_at_once_is_assigning_one_by_one(seed: int, n: int, num_ranks: int, tail: str) -> None:
    lengths = _heavy_tailed(np.random.default_rng(seed), n, tail).astype(np.float64)
    order = np.argsort(-lengths, kind="stable")
    loads = [0.0] * num_ranks
    for i in order.tolist():
        loads[loads.index(min(loads))] += lengths[i]
    for min_ranks, run in [(0, 1), (0, 7), (1000, 4096)]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(post_balancing, "MIN_RANKS_TO_VECTORIZE", min_ranks)
            patch.setattr(post_balancing, "SAMPLES_PER_HEAP_RUN", run)
            rank = post_balancing.assign_greedily(lengths, order, num_ranks)
        assert sorted(np.bincount(rank, weights=lengths, minlength=num_ranks)) == pytest.approx(sorted(loads))


def test_many_short_samples_beside_long_ones_take_few_rounds() -> None:
    lengths = np.concatenate([np.full(255, 10**7), np.random.default_rng(0).integers(1, 9, 20_000)])
    source = np.arange(len(lengths)) % 256
    calls = count_calls(lambda: rebalance(lengths, source, 256, BatchCost()))
    loads = np.bincount(rebalance(lengths, source, 256, BatchCost()), weights=lengths, minlength=256)
    assert loads.max() == 10**7
    assert calls < 5 * len(lengths), "a round for each short sample would be three times as many"


def test_what_one_rank_takes_in_a_row_is_assigned_at_once() -> None:
    lengths = np.concatenate([np.full(255, 10**7), np.random.default_rng(0).integers(1, 9, 20_000)]).astype(np.float64)
    order = np.argsort(-lengths, kind="stable")
    calls = count_calls(lambda: post_balancing.assign_greedily(lengths, order, 256))
    assert calls < len(lengths) / 10
    assert set(post_balancing.assign_greedily(lengths, order, 256)[255:].tolist()) == {255}


def test_two_thousand_ranks_come_out_even() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6, 1, 2560 * 60).astype(np.int64), 1, 8192)
    cost = BatchCost(quadratic=1e-4)
    rank = rebalance(lengths, np.repeat(np.arange(2560), 60), 2560, cost)
    loads = cost.of_ranks(lengths, rank, 2560)
    assert loads.max() / loads.mean() < 1.001
    assert np.bincount(rank).sum() == len(lengths)


@pytest.mark.parametrize("cost", COSTS, ids=lambda c: f"{c.kind}-{c.quadratic}")
def test_no_samples_need_no_move(cost: BatchCost) -> None:
    none = np.empty(0, dtype=np.int64)
    assert len(rebalance(none, none, 2, cost)) == 0
