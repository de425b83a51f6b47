"""How sequences are divided among context-parallel ranks: complete, even, and as brute force counts the work."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance.context_split import MAX_IMBALANCE, ContextSplit, _fill_evenly, split_sequences

METHODS = st.sampled_from(["ulysses", "ring"])
SPLITS = st.sampled_from(["auto", "even"])
LENGTHS = st.lists(st.integers(0, 60), max_size=9)


def _pairs(split: ContextSplit, rank: int) -> int:
    """Count, token by token, the keys that the queries of a rank see."""
    return sum(t + 1 for piece in split.pieces(rank) for t in range(piece.start, piece.stop))


@given(LENGTHS, st.integers(2, 5), METHODS, SPLITS)
def test_every_token_is_on_exactly_one_rank(lengths: list[int], cp: int, method: str, how: str) -> None:
    split = split_sequences(lengths, cp, method, how)  # type: ignore[arg-type]
    tokens = sorted((p.sequence, t) for r in range(cp) for p in split.pieces(r) for t in range(p.start, p.stop))
    assert tokens == [(i, t) for i, n in enumerate(lengths) for t in range(n)]
    for rank in range(cp):
        assert split.cut_pieces[rank] == tuple(sorted(split.cut_pieces[rank]))
        assert all((p.start, p.stop) == (0, lengths[p.sequence]) for p in split.whole_pieces[rank])
        assert not {p.sequence for p in split.whole_pieces[rank]} & set(split.cut)


@given(LENGTHS, st.integers(2, 5), SPLITS)
def test_work_of_a_ring_is_that_of_its_query_key_pairs(lengths: list[int], cp: int, how: str) -> None:
    split = split_sequences(lengths, cp, "ring", how)  # type: ignore[arg-type]
    for rank in range(cp):
        assert split.work[rank] == 2 * _pairs(split, rank) - split.num_tokens[rank]


@given(LENGTHS, st.integers(2, 5), SPLITS)
def test_work_of_heads_is_shared_alike(lengths: list[int], cp: int, how: str) -> None:
    split = split_sequences(lengths, cp, "ulysses", how)  # type: ignore[arg-type]
    assert sum(split.work) == pytest.approx(sum(n * n for n in lengths))
    of_cut = sum(lengths[i] ** 2 for i in split.cut) / cp
    for rank in range(cp):
        whole = sum(p.num_tokens**2 for p in split.whole_pieces[rank])
        assert split.work[rank] == pytest.approx(whole + of_cut)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 12))
def test_filling_leaves_the_smallest_maximum(loads: list[int], amount: int) -> None:
    added = _fill_evenly(loads, amount)
    assert sum(added) == amount
    assert min(added) >= 0
    least = next(m for m in range(max(loads), 99) if sum(m - load for load in loads) >= amount)
    assert max(load + more for load, more in zip(loads, added, strict=True)) == least


@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_drawn_packs_are_even_within_two_percent(method: str, cp: int) -> None:
    rng = random.Random(cp)
    for _ in range(20):
        lengths = [min(int(rng.lognormvariate(7, 1.2)) + 1, 60_000) for _ in range(rng.randint(1, 60))]
        lengths.append(rng.randint(4_000, 60_000))
        split = split_sequences(lengths, cp, method, "auto")  # type: ignore[arg-type]
        assert split.imbalance <= MAX_IMBALANCE
        assert len(split.cut) <= len(split_sequences(lengths, cp, method, "even").cut)  # type: ignore[arg-type]


def test_short_sequences_stay_whole_beside_a_giant() -> None:
    split = split_sequences([500] * 8 + [16_000], 4, "ring", "auto")
    assert split.cut == (8,)
    assert split.num_tokens == (5_000,) * 4


def test_equal_short_sequences_need_no_cut() -> None:
    split = split_sequences([700, 700, 700, 700], 2, "ulysses", "auto")
    assert not split.cut
    assert split.num_tokens == (1400, 1400)
