"""Spread the items of long samples over ranks; the gather brings every feature back."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import BatchCost, Rearrangement, rebalance
from mmtrain.balance.long_samples import split_long_samples


def _largest(tokens: np.ndarray, rank: np.ndarray, num_ranks: int) -> float:
    return float(np.bincount(rank, weights=tokens, minlength=num_ranks).max(initial=0.0))


@given(st.integers(0, 10_000), st.integers(0, 7), st.integers(1, 3))
def test_long_samples_are_spread_near_the_optimum(seed: int, num_items: int, num_ranks: int) -> None:
    rng = np.random.default_rng(seed)
    sample = np.sort(rng.integers(0, 3, num_items))
    tokens = rng.integers(1, 30, num_items)
    owner = rng.integers(0, num_ranks, 3)[sample]
    max_tokens = 40

    moved = split_long_samples(sample, tokens, owner, num_ranks, max_tokens)

    is_long = np.array([tokens[sample == s].sum() > max_tokens for s in sample], dtype=bool)
    assert (moved.dest_rank[~is_long] == owner[~is_long]).all()
    free = np.flatnonzero(is_long)
    best = np.inf
    for choice in itertools.product(range(num_ranks), repeat=len(free)):
        rank = owner.copy()
        rank[free] = choice
        best = min(best, _largest(tokens, rank, num_ranks))
    assert _largest(tokens, moved.dest_rank, num_ranks) <= best * 4 / 3
    back = moved.inverse()
    order = np.lexsort((moved.dest_slot, moved.dest_rank))
    assert back.dest_rank.tolist() == owner[order].tolist()
    assert back.dest_slot.tolist() == moved.source_slot[order].tolist()


def test_a_sample_with_most_of_the_images_is_spread_over_all_ranks() -> None:
    sample = np.array([0] * 16 + [1, 2, 3])
    tokens = np.full(19, 10)
    owner = np.array([0] * 16 + [1, 2, 3])
    moved = split_long_samples(sample, tokens, owner, 4, 100)
    assert np.bincount(moved.dest_rank).tolist() == [5, 5, 5, 4]


@given(st.integers(0, 10_000), st.integers(0, 6), st.integers(1, 4))
def test_features_of_split_samples_reach_the_llm_in_one_move(seed: int, num_samples: int, num_ranks: int) -> None:
    rng = np.random.default_rng(seed)
    source, num_items = rng.integers(0, num_ranks, num_samples), rng.integers(0, 9, num_samples)
    sample = np.repeat(np.arange(num_samples), num_items)
    tokens = rng.integers(1, 30, len(sample))
    llm = rebalance(rng.integers(1, 50, num_samples), source, num_ranks, BatchCost()).lifted(num_items)

    encoder = split_long_samples(sample, tokens, source[sample], num_ranks, 40)
    start = {place: f"item {i}" for i, place in enumerate(_places(llm.source_rank, llm.source_slot))}
    at_encoder = _moved(encoder, start)
    assert _moved(llm.after(encoder.inverse()), at_encoder) == _moved(llm, start)


def _places(rank: np.ndarray, slot: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(rank.tolist(), slot.tolist(), strict=True))


def _moved(move: Rearrangement, held: dict[tuple[int, int], str]) -> dict[tuple[int, int], str]:
    ways = zip(_places(move.source_rank, move.source_slot), _places(move.dest_rank, move.dest_slot), strict=True)
    return {dest: held[source] for source, dest in ways}
