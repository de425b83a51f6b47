"""The least recomputation against exhaustive search over the number of layers of every kind."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.planning.layer_costs.recompute import least_recompute, span_recompute

KIND = st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 4))  # bytes saved, seconds, layers


@given(st.lists(KIND, min_size=1, max_size=4), st.integers(-5, 60))
def test_no_other_choice_saves_enough_in_less_time(kinds: list[tuple[int, int, int]], excess: int) -> None:
    saved, seconds, counts = zip(*kinds, strict=True)
    recomputed = least_recompute(saved, seconds, counts, excess)
    feasible = [w for w in product(*(range(n + 1) for n in counts)) if np.dot(w, saved) >= excess or excess <= 0]
    if recomputed is None:
        assert not feasible
        return
    assert np.dot(recomputed, saved) >= excess
    assert np.dot(recomputed, seconds) == min(np.dot(counts_by_kind, seconds) for counts_by_kind in feasible)


def test_with_many_kinds_no_layer_is_recomputed_needlessly() -> None:
    """Use more combinations than are tried, so that the ratio of seconds to bytes decides."""
    rng = np.random.default_rng(0)
    saved, seconds = rng.integers(1, 50, 12).tolist(), rng.integers(1, 50, 12).tolist()
    counts = [5] * 12
    for excess in range(1, sum(saved) * 5, 97):
        recomputed = least_recompute(saved, seconds, counts, excess)
        assert recomputed is not None
        spare = np.dot(recomputed, saved) - excess
        assert spare >= 0
        assert all(n == 0 or saved_per_layer > spare for n, saved_per_layer in zip(recomputed, saved, strict=True))
    assert least_recompute(saved, seconds, counts, sum(saved) * 5 + 1) is None


@pytest.mark.parametrize("excess", [0.0, 3.0, 8.0, 20.0, 21.0])
def test_span_recompute_equals_the_exact_search_for_one_kind_of_layer(excess: float) -> None:
    seconds_needed = span_recompute(np.array([[4.0]]), np.array([2.0]), np.array([[5.0]]), np.array([excess]))
    exact = least_recompute([4.0], [2.0], [5], excess)
    assert seconds_needed[0] == (np.inf if exact is None else 2.0 * exact[0])


@given(st.lists(KIND, min_size=1, max_size=4), st.integers(-5, 60))
def test_span_recompute_exceeds_the_exact_search_by_at_most_one_layer_of_each_kind(
    kinds: list[tuple[int, int, int]], excess: int
) -> None:
    saved, seconds, counts = zip(*kinds, strict=True)
    saved_bytes, left = np.array([saved], np.float64).T, np.array([float(excess)])
    num_layers = np.array([counts], np.float64).T
    seconds_needed = span_recompute(saved_bytes, np.array(seconds, np.float64), num_layers, left)[0]
    exact = least_recompute(saved, seconds, counts, excess)
    if exact is None:
        assert np.isinf(seconds_needed)
    else:
        assert np.dot(exact, seconds) <= seconds_needed <= np.dot(exact, seconds) + sum(seconds)
