"""In what order a plan's ranks do what, as the timetable by which the loader orders microbatches in time."""

from collections.abc import Iterable, Mapping

from mmtrain.balance.step_targets import LLM, ScheduledTask, ScheduleTable, SequenceCost
from mmtrain.plan.artifact.plan import SchedulePlan
from mmtrain.program.ir.actions import Compute, Fill, Partial
from mmtrain.program.ir.graph import StageGraph, StageId
from mmtrain.program.ir.segments import direction, num_segments
from mmtrain.program.schedules.builder import build_compute
from mmtrain.program.schedules.pipeline_positions import find_positions

MAX_SCHEDULED_PASSES = 10_000  # a step is arranged in the time it takes to follow them some hundred times over
StageReplica = tuple[StageId, int]  # a stage, and the replica that holds it


def build_schedule_table(
    graph: StageGraph, schedule: SchedulePlan, prices: Mapping[StageId, tuple[SequenceCost, SequenceCost]]
) -> ScheduleTable | None:
    """The turns of the first LLM replica's ranks and of those that feed it; one rank stands for each stage replica.

    prices: what a stage's forward and backward cost. Of encoders on ranks of their own the first replica stands for
    all, since they share work evenly; on the LLM's ranks each is there. None where work lies in the gaps of other work,
    which no recurrence of turns describes, or where there are too many turns to follow them often.
    """
    followed = _followed(graph)
    ranks = sorted(set(followed.values()))
    tasks: dict[tuple[StageReplica, bool, int, int], int] = {}
    turns: list[list[tuple[int, int]]] = []
    actions = build_compute(graph, schedule.kind, schedule.order, ranks).actions
    stages = {stage_replica: number for number, stage_replica in enumerate(followed)}
    for rank in ranks:
        if any(isinstance(action, Fill) for action in actions[rank]):
            return None
        turns.append([])
        for action in actions[rank]:
            assert isinstance(action, Compute)
            stage_replica = action.stage, action.mb.replica
            if followed.get(stage_replica) == rank:
                whole = (0, num_segments(graph, action.stage))
                lo, hi = (action.lo, action.hi) if isinstance(action, Partial) else whole
                key = stage_replica, direction(action) == "F", lo, hi
                turns[-1].append((tasks.setdefault(key, len(tasks)), action.mb.index))
    if sum(map(len, turns)) > MAX_SCHEDULED_PASSES:
        return None
    return ScheduleTable(
        tuple(
            ScheduledTask(
                stages[stage, replica],
                stage.unit,
                forward,
                _part(prices[stage][not forward], hi - lo, graph, stage),
            )
            for (stage, replica), forward, lo, hi in tasks
        ),
        tuple(tuple(_sources(graph, stage_replica, stages)) for stage_replica in followed),
        tuple(" ".join(str(task + len(tasks) * mb) for task, mb in own) for own in turns),
    )


def is_single_chain(graph: StageGraph) -> bool:
    """Whether 1F1B of two units is that of one chain of ranks, each visited once, back and forth."""
    counts = {mesh.num_microbatches for mesh in graph.meshes}
    tp_groups = (
        {graph.stage(sid).tp_groups for part in p.virtual_stages for sid in part} for p in find_positions(graph)
    )
    once = all(len(of_position) == 1 for of_position in tp_groups)
    return len(graph.meshes) == 2 and len(counts) == 1 and once and all(map(graph.needs_backward, graph.order))


def _followed(graph: StageGraph) -> dict[StageReplica, int]:
    """The stage replicas that are followed, each with the rank that stands for it, sources first."""
    llm = {rank for stage in graph.stages if stage.id.unit == LLM for rank in stage.tp_groups[0][:1]}
    found = {}
    for sid in graph.order:
        own = 1 if sid.unit == LLM else graph.mesh(sid.unit).dp // graph.num_groups
        tp_groups = graph.stage(sid).tp_groups[:own]
        among = [r for r, tp_group in enumerate(tp_groups) if tp_group[0] in llm]
        for replica in among or [0]:
            found[sid, replica] = tp_groups[replica][0]
    return found


def _sources(graph: StageGraph, stage_replica: StageReplica, stages: Mapping[StageReplica, int]) -> Iterable[int]:
    """Return the followed stage replicas that one reads from: its own replica inside a unit, all between units."""
    sid, replica = stage_replica
    for edge in graph.inputs(sid):
        for (source, of), number in stages.items():
            if source == edge.src and (edge.crosses_units or of == replica):
                yield number


def _part(price: SequenceCost, segments: int, graph: StageGraph, stage: StageId) -> SequenceCost:
    """The share of a stage's price that some of its segments have."""
    whole = num_segments(graph, stage)
    return SequenceCost(price.linear * segments // whole, price.quadratic * segments // whole)
