"""Node-wise rearrangement against brute force and a mixed-integer program."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from mmtrain.balance import BatchCost, rebalance
from mmtrain.balance.node_rearrangement import off_node_bytes, rearrange_across_nodes


def _pieces(seed: int, num_replicas: int, per_replica: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return source, new batch and bytes of samples of skewed lengths after post-balancing."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6, 1, num_replicas * per_replica).astype(np.int64), 1, 8192)
    source = np.repeat(np.arange(num_replicas), per_replica)
    return source, rebalance(lengths, source, num_replicas, BatchCost()).dest_rank, lengths


@given(st.integers(0, 10_000), st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2), (6, 3), (4, 4)]), st.integers(0, 4))
def test_placements_are_permutations_as_good_as_the_best_of_all(seed: int, nodes: tuple[int, int], per: int) -> None:
    num_replicas, per_node = nodes
    rng = np.random.default_rng(seed)
    n = num_replicas * per
    source, batch, sizes = rng.integers(0, num_replicas, n), rng.integers(0, num_replicas, n), rng.integers(1, 50, n)
    replica = rearrange_across_nodes(source, batch, sizes, num_replicas, per_node, 50)
    assert sorted(replica.tolist()) == list(range(num_replicas))

    def worst(placement: np.ndarray) -> int:
        loads = [0] * num_replicas
        for s, b, size in zip(source, batch, sizes, strict=True):
            loads[s] += int(size) if s // per_node != placement[b] // per_node else 0
        return max(loads)

    assert worst(replica) == off_node_bytes(source, batch, sizes, replica, per_node).max()
    assert worst(replica) <= worst(np.arange(num_replicas)), "never worse than leaving batches where they are"
    best = min(worst(np.array(placement)) for placement in itertools.permutations(range(num_replicas)))
    assert worst(replica) == best, "few replicas are placed in the best way"


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
        replica = rearrange_across_nodes(source, batch, sizes, 16, 4, 400)
        worst = off_node_bytes(source, batch, sizes, replica, 4).max()
        assert worst <= 1.01 * _optimum(source, batch, sizes, 16, 4)


def test_the_worst_sender_of_many_nodes_is_relieved() -> None:
    source, batch, sizes = _pieces(0, 256, 60)
    replica = rearrange_across_nodes(source, batch, sizes, 256, 8, 50)
    assert sorted(replica.tolist()) == list(range(256))
    before = off_node_bytes(source, batch, sizes, np.arange(256), 8).max()
    assert off_node_bytes(source, batch, sizes, replica, 8).max() < 0.95 * before


def test_nodes_must_be_full() -> None:
    none = np.empty(0, dtype=np.int64)
    with pytest.raises(ValueError, match="6 replicas do not fill nodes of 4"):
        rearrange_across_nodes(none, none, none, 6, 4, 1)
