"""Order an image generator on the LLM's ranks, under a mesh of its own: each pass runs as soon as it can.

The LLM's last stage sends its outputs at the queries of a microbatch to the generator, and waits for their gradient
before it runs its backward. So the generator's passes lie between the LLM's forward and backward of a microbatch, on
every rank that holds a part of the generator. Both units keep the order that they have on ranks of their own
(`place_apart`), where the LLM runs ahead by as many microbatches as the generator asks for. `merge_generator` puts the
two orders of a rank together: the rank takes the pass that can start first, and of two that can start at once the
generator's, for which the LLM's last stage waits.

No deadlock: the merged order is that of an execution in which every pass started after what it reads had ended. Such
an execution always goes on, because the two orders run to their end on ranks of their own, and no rank ever reserves
itself for a pass that has to wait.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mmtrain.program.ir.actions import Backward, Compute, Direction, Forward
from mmtrain.program.ir.graph import LLM, Microbatch, StageGraph, StageId, microbatches_per_block
from mmtrain.program.ir.segments import direction
from mmtrain.program.schedules.one_f_one_b import order_1f1b

PassSeconds = Callable[[StageId, Direction], float]
BACKWARD_PER_FORWARD = 2.0  # durations of passes where no costs are known: two products of matrices for one


class _StagePass(NamedTuple):
    """A forward or backward of a stage, of the microbatches that all replicas have under this number."""

    stage: StageId
    kind: Direction
    mb: int


@dataclass
class _RankClass:
    """Ranks that hold the same stages, and how far they have come in the order of each unit."""

    orders: tuple[Sequence[_StagePass], ...]  # the generator's first: it goes first where two passes can start at once
    num_done: list[int]
    free_s: float = 0.0  # when the rank has ended its last pass

    def next_passes(self) -> Iterable[tuple[int, _StagePass]]:
        """Yield the next pass of each order, with the number of the order."""
        for number, order in enumerate(self.orders):
            if self.num_done[number] < len(order):
                yield number, order[self.num_done[number]]


def generators_on_llm(graph: StageGraph) -> tuple[str, ...]:
    """Return the units that read from the LLM on its ranks, under meshes that divide these in another way."""
    fed_by_llm = dict.fromkeys(e.dst.unit for e in graph.edges if e.crosses_units and e.src.unit == LLM)
    if not fed_by_llm:
        return ()
    llm = graph.mesh(LLM)
    return tuple(
        mesh.unit
        for mesh in map(graph.mesh, fed_by_llm)
        if (mesh.tp, mesh.dp) != (llm.tp, llm.dp) and not set(llm.ranks).isdisjoint(mesh.ranks)
    )


def order_with_generator(
    graph: StageGraph, ranks: Sequence[int], seconds: PassSeconds | None = None
) -> dict[int, list[Compute]]:
    """Return the compute of each rank for an LLM and what follows it, with a backward for every forward.

    This is 1F1B, unless a generator lies on the LLM's ranks under a mesh of its own.

    Args:
        graph: the LLM, and the units that read from it.
        ranks: those whose order is wanted.
        seconds: what a pass of a stage takes; by default all forwards take the same, and backwards twice that.
    """
    units = generators_on_llm(graph)
    if not units:
        return order_1f1b(graph, ranks)
    apart, moved_by = place_apart(graph, units)
    # All ranks take part, whichever are wanted: who asks for few must get the same order.
    held = {rank: tuple(stage for stage, _ in graph.held_by(rank)) for rank in graph.all_ranks}
    first_of_class = {stages: rank for rank, stages in reversed(held.items())}
    own_order = order_1f1b(apart, [*first_of_class.values(), *(rank + moved_by for rank in first_of_class.values())])
    classes = {
        stages: tuple(_without_replicas(own_order[of]) for of in (rank + moved_by, rank))
        for stages, rank in first_of_class.items()
    }
    merged = merge_generator(graph, classes, seconds or _unit_seconds)
    return {rank: [_on_replica(graph, rank, stage_pass) for stage_pass in merged[held[rank]]] for rank in ranks}


def place_apart(graph: StageGraph, units: Sequence[str]) -> tuple[StageGraph, int]:
    """Return the graph with some units on ranks of their own, and by how much the numbers of these are larger."""
    moved_by = max(graph.all_ranks) + 1

    def moved(ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank + moved_by for rank in ranks)

    meshes = tuple(replace(m, ranks=moved(m.ranks)) if m.unit in units else m for m in graph.meshes)
    stages = tuple(
        replace(stage, tp_groups=tuple(map(moved, stage.tp_groups))) if stage.id.unit in units else stage
        for stage in graph.stages
    )
    return replace(graph, meshes=meshes, stages=stages), moved_by


def merge_generator(
    graph: StageGraph,
    classes: Mapping[tuple[StageId, ...], tuple[Sequence[_StagePass], ...]],
    seconds: PassSeconds,
) -> dict[tuple[StageId, ...], list[_StagePass]]:
    """Merge the orders of the units on each class of ranks by running them: see the top of this file.

    All replicas of a unit run in step, so a pass stands for those of all ranks that hold its stage, and what reads it
    waits for all of them.
    """
    states = {stages: _RankClass(orders, [0] * len(orders)) for stages, orders in classes.items()}
    num_holders: dict[StageId, int] = {}
    for stages in classes:
        for stage in stages:
            num_holders[stage] = num_holders.get(stage, 0) + 1
    merged: dict[tuple[StageId, ...], list[_StagePass]] = {stages: [] for stages in classes}
    ends: dict[_StagePass, list[float]] = {}  # by class that has run it
    inputs: dict[_StagePass, list[_StagePass]] = {}

    def start_seconds(stage_pass: _StagePass, free_s: float) -> float:
        if stage_pass not in inputs:
            inputs[stage_pass] = list(_inputs(graph, stage_pass))
        return _start_seconds(inputs[stage_pass], ends, num_holders, free_s)

    for _ in range(sum(len(order) for orders in classes.values() for order in orders)):
        start_s, number, stages = min(
            (start_seconds(stage_pass, state.free_s), number, stages)
            for stages, state in states.items()
            for number, stage_pass in state.next_passes()
        )
        assert start_s < math.inf, "the orders run to their end on ranks of their own"
        state = states[stages]
        stage_pass = state.orders[number][state.num_done[number]]
        state.num_done[number] += 1
        state.free_s = start_s + seconds(stage_pass.stage, stage_pass.kind)
        ends.setdefault(stage_pass, []).append(state.free_s)
        merged[stages].append(stage_pass)
    return merged


def _start_seconds(
    inputs: Sequence[_StagePass],
    ends: Mapping[_StagePass, Sequence[float]],
    num_holders: Mapping[StageId, int],
    free_s: float,
) -> float:
    """Return when a pass can start on a rank that is free from `free_s` on; infinite while its inputs are not run."""
    start_s = free_s
    for needed in inputs:
        known = ends.get(needed, ())
        if len(known) < num_holders.get(needed.stage, 0):
            return math.inf
        start_s = max(start_s, *known)
    return start_s


def _inputs(graph: StageGraph, stage_pass: _StagePass) -> Iterable[_StagePass]:
    """Yield the passes of other stages whose results a pass reads; a stage's own forward comes first in its order."""
    stage, kind, mb = stage_pass
    for edge in graph.inputs(stage) if kind == "F" else graph.outputs(stage):
        neighbor = edge.src if kind == "F" else edge.dst
        per_block, neighbor_per_block = 1, 1
        if edge.crosses_units:
            per_block, neighbor_per_block = microbatches_per_block(
                graph.mesh(stage.unit).num_microbatches, graph.mesh(neighbor.unit).num_microbatches
            )
        first = mb // per_block * neighbor_per_block
        for number in range(first, first + neighbor_per_block):
            yield _StagePass(neighbor, kind, number)


def _unit_seconds(stage: StageId, kind: Direction) -> float:
    return 1.0 if kind == "F" else BACKWARD_PER_FORWARD


def _without_replicas(order: Iterable[Compute]) -> list[_StagePass]:
    return [_StagePass(action.stage, direction(action), action.mb.index) for action in order]


def _on_replica(graph: StageGraph, rank: int, stage_pass: _StagePass) -> Compute:
    replica = dict(graph.held_by(rank))[stage_pass.stage]
    mb = Microbatch(stage_pass.stage.unit, replica, stage_pass.mb)
    return Forward(stage_pass.stage, mb) if stage_pass.kind == "F" else Backward(stage_pass.stage, mb)
