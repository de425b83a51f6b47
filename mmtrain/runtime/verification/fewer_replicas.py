"""Cut a plan to fewer replica groups, so that a plan for many GPUs can be tried with the processes of one machine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mmtrain.costs.gradient_buckets import least_parameters
from mmtrain.errors import UserError
from mmtrain.models.shapes.model_shape import ModelShape
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.artifact.plan import Plan, UnitPlan
from mmtrain.planning.artifact.plan_graph import stage_graph
from mmtrain.program.ir.graph import LLM
from mmtrain.program.ir.symmetry import symmetry

MAX_GROUPS = 2  # of a plan that is cut: a third one is reduced and gathered as the second is


@dataclass(frozen=True)
class CutPlan:
    """A plan with fewer replica groups than it was made with, or as it was made."""

    plan: Plan
    num_groups: int  # replica groups that are left
    num_planned_groups: int
    num_planned_ranks: int

    @property
    def note(self) -> str | None:
        """Say what was left out, or None for a whole plan."""
        if self.num_groups == self.num_planned_groups:
            return None
        left, planned, parts = (
            self.num_groups,
            self.num_planned_groups,
            "replica groups, which all run the same program",
        )
        if self.plan.shard is not None:
            together, shard = _replicas_per_group(self.plan), self.plan.shard
            left, planned, parts = left * together // shard, planned * together // shard, "copies of the weights"
        ranks = f"{self.plan.world_size} of the plan's {self.num_planned_ranks} ranks"
        note = f"Cut to {ranks}: {left} of its {planned} {parts}."
        if left > 1:
            return note
        return (
            f"{note} What ranks reduce and gather beyond that is not verified; it takes {2 * self.plan.world_size} "
            "processes."
        )


@dataclass(frozen=True)
class RankLimit:
    """The most ranks that may run here, what sets this limit, and how it can be raised."""

    ranks: int
    reason: str
    remedy: str


def cut_replicas(plan: Plan, shape: ModelShape, limit: RankLimit) -> CutPlan:
    """Return the plan with two replica groups, or one, if it has more ranks than may run here.

    All else that a plan decides stays: tp, pp, vpp, sp, stages, recomputation, microbatches, the order of actions, the
    sizes of buckets, and the ratios of the units' data-parallel degrees, thus the routes between units. With one group
    nothing is reduced, so that passes are not cut between buckets.

    Raises:
        UserError: a single replica group, or a single copy of sharded weights, has more ranks.
        ProgramError: the units of the plan do not fit together.
    """
    graph = stage_graph(plan, shape)
    num_groups = graph.num_groups
    if plan.world_size <= limit.ranks:
        return CutPlan(plan, num_groups, num_groups, plan.world_size)
    inseparable = _groups_per_copy(plan)
    ranks_together = plan.world_size // num_groups * inseparable
    kept_groups = min(limit.ranks // ranks_together, MAX_GROUPS) * inseparable
    if kept_groups == 0:
        raise UserError(_why_not(plan, ranks_together, limit))
    location = symmetry(graph).location
    kept_ranks = sorted(rank for rank, (group, _) in location.items() if group < kept_groups)
    new_ranks = {rank: i for i, rank in enumerate(kept_ranks)}
    cut = _with_ranks(plan, new_ranks, num_groups, kept_groups)
    return CutPlan(cut, kept_groups, num_groups, plan.world_size)


def _groups_per_copy(plan: Plan) -> int:
    """Return how many replica groups hold whole copies of the weights together, at least one copy."""
    return 1 if plan.shard is None else plan.shard // math.gcd(plan.shard, _replicas_per_group(plan))


def _replicas_per_group(plan: Plan) -> int:
    """Return how many of the LLM's replicas a replica group has: they share sequences, or experts."""
    return math.lcm(plan.units[LLM].cp, plan.units[LLM].ep)


def _why_not(plan: Plan, ranks_together: int, limit: RankLimit) -> str:
    if plan.shard is not None:
        smallest = f"one copy of its weights is sharded over {plan.shard} ranks"
        plan_smaller = "plan with smaller shards (--set parallel.shard=N)"
    else:
        meshes = ", ".join(
            f"{name} {MeshSize(unit.tp, unit.pp, unit.dp, unit.vpp, unit.cp)}" for name, unit in plan.units.items()
        )
        smallest = f"one replica group of it ({meshes}) has {ranks_together}"
        plan_smaller = "plan for fewer ranks (--set cluster.ranks=N)"
    return (
        f"verify: this plan has {plan.world_size} ranks, {smallest}, and {limit.reason}. It cannot be cut further: "
        f"with another tp, pp or ratio of replicas it would be another plan. {limit.remedy}, or {plan_smaller}"
    )


def _bucket_parameters(unit: UnitPlan) -> int | None:
    """Return the fewest parameters of a bucket, as the whole plan's number of replicas has it."""
    return (
        unit.bucket_parameters if unit.is_replicated else unit.bucket_parameters or least_parameters(unit.num_replicas)
    )


def _with_ranks(plan: Plan, new_ranks: Mapping[int, int], num_planned: int, num_groups: int) -> Plan:
    """Return the plan with the ranks that are left, by their new numbers."""
    units = {
        name: unit.model_copy(
            update={
                "dp": unit.dp // num_planned * num_groups,
                "ranks": tuple(new_ranks[rank] for rank in unit.ranks if rank in new_ranks),
                "bucket_parameters": _bucket_parameters(unit),
            }
        )
        for name, unit in plan.units.items()
    }
    schedule = plan.schedule
    if schedule.order is not None:
        order = {new_ranks[rank]: actions for rank, actions in schedule.order.items()}
        schedule = schedule.model_copy(update={"order": order})
    return plan.model_copy(update={"units": units, "schedule": schedule, "world_size": len(new_ranks)})
