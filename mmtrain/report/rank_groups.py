"""Group a plan's ranks by the stages they hold, and list the edges between units."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

from mmtrain.planning.artifact.plan import Plan, StagePlan, UnitPlan
from mmtrain.program.ir.graph import LLM, num_independent_groups
from mmtrain.program.ir.program import ranges_text
from mmtrain.report.plain_text import memory_text

_GENERATOR = "generator"


@dataclass(frozen=True)
class ReplicaRanks:
    """The TP group of one replica of a stage: its ranks in tensor-parallel order."""

    replica: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class UnitStages:
    """The stages of one unit that a group of ranks holds, and the replicas there."""

    unit: str
    stages: tuple[StagePlan, ...]
    replicas: tuple[ReplicaRanks, ...]

    @property
    def layer_ranges(self) -> list[tuple[int, int]]:
        """The layers [lo, hi) of each stage."""
        return [stage.layers for stage in self.stages]


@dataclass(frozen=True)
class RankGroup:
    """Ranks that hold the same stages."""

    ranks: tuple[int, ...]
    units: tuple[UnitStages, ...]  # in the order of the plan's units


@dataclass(frozen=True)
class UnitEdge:
    """The data flow from the last stage of one unit into the first stage of another."""

    src: str
    dst: str
    transport: str  # "local", "send 4:4", "broker 2:3"
    last_stage: int  # of the source


def stage_ranks(unit: UnitPlan, stage: int) -> tuple[int, ...]:
    """Return the ranks that hold stage number `stage` of the unit: tensor-parallel ranks first, then replicas."""
    size = unit.tp * unit.num_replicas
    pipeline_rank = stage % unit.pp
    return unit.ranks[pipeline_rank * size : (pipeline_rank + 1) * size]


def rank_groups(plan: Plan) -> list[RankGroup]:
    """Group all ranks by the stages they hold. Groups are ordered by their first rank, ranks are ascending."""
    stages_of_rank: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for name, unit in plan.units.items():
        for stage in unit.stages:
            for rank in stage_ranks(unit, stage.stage):
                stages_of_rank[rank].append((name, stage.stage))
    ranks_of_stages: defaultdict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for rank in sorted(stages_of_rank):
        ranks_of_stages[tuple(stages_of_rank[rank])].append(rank)
    return [RankGroup(tuple(ranks), _units_held(plan, stages, set(ranks))) for stages, ranks in ranks_of_stages.items()]


def _units_held(plan: Plan, held: tuple[tuple[str, int], ...], ranks: set[int]) -> tuple[UnitStages, ...]:
    """Sort the held stages (unit, stage number) by unit, and add the replicas that lie on these ranks."""
    units_held = []
    for name in dict.fromkeys(unit_name for unit_name, _ in held):
        unit = plan.units[name]
        numbers = [stage for unit_name, stage in held if unit_name == name]
        all_ranks = stage_ranks(unit, numbers[0])
        replicas = []
        for replica in range(unit.num_replicas):
            tp_group = all_ranks[replica * unit.tp : (replica + 1) * unit.tp]
            if not ranks.isdisjoint(tp_group):
                replicas.append(ReplicaRanks(replica, tp_group))
        stages = tuple(stage for stage in unit.stages if stage.stage in numbers)
        units_held.append(UnitStages(name, stages, tuple(replicas)))
    return tuple(units_held)


def unit_edges(plan: Plan) -> list[UnitEdge]:
    """List the edges between units: encoders feed the LLM's first stage, the LLM's last stage feeds the generator.

    The transport is a broker where the units have different numbers of replicas, `local` where both stages lie on the
    same ranks with the same tensor parallelism, else a send between replicas.
    """
    pairs = [(name, LLM) for name in plan.units if name not in (LLM, _GENERATOR)]
    if _GENERATOR in plan.units:
        pairs.append((LLM, _GENERATOR))
    edges = []
    for src, dst in pairs:
        source = plan.units[src]
        destination = plan.units[dst]
        source_ranks = stage_ranks(source, len(source.stages) - 1)
        destination_ranks = stage_ranks(destination, 0)
        if source_ranks == destination_ranks and source.tp == destination.tp:
            transport = "local"
        elif source.num_replicas == destination.num_replicas:
            transport = f"send {source.num_replicas}:{destination.num_replicas}"
        else:
            transport = f"broker {source.num_replicas}:{destination.num_replicas}"
        edges.append(UnitEdge(src, dst, transport, len(source.stages) - 1))
    return edges


def ranks_to_draw(plan: Plan, max_ranks: int, group: int = 0) -> list[int]:
    """Choose ranks for a picture: all if they are few, else representatives of the replica group number `group`.

    Representatives are the first rank of each TP group, or of each stage if those are too many. Other replica groups,
    and the other ranks of a TP group, do the same work on other samples or slices.
    """
    if plan.world_size <= max_ranks:
        return sorted({rank for unit in plan.units.values() for rank in unit.ranks})
    num_groups = num_replica_groups(plan)
    all_replicas = {}
    first_replica = {}
    for name, unit in plan.units.items():
        start = group * (unit.num_replicas // num_groups)
        all_replicas[name] = range(start, start + unit.num_replicas // num_groups)
        first_replica[name] = range(start, start + 1)
    representatives = _first_rank_of_each_tp_group(plan, all_replicas)
    if len(representatives) > max_ranks:
        representatives = _first_rank_of_each_tp_group(plan, first_replica)
    return representatives[:max_ranks]


def num_replica_groups(plan: Plan) -> int:
    """Return the number of replica groups."""
    return gcd(*(num_independent_groups(unit.dp, unit.cp, unit.ep) for unit in plan.units.values()))


def _first_rank_of_each_tp_group(plan: Plan, replicas: Mapping[str, range]) -> list[int]:
    """Return the first rank of each TP group of these replicas, ascending."""
    return sorted(
        {
            unit.ranks[(pipeline_rank * unit.num_replicas + replica) * unit.tp]
            for name, unit in plan.units.items()
            for pipeline_rank in range(min(unit.pp, len(unit.stages)))
            for replica in replicas[name]
        }
    )


def layers_text(stage: StagePlan) -> str:
    """Write the stage's layers: `0-6`, or `none` for an empty stage."""
    lo, hi = stage.layers
    return ranges_text(tuple(range(lo, hi))) or "none"


def recompute_text(stage: StagePlan) -> str:
    """Write the stage's recomputed layers: `none`, `all` or `7-8, 11`."""
    lo, hi = stage.layers
    if not stage.recompute:
        return "none"
    return "all" if len(stage.recompute) == hi - lo else ranges_text(stage.recompute)


def activation_notes(plan: Plan) -> list[str]:
    """Say in which units activation functions run again in backward, and what waits for it in host memory."""
    notes = []
    if units := [name for name, unit in plan.units.items() if unit.recompute_activation_function]:
        blocks = f"Blocks of {' and '.join(units)} that are not recomputed"
        notes.append(f"{blocks} compute their activation functions again.")
    amount = "which frees nothing: ranks compute in it"  # as on a CPU
    if plan.predicted.host_gib:
        amount = f"at most {memory_text(max(plan.predicted.host_gib.values()))} a rank"
    texts = {
        "inputs": "Inputs of recomputed blocks of {} wait in host memory",
        "all": "Blocks of {} that are listed as recomputed are not: their activations wait in host memory",
    }
    for mode, text in texts.items():
        units = [name for name, unit in plan.units.items() if unit.offload == mode and unit.num_recomputed]
        if units:
            notes.append(f"{text.format(' and '.join(units))}, {amount}.")
    return notes
