"""The least recomputation against exhaustive search over the number of layers of every kind."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.plan.estimate.recompute import least_recompute, span_recompute

KIND = st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 4))  # bytes saved, seconds, layers


@given(st.lists(KIND, min_size=1, max_size=4), st.integers(-5, 60))
def test_nothing_saves_enough_in_less_time(kinds: list[tuple[int, int, int]], excess: int) -> None:
    saved, seconds, counts = zip(*kinds, strict=True)
    found = least_recompute(saved, seconds, counts, excess)
    ways = [w for w in product(*(range(n + 1) for n in counts)) if np.dot(w, saved) >= excess or excess <= 0]
    if found is None:
        assert not ways
        return
    assert np.dot(found, saved) >= excess
    assert np.dot(found, seconds) == min(np.dot(way, seconds) for way in ways)


def test_with_many_kinds_enough_is_saved_and_no_layer_is_recomputed_in_vain() -> None:
    """There are more combinations than are tried, so the ratio of seconds to bytes decides."""
    rng = np.random.default_rng(0)
    saved, seconds = rng.integers(1, 50, 12).tolist(), rng.integers(1, 50, 12).tolist()
    counts = [5] * 12
    for excess in range(1, sum(saved) * 5, 97):
        found = least_recompute(saved, seconds, counts, excess)
        assert found is not None
        spare = np.dot(found, saved) - excess
        assert spare >= 0
        assert all(n == 0 or each > spare for n, each in zip(found, saved, strict=True))
    assert least_recompute(saved, seconds, counts, sum(saved) * 5 + 1) is None


@pytest.mark.parametrize("excess", [0.0, 3.0, 8.0, 20.0, 21.0])
def test_spans_need_what_the_exact_search_needs_where_one_kind_matters(excess: float) -> None:
    found = span_recompute(np.array([[4.0]]), np.array([2.0]), np.array([[5.0]]), np.array([excess]))
    exact = least_recompute([4.0], [2.0], [5], excess)
    assert found[0] == (np.inf if exact is None else 2.0 * exact[0])


@given(st.lists(KIND, min_size=1, max_size=4), st.integers(-5, 60))
def test_spans_take_no_less_than_the_exact_search_and_at_most_a_layer_of_each_kind_more(
    kinds: list[tuple[int, int, int]], excess: int
) -> None:
    saved, seconds, counts = zip(*kinds, strict=True)
    each, left = np.array([saved], np.float64), np.array([float(excess)])
    found = span_recompute(each, np.array(seconds, np.float64), np.array([counts], np.float64), left)[0]
    exact = least_recompute(saved, seconds, counts, excess)
    if exact is None:
        assert np.isinf(found)
    else:
        assert np.dot(exact, seconds) <= found <= np.dot(exact, seconds) + sum(seconds)
