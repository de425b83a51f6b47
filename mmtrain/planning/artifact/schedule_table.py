"""Tabulate in what order a plan's ranks run what, so that the loader can order microbatches by their costs."""

from collections.abc import Iterable, Mapping

from mmtrain.balance.step_targets import LLM, ScheduledTask, ScheduleTable, SequenceCost
from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.program.ir.actions import Compute, Fill, Partial
from mmtrain.program.ir.graph import StageGraph, StageId
from mmtrain.program.ir.segments import direction, num_segments
from mmtrain.program.schedules.builder import build_compute
from mmtrain.program.schedules.pipeline_positions import find_positions

# Forwards and backwards in a table. The loader evaluates a table some hundred times for each step, which takes too long
# for more of them.
MAX_SCHEDULED_PASSES = 10_000
StageReplica = tuple[StageId, int]  # a stage, and the replica that holds it


def build_schedule_table(
    graph: StageGraph, schedule: SchedulePlan, costs: Mapping[StageId, tuple[SequenceCost, SequenceCost]]
) -> ScheduleTable | None:
    """Return the schedule of the first LLM replica's ranks and of the encoder ranks that feed it.

    One rank stands for each TP group. Of encoder replicas on separate ranks the first stands for all, since they share
    the work evenly; on the LLM's ranks every replica is in the table.

    Args:
        graph: the plan's stage graph.
        schedule: the plan's schedule.
        costs: of each stage's forward and backward.

    Returns:
        None where work runs in the gaps of other work, which no pipeline recurrence describes, or where the schedule
        has more than `MAX_SCHEDULED_PASSES` forwards and backwards.
    """
    rank_of = _scheduled_replicas(graph)
    ranks = sorted(set(rank_of.values()))
    actions = build_compute(graph, schedule.kind, schedule.order, ranks).actions
    task_numbers: dict[tuple[StageReplica, bool, int, int], int] = {}
    passes_of_ranks: list[list[tuple[int, int]]] = []  # (task, microbatch)
    for rank in ranks:
        if any(isinstance(action, Fill) for action in actions[rank]):
            return None
        passes: list[tuple[int, int]] = []
        for action in actions[rank]:
            assert isinstance(action, Compute)
            stage_replica = action.stage, action.mb.replica
            if rank_of.get(stage_replica) == rank:
                all_segments = (0, num_segments(graph, action.stage))
                lo, hi = (action.lo, action.hi) if isinstance(action, Partial) else all_segments
                task = stage_replica, direction(action) == "F", lo, hi
                passes.append((task_numbers.setdefault(task, len(task_numbers)), action.mb.index))
        passes_of_ranks.append(passes)
    if sum(map(len, passes_of_ranks)) > MAX_SCHEDULED_PASSES:
        return None
    stage_numbers = {stage_replica: number for number, stage_replica in enumerate(rank_of)}
    return ScheduleTable(
        tuple(
            ScheduledTask(
                stage_numbers[stage, replica],
                stage.unit,
                is_forward,
                _cost_of_segments(costs[stage][0 if is_forward else 1], hi - lo, num_segments(graph, stage)),
            )
            for (stage, replica), is_forward, lo, hi in task_numbers
        ),
        tuple(tuple(_sources(graph, stage_replica, stage_numbers)) for stage_replica in rank_of),
        tuple(" ".join(str(task + len(task_numbers) * mb) for task, mb in passes) for passes in passes_of_ranks),
    )


def is_single_chain(graph: StageGraph) -> bool:
    """Return whether 1F1B of an encoder and the LLM runs along one chain of ranks, each visited once in each direction.

    Then a list of ranks describes the schedule, without a table.
    """
    num_microbatches = {mesh.num_microbatches for mesh in graph.meshes}
    ranks_of_positions = (
        {graph.ranks_holding(stage) for virtual_stage in position.virtual_stages for stage in virtual_stage}
        for position in find_positions(graph)
    )
    visits_ranks_once = all(len(ranks) == 1 for ranks in ranks_of_positions)
    has_all_backwards = all(map(graph.needs_backward, graph.order))
    return len(graph.meshes) == 2 and len(num_microbatches) == 1 and visits_ranks_once and has_all_backwards


def _scheduled_replicas(graph: StageGraph) -> dict[StageReplica, int]:
    """Return the stage replicas of the table, sources first, each with the rank that stands for its TP group."""
    llm_ranks = {stage.tp_groups[0][0] for stage in graph.stages if stage.id.unit == LLM}
    rank_of: dict[StageReplica, int] = {}
    for stage in graph.order:
        num_replicas = 1 if stage.unit == LLM else graph.mesh(stage.unit).num_replicas // graph.num_groups
        first_ranks = [tp_group[0] for tp_group in graph.stage(stage).tp_groups[:num_replicas]]
        on_llm_ranks = [replica for replica, rank in enumerate(first_ranks) if rank in llm_ranks]
        for replica in on_llm_ranks or [0]:
            rank_of[stage, replica] = first_ranks[replica]
    return rank_of


def _sources(graph: StageGraph, stage_replica: StageReplica, numbers: Mapping[StageReplica, int]) -> Iterable[int]:
    """Return the stage replicas that one reads from: its own replica inside a unit, all replicas between units."""
    stage, replica = stage_replica
    for edge in graph.inputs(stage):
        for (source, source_replica), number in numbers.items():
            if source == edge.src and (edge.crosses_units or source_replica == replica):
                yield number


def _cost_of_segments(cost: SequenceCost, num_run: int, num_all: int) -> SequenceCost:
    """Return the share of a stage's cost that some of its segments have."""
    return SequenceCost(cost.linear * num_run // num_all, cost.quadratic * num_run // num_all)
