"""Lower bounds of what the largest sender of node-wise rearrangement sends off its node."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_matrix, vstack

REL_GAP = 1e-3  # of the best fill of a node, at which its search ends: the bound is what it proves


def single_node_bound(
    source: np.ndarray, batch: np.ndarray, sizes: np.ndarray, num_replicas: int, per_node: int, least: float
) -> float:
    """Return bytes that the largest sender sends off its node at least, if each node could choose any whole batches.

    A node takes `per_node` batches, and its replicas keep what they have for those alone. So the best choice of one
    node, with all batches to itself, bounds every placement. least: another lower bound; nodes that reach it are not
    searched further.
    """
    bound = least
    total = np.bincount(source, weights=sizes, minlength=num_replicas)
    for first in range(0, num_replicas, per_node):
        sends = total[first : first + per_node]
        if sends.max(initial=0) <= bound:
            continue
        is_of_node = source // per_node == first // per_node
        batches, column = np.unique(batch[is_of_node], return_inverse=True)
        volume = np.zeros((per_node, len(batches) + 1))
        np.add.at(volume, (source[is_of_node] - first, column), sizes[is_of_node])
        volume[:, -1] = 1
        solution = milp(
            np.eye(len(batches) + 1)[-1],
            constraints=[
                LinearConstraint(volume, sends, np.inf),
                LinearConstraint(np.append(np.ones(len(batches)), 0)[None], 0, per_node),
            ],
            integrality=np.append(np.ones(len(batches)), 0),
            bounds=Bounds(np.append(np.zeros(len(batches)), bound), np.append(np.ones(len(batches)), np.inf)),
            options={"mip_rel_gap": REL_GAP, "time_limit": 20},
        )
        if solution.mip_dual_bound is not None:  # HiGHS gives up on a few nodes, which then bound nothing
            bound = max(bound, float(solution.mip_dual_bound))
    return bound


def largest_sender_bound(
    source: np.ndarray, batch: np.ndarray, sizes: np.ndarray, num_replicas: int, per_node: int, known: float
) -> float:
    """Return bytes that the largest sender sends off its node at least, if batches could be shared between nodes.

    known: what some placement reaches. Senders that send less than the bound altogether do not matter; those below a
    guess are left out, until the bound is above the guess.
    """
    total = np.bincount(source, weights=sizes, minlength=num_replicas)
    guess = 0.9 * known
    while True:
        kept = total[source] > guess
        bound = _solve(source[kept], batch[kept], sizes[kept], num_replicas, per_node)
        if bound >= guess:
            return bound
        guess = bound if bound > 0.5 * guess else 0.7 * guess


def _solve(source: np.ndarray, batch: np.ndarray, sizes: np.ndarray, num_replicas: int, per_node: int) -> float:
    """Minimize t with total - kept <= t for every sender; a variable for each batch and node that it has pieces of."""
    num_nodes = num_replicas // per_node
    pairs, pair = np.unique(batch * num_nodes + source // per_node, return_inverse=True)
    variable, n = np.arange(len(pairs)), len(pairs) + 1
    total = np.bincount(source, weights=sizes, minlength=num_replicas)
    rows = np.concatenate([source, np.arange(num_replicas)])
    columns = np.concatenate([pair, np.full(num_replicas, n - 1)])
    keeps = coo_matrix((np.concatenate([-sizes, -np.ones(num_replicas)]), (rows, columns)), shape=(num_replicas, n))
    once = coo_matrix((np.ones(n - 1), (pairs // num_nodes, variable)), shape=(num_replicas, n))
    full = coo_matrix((np.ones(n - 1), (pairs % num_nodes, variable)), shape=(num_nodes, n))
    limits = np.concatenate([-total, np.ones(num_replicas), np.full(num_nodes, per_node)])
    solution = linprog(
        np.append(np.zeros(n - 1), 1), A_ub=vstack([keeps, once, full]).tocsr(), b_ub=limits, method="highs"
    )
    return float(solution.fun)
