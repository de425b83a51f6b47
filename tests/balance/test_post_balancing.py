"""Post-balancing against brute force, and the algebra of rearrangements."""

import itertools
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import BatchCost, Rearrangement, rebalance
from mmtrain.balance.dispatch import post_balancing
from tests.call_counter import count_calls

COSTS = [
    BatchCost(),
    BatchCost(quadratic=0.1),
    BatchCost("two_key"),
    BatchCost("padded"),
    BatchCost("padded", quadratic=0.05),
    BatchCost("convolution", padding=0.02),
]
small = st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 3), st.integers(0, 1000))


def _by_formula(cost: BatchCost, batch: list[int]) -> float:
    """Return one rank's cost by the formula of OrchMLLM."""
    if not batch:
        return 0.0
    padded = len(batch) * max(batch)
    if cost.kind == "padded":
        return cost.linear * padded + cost.quadratic * padded**2 / len(batch)
    if cost.kind == "convolution":
        return sum(batch) + cost.padding * len(batch) * max(batch) ** 2
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
    moved = rebalance(np.array(lengths), source, num_ranks, cost)

    assert sorted(zip(moved.dest_rank, moved.dest_slot, strict=True)) == sorted(
        (r, s) for r in range(num_ranks) for s in range(int((moved.dest_rank == r).sum()))
    )
    largest = _largest(cost, lengths, moved.dest_rank.tolist(), num_ranks)
    assert largest == pytest.approx(cost.of_ranks(np.array(lengths), moved.dest_rank, num_ranks).max())
    assert largest <= _largest(cost, lengths, source.tolist(), num_ranks) + 1e-9, "never worse than no move"
    optimum = _optimum(cost, lengths, num_ranks)
    bound = {"packed": 4 / 3, "two_key": 2.0, "padded": 1 + 1e-5, "convolution": 4 / 3}[cost.kind]
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


