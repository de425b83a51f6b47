"""Lowering: add the communication that compute actions need, so that a runtime can execute the program."""

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from mmtrain.program.ir.actions import (
    Action,
    Backward,
    ComputeTask,
    Forward,
    Partial,
    Recv,
    ReduceGrads,
    ReduceShared,
    Step,
)
from mmtrain.program.ir.channels import order_receives
from mmtrain.program.ir.data_dependencies import (
    EMBEDDINGS,
    Bucket,
    covers_shared_embeddings,
    dispatches_before,
    gradient_buckets,
    parameter_gathers,
    participants,
    recvs_before,
    sends_after,
    shares_before,
    stage_buckets,
)
from mmtrain.program.ir.graph import LLM, StageGraph, StageId
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.segments import direction, expand

# Compute actions by which a receive is posted ahead where layers are cut: the pieces of a few layers.
RECV_LOOKAHEAD_PIECES = 32


def lower(program: Program, reduce_last: bool = False) -> Program:
    """Insert communication into a program of compute actions.

    A receive is posted one compute action ahead of its consumer, or several where layers are cut into pieces, so that
    the transfer overlaps with compute. A send starts right after its producer; a TP group shares, and replicas
    dispatch, right before the consumer. The reduction of a bucket's gradients starts after its last backward on
    the rank. That of shared weights comes after the last backward of the LLM, just before the reduction of the bucket
    that holds them. The optimizer step follows. What it updates is gathered in the next step, which starts with
    gathering all parameters. Where a model chunk has several buckets, its last backward is cut between them, so that
    the reduction of one runs beside the backward of the next; and so is its first forward, which waits for the
    parameters of one bucket after the other.

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
    parts = {rank: _cut_between_buckets(graph, rank, tasks) for rank, tasks in compute.items()}
    reductions = {rank: _place_reductions(graph, rank, _joined(of_rank)) for rank, of_rank in parts.items()}
    if reduce_last or not _start_in_one_order(graph, reductions):
        for rank, places in reductions.items():
            in_one_order = [reduction for reduction in gradient_buckets(graph, rank) if reduction in places]
            reductions[rank] = dict.fromkeys(in_one_order, len(_joined(parts[rank])) - 1)
    lowered = {rank: _lower_rank(graph, rank, of_rank, reductions[rank]) for rank, of_rank in parts.items()}
    return Program(graph, order_receives(lowered))


def _cut_between_buckets(graph: StageGraph, rank: int, compute: Sequence[ComputeTask]) -> list[list[ComputeTask]]:
    """Return each task in parts: the first forward and the last backward of a chunk are cut between its buckets.

    What an order cuts or fills already stays as it is, and so does a stage whose layers are cut into pieces: there a
    cut would leave tensor-parallel communication under way.
    """
    stages = {bucket.stage for bucket in gradient_buckets(graph, rank).values()}
    bounds = {stage: _bounds_to_cut(graph, stage) for stage in stages if len(graph.stage(stage).bucket_starts) > 1}
    parts: list[list[ComputeTask]] = [[task] for task in compute]
    if not any(bounds.values()):
        return parts
    first_forwards: dict[StageId, int] = {}
    last_backwards: dict[StageId, int] = {}
    for place, task in enumerate(compute):
        for part in expand(graph, task):
            if direction(part) == "F":
                first_forwards.setdefault(part.stage, place)
            else:
                last_backwards[part.stage] = place
    for stage, of_stage in bounds.items():
        for at in (first_forwards.get(stage), last_backwards.get(stage)):
            if at is not None and isinstance(task := compute[at], Forward | Backward):
                kind = direction(task)
                partials = [Partial(stage, task.mb, kind, lo, hi) for lo, hi in of_stage]
                parts[at] = list(partials if kind == "F" else reversed(partials))
    return parts


def _bounds_to_cut(graph: StageGraph, stage: StageId) -> list[tuple[int, int]]:
    """Return the layers [lo, hi) of each part of a pass of a stage; none if it stays whole."""
    return [] if graph.stage(stage).pieces else [(bucket.lo, bucket.hi) for bucket in stage_buckets(graph, stage)]


def _joined(parts: Iterable[Sequence[ComputeTask]]) -> list[ComputeTask]:
    return [part for of_task in parts for part in of_task]


def _place_reductions(graph: StageGraph, rank: int, compute: Sequence[ComputeTask]) -> dict[ReduceGrads, int]:
    """Return behind which task each reduction of gradients comes; of those behind one task, in their order."""
    buckets = gradient_buckets(graph, rank)
    to_place: dict[StageId, dict[ReduceGrads, Bucket]] = {}
    for reduction, bucket in buckets.items():
        to_place.setdefault(bucket.stage, {})[reduction] = bucket
    ends: dict[ReduceGrads, int] = {}
    llm_end = -1
    for place in range(len(compute) - 1, -1, -1):
        for part in expand(graph, compute[place]):
            if direction(part) == "F":
                continue
            if part.stage.unit == LLM:
                llm_end = max(llm_end, place)
            of_stage = to_place.get(part.stage, {})
            for reduction in [r for r, bucket in of_stage.items() if bucket.holds_any(graph, part)]:
                del of_stage[reduction]
                ends[reduction] = place
    places: dict[ReduceGrads, tuple[int, bool]] = {}
    for reduction, bucket in buckets.items():
        is_shared = covers_shared_embeddings(graph, rank, bucket)
        if reduction in ends:
            # The reduction of shared weights holds the rank: before, it would keep chunks from their backwards, and
            # other reductions from their start.
            places[reduction] = (llm_end if is_shared else ends[reduction], is_shared)
    return {reduction: place for reduction, (place, _) in sorted(places.items(), key=lambda item: item[1])}


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
    graph: StageGraph, rank: int, parts: Sequence[Sequence[ComputeTask]], reductions: Mapping[ReduceGrads, int]
) -> list[Action]:
    """Add communication to a rank's tasks, each in its parts; reductions: behind which of all parts each comes."""
    ahead = RECV_LOOKAHEAD_PIECES if any(stage.pieces for stage in graph.stages) else 1
    posts: list[list[Recv]] = [recvs_before(graph, rank, of_task[0]) for of_task in parts]  # the first part reads
    buckets = gradient_buckets(graph, rank)
    behind: dict[int, list[ReduceGrads]] = {}
    for reduction, place in reductions.items():
        behind.setdefault(place, []).append(reduction)
    lowered: list[Action] = [*parameter_gathers(graph, rank), *(recv for recvs in posts[:ahead] for recv in recvs)]
    num_parts = 0
    for index, of_task in enumerate(parts):
        if index + ahead < len(posts):
            lowered += posts[index + ahead]
        for part in of_task:
            lowered += dispatches_before(graph, part)
            lowered += shares_before(graph, part)
            lowered.append(part)
            lowered += sends_after(graph, rank, part)
            for reduction in behind.get(num_parts, ()):
                if covers_shared_embeddings(graph, rank, buckets[reduction]):
                    # Before the reduction: after it each replica holds only its own shard of the gradient.
                    lowered.append(ReduceShared(EMBEDDINGS))
                lowered.append(reduction)
            num_parts += 1
    return [*lowered, Step()]
