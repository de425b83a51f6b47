"""Builders write the order of compute actions; `lower` adds the communication.

1F1B (one forward, one backward; PipeDream-Flush, Megatron-LM) over a stage graph: microbatches move in waves, wave i
being microbatch i of every unit. A rank runs the forwards of a wave for all its stages, sources first, and the
backwards in reverse. A rank that lies d positions before the end of the pipeline starts with d waves of forwards,
then alternates one wave of forwards with one of backwards, and ends with the d waves of backwards that are left.

No deadlock: give wave i of position d the times F = 2i - d and B = 2i + d + 1. They rise along every rank's order and
along every data edge, since depth falls along edges; ties inside a position are broken by the stages' order.
"""

from collections.abc import Iterable, Mapping

from mmtrain.program.actions import Backward, Compute, Forward
from mmtrain.program.graph import Microbatch, StageGraph, StageId
from mmtrain.program.program import Program
from mmtrain.program.symmetry import symmetry
from mmtrain.program.wiring import held_stages


def build_1f1b(graph: StageGraph) -> Program:
    """Order the compute actions of every rank of replica group 0 as 1F1B; communication is still missing.

    Raises:
        ProgramError: the graph's parts do not fit together.
    """
    ranks = sorted(symmetry(graph).ranks[0])
    depth = depths(graph)
    return Program(graph, {rank: tuple(_one_f_one_b(graph, held_stages(graph, rank), depth)) for rank in ranks})


def depths(graph: StageGraph) -> dict[StageId, int]:
    """Count the pipeline positions after each stage on the longest path to the end.

    Stages on a common rank are one position; so are stages whose ranks the path visits again and again (v.0 on
    rank 0, v.1 on rank 1, l.0 on rank 0, l.1 on rank 1), which therefore run one wave at a time.
    """
    joined = _neighbours(graph)
    reach = {stage: _reachable(stage, joined) for stage in joined}
    depth: dict[StageId, int] = {}
    for stage in sorted(reach, key=lambda s: len(reach[s])):  # a later position reaches strictly less
        depth[stage] = 1 + max((depth[other] for other in reach[stage] if stage not in reach[other]), default=-1)
    return depth


def _neighbours(graph: StageGraph) -> dict[StageId, set[StageId]]:
    """Stages that each stage feeds or shares a rank with."""
    by_rank: dict[int, set[StageId]] = {}
    for stage in graph.stages:
        for lane in stage.lanes:
            for rank in lane:
                by_rank.setdefault(rank, set()).add(stage.id)
    joined = {s.id: {e.dst for e in graph.outputs(s.id)} for s in graph.stages}
    for together in by_rank.values():
        for sid in together:
            joined[sid] |= together
    return joined


def _reachable(start: StageId, joined: Mapping[StageId, set[StageId]]) -> set[StageId]:
    seen, frontier = {start}, [start]
    while frontier:
        for stage in joined[frontier.pop()] - seen:
            seen.add(stage)
            frontier.append(stage)
    return seen


def _one_f_one_b(graph: StageGraph, held: list[tuple[StageId, int]], depth: Mapping[StageId, int]) -> Iterable[Compute]:
    def forwards(wave: int) -> Iterable[Compute]:
        return (Forward(stage, Microbatch(stage.unit, replica, wave)) for stage, replica in held)

    def backwards(wave: int) -> Iterable[Compute]:
        for stage, replica in reversed(held):
            if graph.needs_backward(stage):
                yield Backward(stage, Microbatch(stage.unit, replica, wave))

    num_waves = graph.num_microbatches
    warm_up = min(depth[held[0][0]], num_waves)
    for wave in range(warm_up):
        yield from forwards(wave)
    for wave in range(warm_up, num_waves):
        yield from forwards(wave)
        yield from backwards(wave - warm_up)
    for wave in range(num_waves - warm_up, num_waves):
        yield from backwards(wave)