@given(st.integers(0, 10_000), st.integers(0, 300), st.integers(1, 40), TAILS, st.sampled_from([None, 1.0, 50.0]))
def test_assigning_many_at_once_is_assigning_one_by_one(
    seed: int, n: int, num_ranks: int, tail: str, step: float | None
) -> None:
    rng = np.random.default_rng(seed)
    lengths = _heavy_tailed(rng, n, tail).astype(np.float64)
    order = np.argsort(-lengths, kind="stable")
    sizes, stepped = lengths, None
    if step is not None:
        sizes, stepped = lengths / (lengths.sum() + 1), post_balancing.SteppedLoads(lengths, step)
    loads, coarse = [0.0] * num_ranks, [0.0] * num_ranks
    for i in order.tolist():
        keys = [(coarse[r] // (step or 1)) + loads[r] for r in range(num_ranks)]
        least = keys.index(min(keys))
        loads[least] += sizes[i]
        coarse[least] += lengths[i] if step is not None else 0
    rounds = [(0, 1), (0, 7)] if step is None else []  # of ranks with equal keys but unequal sums a round takes any
    for min_ranks, run in [*rounds, (1000, 4096)]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(post_balancing, "MIN_RANKS_TO_VECTORIZE", min_ranks)
            patch.setattr(post_balancing, "SAMPLES_PER_HEAP_RUN", run)
            rank = post_balancing.assign_greedily(sizes, order, num_ranks, stepped)
        assert sorted(np.bincount(rank, weights=sizes, minlength=num_ranks)) == pytest.approx(sorted(loads))


@given(st.integers(0, 10_000), st.integers(1, 400), st.integers(1, 80), TAILS)
def test_two_keys_stay_near_the_bound_on_heavy_tails(seed: int, n: int, num_ranks: int, tail: str) -> None:
    lengths = _heavy_tailed(np.random.default_rng(seed), n, tail)
    source = np.arange(n) % num_ranks
    cost = BatchCost("two_key")
    loads = cost.of_ranks(lengths, rebalance(lengths, source, num_ranks, cost).dest_rank, num_ranks)
    tolerance = max(lengths.mean(), 1.0)
    assert loads.max() <= lengths.sum() / num_ranks + lengths.max() + tolerance, "greedy, with sums in steps"


@pytest.mark.parametrize("kind", ["packed", "two_key"])
def test_many_short_samples_beside_long_ones_take_few_rounds(kind: Literal["packed", "two_key"]) -> None:
    lengths = np.concatenate([np.full(255, 10**7), np.random.default_rng(0).integers(1, 9, 20_000)])
    source = np.arange(len(lengths)) % 256
    calls = count_calls(lambda: rebalance(lengths, source, 256, BatchCost(kind)))
    loads = np.bincount(rebalance(lengths, source, 256, BatchCost(kind)).dest_rank, weights=lengths, minlength=256)
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
    moved = rebalance(lengths, np.repeat(np.arange(2560), 60), 2560, cost)
    loads = cost.of_ranks(lengths, moved.dest_rank, 2560)
    assert loads.max() / loads.mean() < 1.001
    assert np.bincount(moved.dest_rank).sum() == len(lengths)


@pytest.mark.parametrize("cost", COSTS, ids=lambda c: f"{c.kind}-{c.quadratic}")
def test_no_samples_need_no_move(cost: BatchCost) -> None:
    none = np.empty(0, dtype=np.int64)
    assert len(rebalance(none, none, 2, cost).dest_rank) == 0


def _random_move(rng: np.random.Generator, source: np.ndarray, num_ranks: int) -> Rearrangement:
    dest = rng.integers(0, num_ranks, len(source))
    slot = np.empty(len(source), dtype=np.int64)
    for r in range(num_ranks):
        pieces = np.flatnonzero(dest == r)
        slot[pieces] = rng.permutation(len(pieces))
    return Rearrangement(source, dest, slot)


def _apply(move: Rearrangement, places: dict[tuple[int, int], str]) -> dict[tuple[int, int], str]:
    sources = zip(move.source_rank.tolist(), move.source_slot.tolist(), strict=True)
    dests = zip(move.dest_rank.tolist(), move.dest_slot.tolist(), strict=True)
    return {dest: places[source] for source, dest in zip(sources, dests, strict=True)}


@given(st.integers(0, 10_000), st.integers(0, 12), st.integers(1, 4))
def test_inverse_and_composition_move_pieces_as_one_after_the_other(seed: int, n: int, num_ranks: int) -> None:
    rng = np.random.default_rng(seed)
    source = rng.integers(0, num_ranks, n)
    encoder, llm = _random_move(rng, source, num_ranks), _random_move(rng, source, num_ranks)
    start = {
        (r, s): f"piece {i}" for i, (r, s) in enumerate(zip(source.tolist(), llm.source_slot.tolist(), strict=True))
    }
    assert _apply(encoder.inverse(), _apply(encoder, start)) == start
    at_encoder, at_llm = _apply(encoder, start), _apply(llm, start)
    assert _apply(llm.after(encoder.inverse()), at_encoder) == at_llm


def test_moves_that_do_not_meet_are_rejected() -> None:
    move = Rearrangement(np.array([0, 0]), np.array([0, 1]), np.array([0, 0]))
    with pytest.raises(ValueError, match="does not end where the second starts"):
        move.after(move)


@given(st.integers(0, 10_000), st.integers(0, 8), st.integers(1, 3))
def test_items_follow_their_samples(seed: int, n: int, num_ranks: int) -> None:
    rng = np.random.default_rng(seed)
    move = _random_move(rng, np.sort(rng.integers(0, num_ranks, n)), num_ranks)
    num_items = rng.integers(0, 4, n)
    lifted = move.lifted(num_items)
    owner = np.repeat(np.arange(n), num_items)
    for r in range(num_ranks):
        samples = sorted(np.flatnonzero(move.dest_rank == r).tolist(), key=lambda i: int(move.dest_slot[i]))
        expected = [row for i in samples for row in np.flatnonzero(owner == i).tolist()]
        rows = np.flatnonzero(lifted.dest_rank == r)
        assert rows[np.argsort(lifted.dest_slot[rows])].tolist() == expected
        assert sorted(lifted.dest_slot[rows].tolist()) == list(range(len(rows)))
