"""Partitions of a layer chain under a limit of memory, compared with all partitions there are."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mmtrain.planning.layer_costs.layer_costs import UnitLayerCosts
from mmtrain.planning.layer_costs.layer_partition import LayerChain, anchor_partition, chunk_seconds, recompute_to_fit


def random_chain(seed: int, num_layers: int, pp: int, vpp: int) -> LayerChain:
    """Return a chain of up to three kinds of layers, in which only the work of a chunk counts."""
    rng = np.random.default_rng(seed)
    _, kind = np.unique(np.sort(rng.integers(0, 3, num_layers)), return_inverse=True)

    def of_layers(low: float, high: float) -> np.ndarray:
        return rng.uniform(low, high, kind.max() + 1)[kind]

    seconds, kept = of_layers(1, 5), of_layers(2, 8)
    costs = UnitLayerCosts(
        seconds=seconds,
        backward_seconds=seconds * 0.6,
        recompute_seconds=seconds * 0.4,
        state_bytes=of_layers(1, 5),
        kept_bytes=kept,
        saved_bytes=kept * of_layers(0.3, 0.9),
        working_bytes=of_layers(0, 3),
        recompute_working_bytes=of_layers(0, 4),
        input_bytes=of_layers(0.1, 0.2),
        parameters=of_layers(1, 2),
        kind=kind,
    )
    no_way = np.zeros(num_layers + 1)
    return LayerChain(("llm",), (0, num_layers), costs, pp, vpp, 3, no_way, masks=())


@given(seed=st.integers(0, 10_000), num_layers=st.integers(2, 9), pp=st.integers(1, 4), vpp=st.integers(1, 2))
@pytest.mark.parametrize("share", [0.6, 1.0, 1.5])  # of what all ranks hold together without recomputation
def test_the_anchor_under_a_limit_is_the_best_of_all_partitions(
    share: float, seed: int, num_layers: int, pp: int, vpp: int
) -> None:
    assume(pp * vpp <= num_layers)
    chain = random_chain(seed, num_layers, pp, vpp)
    num_in_flight = np.broadcast_to(np.arange(pp * vpp, 0, -1), (num_layers, pp * vpp))
    held = chain.costs.state_bytes.sum() + (chain.costs.kept_bytes[:, None] * num_in_flight).mean(axis=1).sum()
    recompute = recompute_to_fit(chain, num_in_flight, share * held / pp)
    inner = combinations(range(1, num_layers), pp * vpp - 1)
    partitions = np.array([(0, *bounds, num_layers) for bounds in inner])
    seconds = chunk_seconds(chain, partitions, recompute)
    found = anchor_partition(chain, recompute)
    if np.isinf(seconds.max(axis=1).min()):
        assert found is None
        return
    assert found is not None
    of_found = chunk_seconds(chain, np.array([found]), recompute)[0]
    least = seconds.max(axis=1).min()
    assert of_found.max() == pytest.approx(least)
    as_good = seconds[seconds.max(axis=1) <= least * (1 + 1e-12)]
    assert (of_found**2).sum() == pytest.approx((as_good**2).sum(axis=1).min())
