"""Partition and recompute as one mixed-integer program (HiGHS): the reference that the planner is held against.

x[l, p]: layer l lies in stage p; r[l, p]: and is recomputed. Stages are runs of layers, each fits into memory, and the
makespan of 1F1B with equal microbatches, (M - 1) x slowest stage + one microbatch through all, is least.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from mmtrain.costs import Hardware, machine_for
from mmtrain.costs.rank_memory import MEMORY_MARGIN
from mmtrain.plan.estimate.evaluate import evaluate_layout
from mmtrain.plan.estimate.layer_costs import LayerCosts
from mmtrain.plan.estimate.memory_fit import FittedLayout, fit_memory
from mmtrain.plan.search.best_first_search import best_first_search
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.plan.search.layer_partition import (
    IntArray,
    LayerChain,
    in_flight_by_chunk,
    layer_chains,
    layout_graph,
    partitioned_layout,
)
from mmtrain.plan.search.mesh_enumeration import MeshAssignment, mesh_assignments
from mmtrain.program.schedules.builder import in_flight_microbatches
from tests.plan.factory import VISION, layer_costs_for, recipe


@dataclass(frozen=True)
class Pipeline:
    """One pipeline over an encoder and an LLM, short of memory."""

    layer_costs: LayerCosts
    choices: Mapping[str, UnitChoices]
    machine: Hardware
    assignment: MeshAssignment
    chain: LayerChain
    alive: IntArray  # as in `cut.recomputed`

    def planned(self) -> float:
        """Simulated seconds of the step that the search finds; infinity where nothing fits."""
        judged = best_first_search(
            [(0.0, self.assignment)], self.layer_costs, self.choices, self.machine, at_least=1
        ).candidates
        return judged[0].step_time_s if judged else float("inf")

    def simulated(self, cuts: tuple[int, ...]) -> float | None:
        """Simulated seconds of the step under these cuts, recomputing what that takes; None where they do not fit."""
        alive = in_flight_microbatches(
            layout_graph(partitioned_layout(self.assignment, self.layer_costs, (cuts,)), self.layer_costs)
        )
        found = fit_memory(self.assignment, self.layer_costs, (cuts,), self.machine, alive)
        return (
            evaluate_layout(found.layout, self.layer_costs, self.machine).step_time_s
            if isinstance(found, FittedLayout)
            else None
        )


def pipeline(vision: int, llm: int, pp: int, batch: int, share: float) -> Pipeline:
    """So many blocks, pipeline ranks and microbatches, and `share` of the memory that its even cut needs at most."""
    settings = recipe(vision={**VISION, "layers": vision}, llm={"layers": llm}, global_batch=batch)
    layer_costs, choices = layer_costs_for(settings)
    assignment = next(s for s in mesh_assignments(choices, pp) if str(s) == f"unified: tp1 pp{pp} dp1")
    (chain,) = layer_chains(assignment, layer_costs, choices)
    assert chain.anchor is not None
    graph = layout_graph(partitioned_layout(assignment, layer_costs, (chain.anchor,)), layer_costs)
    most = max(held.total for held in layer_costs.memory(graph).values())
    machine = replace(machine_for(settings, "cpu-core"), memory_bytes=share * most)
    return Pipeline(
        layer_costs, choices, machine, assignment, chain, in_flight_by_chunk(chain, in_flight_microbatches(graph))
    )


@dataclass(frozen=True)
class Solved:
    """The best cuts found, and whether they are proven to be."""

    cuts: tuple[int, ...]
    is_proven: bool


def best_cuts(chain: LayerChain, alive: IntArray, memory_bytes: float, seconds: float = 60.0) -> Solved | None:
    """Solve for one chain with a chunk a rank; alive as in `cut.recomputed`; None if nothing fits, or in time."""
    line, parts, num = chain.costs, chain.num_chunks, len(chain.costs.seconds)
    size, slowest = num * parts, 2 * num * parts
    objective = np.zeros(2 * size + 1)
    objective[slowest] = chain.num_microbatches - 1
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
        add(held | spared, -np.inf, memory_bytes / (1 + MEMORY_MARGIN) - constant)
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
