"""Node-wise rearrangement against brute force and a mixed-integer program."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from mmtrain.balance import BatchCost, rebalance
from mmtrain.balance.dispatch.dispatch_items import DispatchSizes, place_batches_near
from mmtrain.balance.dispatch.node_placement import off_node_bytes, rearrange_across_nodes
from tests.balance.sender_bound import largest_sender_bound, single_node_bound


def _pieces(seed: int, num_replicas: int, per_replica: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return source, new batch and bytes of samples of skewed lengths after post-balancing."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6, 1, num_replicas * per_replica).astype(np.int64), 1, 8192)
    source = np.repeat(np.arange(num_replicas), per_replica)
    return source, rebalance(lengths, source, num_replicas, BatchCost()), lengths


@given(st.integers(0, 10_000), st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2), (6, 3), (4, 4)]), st.integers(0, 4))
def test_placements_are_permutations_near_the_best_of_all(seed: int, nodes: tuple[int, int], per: int) -> None:
    num_replicas, per_node = nodes
    rng = np.random.default_rng(seed)
    n = num_replicas * per
    source, batch, sizes = rng.integers(0, num_replicas, n), rng.integers(0, num_replicas, n), rng.integers(1, 50, n)
    replica = rearrange_across_nodes(source, batch, sizes, num_replicas, per_node)
    assert sorted(replica.tolist()) == list(range(num_replicas))

    def worst(placement: np.ndarray) -> int:
        loads = [0] * num_replicas
        for s, b, size in zip(source, batch, sizes, strict=True):
            loads[s] += int(size) if s // per_node != placement[b] // per_node else 0
        return max(loads)

    assert worst(replica) == off_node_bytes(source, batch, sizes, replica, per_node).max()
    assert worst(replica) <= worst(np.arange(num_replicas)), "never worse than leaving batches where they are"
    best = min(worst(np.array(placement)) for placement in itertools.permutations(range(num_replicas)))
    assert worst(replica) <= 2 * best


def _optimum(source: np.ndarray, batch: np.ndarray, sizes: np.ndarray, num_replicas: int, per_node: int) -> float:
    """Solve the min-max assignment by HiGHS: x[j, n] batch j on node n, and the bound T."""
    num_nodes = num_replicas // per_node
    volume = np.zeros((num_replicas, num_replicas))
    np.add.at(volume, (source, batch), sizes)
    num_vars = num_replicas * num_nodes + 1
    keeps = np.zeros((num_replicas, num_vars))
    for i in range(num_replicas):
        keeps[i, np.arange(num_replicas) * num_nodes + i // per_node] = volume[i]
    keeps[:, -1] = 1
    once = np.zeros((num_replicas, num_vars))
    full = np.zeros((num_nodes, num_vars))
    for j, n in itertools.product(range(num_replicas), range(num_nodes)):
        once[j, j * num_nodes + n] = full[n, j * num_nodes + n] = 1
    solution = milp(
        np.eye(num_vars)[-1],
        constraints=[
            LinearConstraint(keeps, volume.sum(axis=1), np.inf),
            LinearConstraint(once, 1, 1),
            LinearConstraint(full, per_node, per_node),
        ],
        integrality=np.append(np.ones(num_vars - 1), 0),
        bounds=Bounds(0, np.append(np.ones(num_vars - 1), np.inf)),
        options={"mip_rel_gap": 1e-3, "time_limit": 20},
    )
    return float(solution.fun)


@pytest.mark.parametrize(("num_replicas", "per_node", "per_replica"), [(16, 4, 8), (16, 4, 60), (32, 8, 8)])
def test_few_replicas_come_near_the_exact_solution(num_replicas: int, per_node: int, per_replica: int) -> None:
    """The floor of docs/decisions/balance.md: at most 1.13 times the mixed-integer program's largest sender."""
    for seed in range(2):
        source, batch, sizes = _pieces(seed, num_replicas, per_replica)
        replica = rearrange_across_nodes(source, batch, sizes, num_replicas, per_node)
        worst = off_node_bytes(source, batch, sizes, replica, per_node).max()
        assert worst <= 1.13 * _optimum(source, batch, sizes, num_replicas, per_node)


