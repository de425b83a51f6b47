"""Partition and recompute as one mixed-integer program (HiGHS): the reference that the planner is held against.

x[l, p]: layer l lies in stage p; r[l, p]: and is recomputed. Stages are runs of layers, each fits into memory, and the
makespan of 1F1B with equal microbatches, (M - 1) x slowest stage + one microbatch through all, is least.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from mmtrain.costs.memory import MARGIN
from mmtrain.plan.cut import IntArray, Track


@dataclass(frozen=True)
class Solved:
    """The best cuts found, and whether they are proven to be."""

    cuts: tuple[int, ...]
    is_proven: bool


def best_cuts(track: Track, alive: IntArray, memory_bytes: float, seconds: float = 60.0) -> Solved | None:
    """Solve for one track with a chunk a rank; alive as in `cut.recomputed`; None if nothing fits, or in time."""
    line, parts, num = track.line, track.parts, len(track.line.seconds)
    size, slowest = num * parts, 2 * num * parts
    objective = np.zeros(2 * size + 1)
    objective[slowest] = track.num_microbatches - 1
    objective[size:slowest] = np.repeat(line.again, parts)
    rows: list[dict[int, float]] = []
    low: list[float] = []
    high: list[float] = []

    def add(row: dict[int, float], least: float, most: float) -> None:
        rows.append(row)
        low.append(least)
        high.append(most)

    x = np.arange(size).reshape(num, parts)
    r = x + size
    # The largest layer's working bytes and the messages, as if everything were recomputed: no less than it takes.
    constant = float(line.working_again.max() + 2 * line.input_bytes.max())
    for at in range(num):
        add({int(x[at, p]): 1.0 for p in range(parts)}, 1, 1)
        for p in range(parts):
            add({int(r[at, p]): 1.0, int(x[at, p]): -1.0}, -np.inf, 0)
            if at + 1 < num:
                row = {int(x[at, q]): 1.0 for q in range(p + 1)}
                add(row | {int(x[at + 1, q]): -1.0 for q in range(p + 1)}, 0, np.inf)
    for p in range(parts):
        add({int(x[at, p]): 1.0 for at in range(num)}, 1, np.inf)
        busy = {int(x[at, p]): float(line.seconds[at]) for at in range(num)}
        add(busy | {int(r[at, p]): float(line.again[at]) for at in range(num)} | {slowest: -1.0}, -np.inf, 0)
        held = {int(x[at, p]): float(line.state_bytes[at] + alive[at, p] * line.kept_bytes[at]) for at in range(num)}
        spared = {int(r[at, p]): -float(alive[at, p] * line.saved_bytes[at]) for at in range(num)}
        add(held | spared, -np.inf, memory_bytes / (1 + MARGIN) - constant)
    cells = [(i, j, value) for i, row in enumerate(rows) for j, value in row.items()]
    row_of, column_of, values = (np.array(column) for column in zip(*cells, strict=True))
    matrix = csr_array((values, (row_of, column_of)), shape=(len(rows), 2 * size + 1))
    integral = np.append(np.ones(2 * size), 0)
    found = milp(
        objective,
        constraints=LinearConstraint(matrix, low, high),
        integrality=integral,
        bounds=Bounds(0, np.append(np.ones(2 * size), np.inf)),
        options={"time_limit": seconds},
    )
    if found.x is None:
        return None
    stage = found.x[:size].reshape(num, parts).argmax(axis=1)
    return Solved((0, *(np.flatnonzero(np.diff(stage)) + 1).tolist(), num), found.status == 0)
