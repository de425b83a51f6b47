"""Summaries of lengths and scores of groupings, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import ItemLengths, SampleGroups, SampleLengths
from mmtrain.balance.grouping.summary import (
    NUM_HISTOGRAM_BINS,
    composition_shares,
    score_grouping,
    summarize_lengths,
)


@given(
    st.lists(st.lists(st.integers(0, 10**6), min_size=2, max_size=2), max_size=60), st.sampled_from([1.0, 0.37, 1e-3])
)
def test_every_sample_with_some_of_a_measure_is_in_one_bin(rows: list[list[int]], unit: float) -> None:
    values = np.array(rows, dtype=np.float64).reshape(-1, 2) * unit
    summary = summarize_lengths(("a", "b"), values)
    for spread, column in zip(summary.spreads, values.T, strict=True):
        positive = column[column > 0]
        assert sum(spread.counts) == spread.samples == len(positive)
        assert len(spread.counts) <= NUM_HISTOGRAM_BINS
        if len(positive):
            assert spread.edges[0] == positive.min()
            assert spread.edges[-1] >= positive.max() == spread.largest
            assert (np.diff(spread.edges) > 0).all()
            by_hand = [
                ((positive >= lo) & (positive < hi)).sum()
                for lo, hi in zip(spread.edges, spread.edges[1:], strict=False)
            ]
            by_hand[-1] += (positive == spread.edges[-1]).sum()
            assert list(spread.counts) == by_hand
            assert spread.total == pytest.approx(positive.sum())


def test_correlation_is_pearsons_and_none_for_a_constant_measure() -> None:
    values = np.random.default_rng(0).integers(0, 50, (40, 3)).astype(np.float64)
    values[:, 2] = 7
    correlation = summarize_lengths(("a", "b", "c"), values).correlation
    assert correlation[0][1] == pytest.approx(np.corrcoef(values[:, 0], values[:, 1])[0, 1])
    assert correlation[0][0] == pytest.approx(1)
    assert [row[2] for row in correlation] == [None] * 3


def test_composition_by_hand() -> None:
    """Take four samples of 10 tokens, with 0, 5, 5 and 10 of images, one without tokens, and one clip."""
    vision = ItemLengths(np.array([0, 0, 1, 3, 4, 4]), *(np.array([5, 2, 3, 10]) for _ in range(4)))
    audio = ItemLengths(np.array([0, 2, 2, 2, 2, 2]), *(np.array([1, 1]) for _ in range(4)))
    lengths = SampleLengths(np.array([10, 10, 10, 10, 0]), np.zeros(5, np.int64), {"vision": vision, "audio": audio})
    of_vision, of_audio, of_text = composition_shares(lengths)
    assert [of_vision.unit, of_audio.unit, of_text.unit] == ["vision", "audio", "text"]
    assert (of_vision.mean, of_vision.median, of_vision.without) == (0.5, 0.5, 0.25)
    assert of_vision.deviation == pytest.approx(np.std([0, 0.5, 0.5, 1]))
    assert (of_vision.counts[0], of_vision.counts[10], of_vision.counts[-1], sum(of_vision.counts)) == (1, 2, 1, 4)
    assert of_audio.of_all_tokens == pytest.approx(2 / 40)
    assert of_text.of_all_tokens == pytest.approx(18 / 40)
    assert of_text.without == 0.25
    alike = SampleLengths(np.full(3, 10), np.zeros(3, np.int64), {})
    assert composition_shares(alike) == []


def test_a_score_by_hand() -> None:
    tokens = np.array([[6, 2], [4, 0], [8, 4], [2, 0], [5, 5]])
    groups = SampleGroups(np.array([0, 2, 3, 4, 5]), np.arange(5))  # loads 10/2, 8/4, 2/0, 5/5
    row = score_grouping("random", groups, ("llm", "vision"), tokens, 10, 2, seconds=0.5)
    assert (row.groups, row.mean_batch, row.fill) == (4, 1.25, 0.625)
    assert row.pad_ratio == pytest.approx((2 / 12) / 4)
    waiting = {"llm": ((2 / 20) + (3 / 10)) / 2, "vision": ((2 / 8) + (5 / 10)) / 2}
    assert row.dist_ratio == pytest.approx(waiting)
    assert row.max_over_mean == pytest.approx((12 / 12 + 10 / 6) / 2)
    assert score_grouping("matched", groups, ("llm", "vision"), tokens, 10, 2, 0.5).pad_ratio is None
    alone = score_grouping("isf", groups, ("llm", "vision"), tokens, 10, 8, 0.5)
    assert (alone.dist_ratio, alone.max_over_mean) == ({"llm": 0, "vision": 0}, 1.0)
