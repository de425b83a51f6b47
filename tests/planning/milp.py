"""Partition and recompute as one mixed-integer program (HiGHS): the reference for the planner.

x[l, p]: layer l lies in stage p; r[l, p]: and is recomputed. Stages are runs of layers, each fits into memory, and the
makespan of 1F1B with equal microbatches, (M - 1) x slowest stage + one microbatch through all, is least.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from mmtrain.costs.rank_memory import MEMORY_MARGIN
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_partition import (
    ChainPartition,
    IntArray,
    LayerChain,
    in_flight_by_chunk,
    layout_graph,
    partitioned_layout,
)
from mmtrain.planning.search.best_first_search import AllocatedCandidates
from mmtrain.planning.space.candidate import Candidate
from mmtrain.program.schedules.builder import in_flight_microbatches
from tests.planning.exhaustive import all_candidates
from tests.planning.factory import VISION, evaluator_for, recipe, with_memory
from tests.plans import best_first_search


@dataclass(frozen=True)
class Pipeline:
    """One pipeline over an encoder and an LLM with too little memory to run without recomputation."""

    evaluator: Evaluator
    candidate: Candidate
    chain: LayerChain
    num_in_flight: IntArray  # (layers, stages), see `layer_partition.in_flight_by_chunk`

    @property
    def memory_bytes(self) -> float:
        """Return the memory of a rank."""
        return self.evaluator.memory_bytes

    def planned(self) -> float:
        """Return the simulated seconds of the step that the search finds; infinity where nothing fits."""
        return best_first_search(AllocatedCandidates([self.candidate]), self.evaluator, num_simulated=1).fastest_s

    def simulated(self, partition: ChainPartition) -> float | None:
        """Return the simulated seconds of the step under a partition, recomputing what memory demands.

        None where it does not fit.
        """
        layer_costs = self.evaluator.layer_costs
        layout = partitioned_layout(self.candidate.assignment, layer_costs, (partition,))
        num_in_flight = in_flight_microbatches(layout_graph(layout, layer_costs))
        fitted = self.evaluator.fit(self.candidate.partitioned((partition,)), num_in_flight)
        return self.evaluator.simulate(fitted).step_time_s if isinstance(fitted, Candidate) else None


def pipeline(vision: int, llm: int, pp: int, batch: int, share: float) -> Pipeline:
    """Make a pipeline of `pp` ranks that have a share of the memory that its anchor partition needs."""
    settings = recipe(vision={**VISION, "layers": vision}, llm={"layers": llm}, global_batch=batch)
    evaluator = evaluator_for(settings)
    layer_costs = evaluator.layer_costs
    candidates = all_candidates(evaluator, pp)
    candidate = next(c for c in candidates if str(c.assignment) == f"unified: tp1 pp{pp} dp1")
    (chain,) = evaluator.layer_chains(candidate)
    assert chain.anchor is not None
    graph = layout_graph(partitioned_layout(candidate.assignment, layer_costs, (chain.anchor,)), layer_costs)
    peak_bytes = max(rank.total for rank in layer_costs.memory(graph).values())
    num_in_flight = in_flight_by_chunk(chain, in_flight_microbatches(graph))
    return Pipeline(with_memory(evaluator, share * peak_bytes), candidate, chain, num_in_flight)


@dataclass(frozen=True)
class Solution:
    """The best partition found, and whether it is proven optimal."""

    partition: ChainPartition
    is_proven: bool


def solve(chain: LayerChain, num_in_flight: IntArray, memory_bytes: float, seconds: float = 60.0) -> Solution | None:
    """Solve for one chain with one model chunk per rank; None if nothing fits, or nothing is found in time."""
    costs = chain.costs
    parts = chain.num_chunks
    num = len(chain.costs.seconds)
    size, slowest = num * parts, 2 * num * parts
    objective = np.zeros(2 * size + 1)
    objective[slowest] = chain.num_microbatches - 1
    objective[size:slowest] = np.repeat(costs.recompute_seconds, parts)
    rows: list[dict[int, float]] = []
    low: list[float] = []
    high: list[float] = []

    def add(row: dict[int, float], minimum: float, maximum: float) -> None:
        rows.append(row)
        low.append(minimum)
        high.append(maximum)

    x = np.arange(size).reshape(num, parts)
    r = x + size
    # The largest layer's working bytes and the messages, as if everything were recomputed: no less than it takes.
    constant = float(costs.recompute_working_bytes.max() + 2 * costs.input_bytes.max())
    for layer in range(num):
        add({int(x[layer, p]): 1.0 for p in range(parts)}, 1, 1)
        for p in range(parts):
            add({int(r[layer, p]): 1.0, int(x[layer, p]): -1.0}, -np.inf, 0)
            if layer + 1 < num:
                row = {int(x[layer, q]): 1.0 for q in range(p + 1)}
                add(row | {int(x[layer + 1, q]): -1.0 for q in range(p + 1)}, 0, np.inf)
    for p in range(parts):
        add({int(x[layer, p]): 1.0 for layer in range(num)}, 1, np.inf)
        busy = {int(x[layer, p]): float(costs.seconds[layer]) for layer in range(num)}
        add(
            busy | {int(r[layer, p]): float(costs.recompute_seconds[layer]) for layer in range(num)} | {slowest: -1.0},
            -np.inf,
            0,
        )
        held = {
            int(x[layer, p]): float(costs.state_bytes[layer] + num_in_flight[layer, p] * costs.kept_bytes[layer])
            for layer in range(num)
        }
        spared = {int(r[layer, p]): -float(num_in_flight[layer, p] * costs.saved_bytes[layer]) for layer in range(num)}
        add(held | spared, -np.inf, memory_bytes / (1 + MEMORY_MARGIN) - constant)
    cells = [(i, j, value) for i, row in enumerate(rows) for j, value in row.items()]
    row_of, column_of, values = (np.array(column) for column in zip(*cells, strict=True))
    matrix = csr_array((values, (row_of, column_of)), shape=(len(rows), 2 * size + 1))
    integral = np.append(np.ones(2 * size), 0)
    optimum = milp(
        objective,
        constraints=LinearConstraint(matrix, low, high),
        integrality=integral,
        bounds=Bounds(0, np.append(np.ones(2 * size), np.inf)),
        options={"time_limit": seconds},
    )
    if optimum.x is None:
        return None
    stage = optimum.x[:size].reshape(num, parts).argmax(axis=1)
    return Solution((0, *(np.flatnonzero(np.diff(stage)) + 1).tolist(), num), optimum.status == 0)
