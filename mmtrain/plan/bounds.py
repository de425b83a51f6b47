"""Lower bounds on a layout's step: cheap ones that order the search and spare most simulations."""

from collections.abc import Callable, Mapping

import numpy as np

from mmtrain.plan.pricing import FloatArray, StageSeconds
from mmtrain.program.actions import Compute, Forward
from mmtrain.program.builder import build_1f1b
from mmtrain.program.graph import StageGraph, StageId
from mmtrain.program.wiring import needs


def work_bound(graph: StageGraph, seconds: Mapping[StageId, StageSeconds]) -> tuple[float, StageId]:
    """Seconds no schedule can beat, averaged over the batches, and a stage on the rank that asks for them.

    A rank does all its work, cannot start before the first microbatch has come down to it, and its last
    backward still has to travel up to the first stage.
    """
    head, tail = _ways(graph, seconds)
    by_lane: dict[tuple[int, ...], list[StageId]] = {}
    for s in graph.stages:
        by_lane.setdefault(s.lanes[0], []).append(s.id)
    totals = []
    for held in by_lane.values():
        busy = np.sum([seconds[sid].busy for sid in held], axis=0).max(axis=1)  # stages on a rank have the same dp
        way = np.min([head[sid] for sid in held], axis=0) + np.min([tail[sid] for sid in held], axis=0)
        totals.append(busy + way)
    worst = int(np.argmax([total.mean() for total in totals]))
    return float(np.max(totals, axis=0).mean()), list(by_lane.values())[worst][-1]


def schedule_bound(graph: StageGraph, seconds: Mapping[StageId, StageSeconds], after: Callable[[int], float]) -> float:
    """Seconds 1F1B takes on the batches (mean) when messages are free; exact but for communication.

    after: seconds of collectives that a rank runs after its last compute. All replica groups and batches are
    replayed at once, as arrays of (batches, groups).
    """
    lanes = {lane[0] for s in graph.stages for lane in s.lanes}
    compute = {rank: [a for a in todo if isinstance(a, Compute)] for rank, todo in build_1f1b(graph).actions.items()}
    left = {rank: todo for rank, todo in compute.items() if rank in lanes}
    grids = {sid: _by_group(graph, sid, s) for sid, s in seconds.items()}
    finish: dict[Compute, FloatArray] = {}
    clock: dict[int, FloatArray] = {}
    while left:
        for rank in list(left):
            clock[rank] = _advance(graph, left[rank], grids, finish, clock.get(rank, np.zeros(1)))
            if not left[rank]:
                del left[rank]
    ends = [clock[rank] + after(rank) for rank in clock]
    return float(np.max(ends, axis=0).max(axis=1).mean())


def _advance(
    graph: StageGraph,
    todo: list[Compute],
    grids: Mapping[StageId, tuple[FloatArray, FloatArray]],
    finish: dict[Compute, FloatArray],
    clock: FloatArray,
) -> FloatArray:
    """Run a rank's actions, taking them off `todo`, until one waits for another rank; returns its clock."""
    done = 0
    for action in todo:
        producers = [flow.producer for flow in needs(graph, action)]
        if any(p not in finish for p in producers):
            break
        for p in producers:
            clock = np.maximum(clock, finish[p])
        per_group = graph.mesh(action.stage.unit).dp // graph.num_groups
        grid = grids[action.stage][0 if isinstance(action, Forward) else 1]
        clock = finish[action] = clock + grid[:, :, action.mb.replica % per_group, action.mb.index]
        done += 1
    del todo[:done]
    return clock


def _by_group(graph: StageGraph, sid: StageId, seconds: StageSeconds) -> tuple[FloatArray, FloatArray]:
    """Forward and backward seconds as (batches, groups, replicas of a group, microbatches)."""
    batches, _, num_microbatches = seconds.forward.shape
    shape = (batches, graph.num_groups, -1, num_microbatches)
    return seconds.forward.reshape(shape), seconds.backward.reshape(shape)


def _ways(
    graph: StageGraph, seconds: Mapping[StageId, StageSeconds]
) -> tuple[dict[StageId, FloatArray], dict[StageId, FloatArray]]:
    """Per stage and batch: the least time before its first forward, and after its last backward."""
    head: dict[StageId, FloatArray] = {}
    tail: dict[StageId, FloatArray] = {}
    for sid in graph.order:
        sources, none = [e.src for e in graph.inputs(sid)], np.zeros_like(seconds[sid].least_forward)
        head[sid] = np.max([none, *(head[s] + seconds[s].least_forward for s in sources)], axis=0)
        tail[sid] = np.max([none, *(tail[s] + seconds[s].least_backward for s in sources)], axis=0)
    return head, tail
