"""Which ranks hold what: a plan's ranks grouped by the stages they hold, and the edges between them."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

from mmtrain.plan.artifact.plan import Plan, StagePlan, UnitPlan
from mmtrain.program.ir.graph import LLM

_GENERATOR = "generator"


@dataclass(frozen=True)
class HeldUnit:
    """A unit's stages on a slice of the ranks, and the TP groups there that hold them."""

    unit: str
    stages: tuple[StagePlan, ...]
    tp_groups: tuple[tuple[int, tuple[int, ...]], ...]  # replica, and its ranks in tensor-parallel order


@dataclass(frozen=True)
class RankGroup:
    """Ranks that hold the same stages."""

    ranks: tuple[int, ...]
    units: tuple[HeldUnit, ...]  # in the order of the plan's units


@dataclass(frozen=True)
class UnitEdge:
    """What flows from the last stage of one unit into the first of another."""

    src: str
    dst: str
    transport: str  # "local", "send 4:4", "broker 2:3"
    last_stage: int  # of the source


def stage_ranks(unit: UnitPlan, stage: int) -> tuple[int, ...]:
    """Ranks of all TP groups that hold the unit's stage number `stage`: tp fastest, then dp."""
    size = unit.tp * unit.dp
    place = stage % unit.pp
    return unit.ranks[place * size : (place + 1) * size]


def rank_groups(plan: Plan) -> list[RankGroup]:
    """All ranks, by what they hold; slices in the order of their first ranks, their ranks ascending."""
    held: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for name, unit in plan.units.items():
        for stage in unit.stages:
            for rank in stage_ranks(unit, stage.stage):
                held[rank].append((name, stage.stage))
    together: defaultdict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for rank in sorted(held):
        together[tuple(held[rank])].append(rank)
    return [RankGroup(tuple(ranks), _units_held(plan, what, set(ranks))) for what, ranks in together.items()]


def _units_held(plan: Plan, what: tuple[tuple[str, int], ...], ranks: set[int]) -> tuple[HeldUnit, ...]:
    found = []
    for name in dict.fromkeys(unit for unit, _ in what):
        unit, numbers = plan.units[name], [stage for other, stage in what if other == name]
        own = stage_ranks(unit, numbers[0])
        tp_groups = ((replica, own[replica * unit.tp : (replica + 1) * unit.tp]) for replica in range(unit.dp))
        stages = tuple(s for s in unit.stages if s.stage in numbers)
        found.append(
            HeldUnit(name, stages, tuple(tp_group for tp_group in tp_groups if not ranks.isdisjoint(tp_group[1])))
        )
    return tuple(found)


def unit_edges(plan: Plan) -> list[UnitEdge]:
    """How units are joined: encoders feed the LLM's first stage, its last one the generator.

    A broker moves rows wherever replicas differ in number; a TP group passes them on by itself where both stages sit on
    the same ranks.
    """
    pairs = [(name, LLM) for name in plan.units if name not in (LLM, _GENERATOR)]
    if _GENERATOR in plan.units:
        pairs.append((LLM, _GENERATOR))
    found = []
    for src, dst in pairs:
        source, destination = plan.units[src], plan.units[dst]
        leaves, enters = stage_ranks(source, len(source.stages) - 1), stage_ranks(destination, 0)
        if (leaves, source.tp) == (enters, destination.tp):
            how = "local"
        elif source.dp == destination.dp:
            how = f"send {source.dp}:{destination.dp}"
        else:
            how = f"broker {source.dp}:{destination.dp}"
        found.append(UnitEdge(src, dst, how, len(source.stages) - 1))
    return found


def ranks_to_draw(plan: Plan, most: int, group: int = 0) -> list[int]:
    """Ranks for a picture of at most `most`: all, else one of each TP group of a replica group, else of each stage.

    Other groups and the other ranks of a TP group do the same on other samples or slices, so they add little to
    a picture.
    """
    if plan.world_size <= most:
        return sorted({rank for unit in plan.units.values() for rank in unit.ranks})
    sizes = {name: unit.dp // num_replica_groups(plan) for name, unit in plan.units.items()}
    of_group = _first_rank_of_each_tp_group(
        plan, {name: range(group * size, (group + 1) * size) for name, size in sizes.items()}
    )
    if len(of_group) > most:
        of_group = _first_rank_of_each_tp_group(
            plan, {name: range(group * size, group * size + 1) for name, size in sizes.items()}
        )
    return of_group[:most]


def num_replica_groups(plan: Plan) -> int:
    """Number of replica groups."""
    return gcd(*(unit.dp for unit in plan.units.values()))


def _first_rank_of_each_tp_group(plan: Plan, replicas: Mapping[str, range]) -> list[int]:
    """The first rank of each TP group of these replicas."""
    return sorted(
        {
            unit.ranks[(place * unit.dp + replica) * unit.tp]
            for name, unit in plan.units.items()
            for place in range(min(unit.pp, len(unit.stages)))
            for replica in replicas[name]
        }
    )


def ranges_text(numbers: tuple[int, ...]) -> str:
    """Shorten runs of consecutive numbers.

    >>> spans((0, 1, 2, 5))
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def layers_text(stage: StagePlan) -> str:
    """The stage's layers, `0-6`; `none` for a stage without one."""
    lo, hi = stage.layers
    return ranges_text(tuple(range(lo, hi))) or "none"


def recompute_text(stage: StagePlan) -> str:
    """Which of its layers are recomputed, `none`, `all` or `7-8, 11`."""
    lo, hi = stage.layers
    if not stage.recompute:
        return "none"
    return "all" if len(stage.recompute) == hi - lo else ranges_text(stage.recompute)