@pytest.mark.parametrize(
    ("num_ranks", "samples_per_rank", "largest_share"), [(256, 8, 0.69), (2560, 4, 0.61), (2560, 16, 0.73)]
)
def test_the_fullest_receiver_of_drawn_images_keeps_its_floor(
    num_ranks: int, samples_per_rank: int, largest_share: float
) -> None:
    """The floor of docs/decisions/balance.md, with the images that `scripts/bench_dispatch.py` draws."""
    rng = np.random.default_rng(7)
    num_images = rng.choice([0, 1, 8, 3], num_ranks * samples_per_rank, p=[0.55, 0.25, 0.1, 0.1])
    home = np.repeat(np.repeat(np.arange(num_ranks), samples_per_rank), num_images)
    features = np.clip(rng.lognormal(5.5, 0.6, len(home)), 1, 2048).astype(np.int64)
    batch = rebalance(4 * features, home, num_ranks, BatchCost("packed", 3.0, 0.002))
    places = [place_batches_near(batch, home, features, DispatchSizes(num_ranks, 1, per)) for per in (None, 8)]
    before, after = (int(off_node_bytes(home, batch, features, replica, 8).max()) for replica in places)
    assert round(after / before, 2) <= largest_share


def test_the_worst_sender_of_many_nodes_is_relieved() -> None:
    source, batch, sizes = _pieces(0, 256, 60)
    replica = rearrange_across_nodes(source, batch, sizes, 256, 8)
    assert sorted(replica.tolist()) == list(range(256))
    before = off_node_bytes(source, batch, sizes, np.arange(256), 8).max()
    assert off_node_bytes(source, batch, sizes, replica, 8).max() < 0.75 * before


@given(st.integers(0, 10_000), st.integers(0, 8), st.sampled_from([0.5, 1.5, 3.0]), st.sampled_from([2, 4, 8]))
def test_heavy_tails_never_send_more_than_without_a_move(seed: int, per: int, sigma: float, per_node: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.clip(rng.lognormal(6, sigma, 32 * per), 1, 2**30).astype(np.int64)
    source, batch = np.repeat(np.arange(32), per), rng.integers(0, 32, 32 * per)
    replica = rearrange_across_nodes(source, batch, sizes, 32, per_node)
    assert sorted(replica.tolist()) == list(range(32))
    before, after = (off_node_bytes(source, batch, sizes, places, per_node) for places in (np.arange(32), replica))
    assert after.max(initial=0) <= before.max(initial=0)


@pytest.mark.parametrize(
    ("num_replicas", "per_replica"),
    [(96, 3), pytest.param(640, 3, marks=pytest.mark.slow), pytest.param(320, 30, marks=pytest.mark.slow)],
)
def test_the_largest_sender_comes_near_what_single_nodes_need(num_replicas: int, per_replica: int) -> None:
    source, batch, sizes = _pieces(0, num_replicas, per_replica)
    replica = rearrange_across_nodes(source, batch, sizes, num_replicas, 8)
    worst = int(off_node_bytes(source, batch, sizes, replica, 8).max())
    shared = largest_sender_bound(source, batch, sizes, num_replicas, 8, worst)
    bound = single_node_bound(source, batch, sizes, num_replicas, 8, shared)
    assert bound - 1e-6 <= worst <= 1.05 * bound


def test_no_placement_betters_the_bound_of_single_nodes() -> None:
    source, batch, sizes = _pieces(1, 16, 6)
    bound = single_node_bound(source, batch, sizes, 16, 4, 0)
    assert 0 < bound <= _optimum(source, batch, sizes, 16, 4) * 1.001


def test_nodes_must_be_full() -> None:
    none = np.empty(0, dtype=np.int64)
    with pytest.raises(ValueError, match="6 replicas do not fill nodes of 4"):
        rearrange_across_nodes(none, none, none, 6, 4)
