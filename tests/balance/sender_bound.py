"""The linear-programming bound of node-wise rearrangement."""

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, vstack


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
