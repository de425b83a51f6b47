"""Lowering: add the communication that compute actions need, so that a runtime can execute the program."""

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from mmtrain.program.ir.actions import Action, ComputeTask, Recv, ReduceGrads, ReduceShared, Step
from mmtrain.program.ir.channels import order_receives
from mmtrain.program.ir.data_dependencies import (
    EMBEDDINGS,
    covers_shared_embeddings,
    dispatches_before,
    gradient_buckets,
    parameter_gathers,
    participants,
    recvs_before,
    sends_after,
    shares_before,
)
from mmtrain.program.ir.graph import LLM, StageGraph
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.segments import direction, expand

# Compute actions by which a receive is posted ahead where layers are cut: the pieces of a few layers.
RECV_LOOKAHEAD_PIECES = 32


def lower(program: Program, reduce_last: bool = False) -> Program:
    """Insert communication into a program of compute actions.

    A receive is posted one compute action ahead of its consumer, or several where layers are cut into pieces, so that
    the transfer overlaps with compute. A send starts right after its producer; a TP group shares, and replicas
    dispatch, right before the consumer. The reduction of a model chunk's gradients starts after its last backward on
    the rank. That of shared weights comes after the last backward of the LLM, just before the reduction of the chunk
    that holds them. The optimizer step follows. What it updates is gathered in the next step, which starts with
    gathering all parameters.

    Args:
        reduce_last: reduce all gradients after all compute, in one order everywhere, as is also done where ranks end
            their chunks in different orders. Then no reduction overlaps with the compute of other units, but
            no order of compute can make two ranks wait for each other's reductions either.
    """
    graph = program.graph
    compute = {
        rank: [action for action in actions if isinstance(action, ComputeTask)]
        for rank, actions in program.actions.items()
    }
    reductions = {rank: _place_reductions(graph, rank, tasks) for rank, tasks in compute.items()}
    if reduce_last or not _start_in_one_order(graph, reductions):
        for rank, places in reductions.items():
            in_one_order = [reduction for reduction in gradient_buckets(graph, rank) if reduction in places]
            reductions[rank] = dict.fromkeys(in_one_order, len(compute[rank]) - 1)
    lowered = {rank: _lower_rank(graph, rank, tasks, reductions[rank]) for rank, tasks in compute.items()}
    return Program(graph, order_receives(lowered))


def _place_reductions(graph: StageGraph, rank: int, compute: Sequence[ComputeTask]) -> dict[ReduceGrads, int]:
    """Return behind which task each reduction of gradients comes; of those behind one task, in their order."""
    last_backwards = {
        part.stage: place
        for place, task in enumerate(compute)
        for part in expand(graph, task)
        if direction(part) == "B"
    }
    places: dict[ReduceGrads, int] = {}
    for reduction, stages in gradient_buckets(graph, rank).items():
        if covers_shared_embeddings(graph, rank, stages):
            # The reduction of shared weights holds the rank: before, it would keep chunks from their backwards.
            stages = tuple(stage for stage in last_backwards if stage.unit == LLM)
        ends = [last_backwards[stage] for stage in stages if stage in last_backwards]
        if ends:
            places[reduction] = max(ends)
    return dict(sorted(places.items(), key=lambda item: item[1]))


def _start_in_one_order(graph: StageGraph, reductions: Mapping[int, Iterable[ReduceGrads]]) -> bool:
    """Return whether there is one order of all reductions in which every rank starts those that it takes part in."""
    order: TopologicalSorter[tuple[ReduceGrads, tuple[int, ...]]] = TopologicalSorter()
    for rank, of_rank in reductions.items():
        joint = [(reduction, participants(graph, rank, reduction)) for reduction in of_rank]
        for earlier, later in pairwise(joint):
            order.add(later, earlier)
    try:
        order.prepare()
    except CycleError:
        return False
    return True


def _lower_rank(
    graph: StageGraph, rank: int, compute: Sequence[ComputeTask], reductions: Mapping[ReduceGrads, int]
) -> list[Action]:
    ahead = RECV_LOOKAHEAD_PIECES if any(stage.pieces for stage in graph.stages) else 1
    posts: list[list[Recv]] = [recvs_before(graph, rank, action) for action in compute]
    buckets = gradient_buckets(graph, rank)
    lowered: list[Action] = [*parameter_gathers(graph, rank), *(recv for recvs in posts[:ahead] for recv in recvs)]
    for index, action in enumerate(compute):
        if index + ahead < len(posts):
            lowered += posts[index + ahead]
        lowered += dispatches_before(graph, action)
        lowered += shares_before(graph, action)
        lowered.append(action)
        lowered += sends_after(graph, rank, action)
        for reduction, place in reductions.items():
            if place != index:
                continue
            if covers_shared_embeddings(graph, rank, buckets[reduction]):
                # Before the reduction: after it each replica holds only its own shard of the gradient.
                lowered.append(ReduceShared(EMBEDDINGS))
            lowered.append(reduction)
    return [*lowered, Step()]
