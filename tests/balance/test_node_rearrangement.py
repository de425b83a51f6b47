"""Node-wise rearrangement against brute force and a mixed-integer program."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from mmtrain.balance import BatchCost, rebalance
from mmtrain.balance.dispatch import node_rearrangement, placement_by_need
from mmtrain.balance.dispatch.node_rearrangement import off_node_bytes, rearrange_across_nodes
from mmtrain.balance.dispatch.node_volume import NodeVolume
from mmtrain.balance.dispatch.placement_by_need import place_by_need
from tests.balance.sender_bound import largest_sender_bound, single_node_bound


def _pieces(seed: int, num_replicas: int, per_replica: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return source, new batch and bytes of samples of skewed lengths after post-balancing."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6, 1, num_replicas * per_replica).astype(np.int64), 1, 8192)
    source = np.repeat(np.arange(num_replicas), per_replica)
    return source, rebalance(lengths, source, num_replicas, BatchCost()).dest_rank, lengths


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


def test_sixteen_replicas_come_near_the_exact_solution() -> None:
    for seed, per_replica in itertools.product(range(2), (8, 60)):
        source, batch, sizes = _pieces(seed, 16, per_replica)
        replica = rearrange_across_nodes(source, batch, sizes, 16, 4)
        worst = off_node_bytes(source, batch, sizes, replica, 4).max()
        assert worst <= 1.03 * _optimum(source, batch, sizes, 16, 4)


def test_the_worst_sender_of_many_nodes_is_relieved() -> None:
    source, batch, sizes = _pieces(0, 256, 60)
    replica = rearrange_across_nodes(source, batch, sizes, 256, 8)
    assert sorted(replica.tolist()) == list(range(256))
    before = off_node_bytes(source, batch, sizes, np.arange(256), 8).max()
    assert off_node_bytes(source, batch, sizes, replica, 8).max() < 0.75 * before


@given(st.integers(0, 10_000), st.integers(0, 8), st.sampled_from([0.5, 1.5, 3.0]), st.sampled_from([2, 4, 8]))
def test_placement_by_need_keeps_its_bound_on_heavy_tails(seed: int, per: int, sigma: float, per_node: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.clip(rng.lognormal(6, sigma, 32 * per), 1, 2**30).astype(np.int64)
    source, batch = np.repeat(np.arange(32), per), rng.integers(0, 32, 32 * per)
    known = int(off_node_bytes(source, batch, sizes, np.arange(32), per_node).max(initial=0))
    volume = NodeVolume(source, batch, sizes, 32, per_node)
    node = place_by_need(volume, known)
    if node is not None:
        assert np.bincount(node, minlength=32 // per_node).tolist() == [per_node] * (32 // per_node)
        assert volume.off_node(node).max() < known
    replica = rearrange_across_nodes(source, batch, sizes, 32, per_node)
    assert off_node_bytes(source, batch, sizes, replica, per_node).max(initial=0) <= known


@pytest.mark.parametrize("has_starts", [True, False])
@pytest.mark.parametrize(
    ("num_replicas", "per_replica"),
    [(96, 3), pytest.param(640, 3, marks=pytest.mark.slow), pytest.param(320, 30, marks=pytest.mark.slow)],
)
def test_the_largest_sender_comes_near_what_single_nodes_need(
    num_replicas: int, per_replica: int, has_starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_starts:  # as where there are more pieces
        monkeypatch.setattr(node_rearrangement, "MAX_SIZE_OF_ALL_STARTS", 0)
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


def test_thousands_of_equal_ranks_end_in_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.random.default_rng(5).integers(990, 1011, 1024 * 8)
    source = np.repeat(np.arange(1024), 8)
    batch = rebalance(sizes, source, 1024, BatchCost()).dest_rank
    volume = NodeVolume(source, batch, sizes, 1024, 8)
    known = int(volume.off_node(np.arange(1024) // 8).max())
    monkeypatch.setattr(placement_by_need, "MAX_PLACED", 0)
    node = place_by_need(volume, known)
    assert node is not None
    assert volume.off_node(node).max() < known


def test_nodes_must_be_full() -> None:
    none = np.empty(0, dtype=np.int64)
    with pytest.raises(ValueError, match="6 replicas do not fill nodes of 4"):
        rearrange_across_nodes(none, none, none, 6, 4)
