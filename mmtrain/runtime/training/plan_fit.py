"""Refuse a plan that does not fit a run's devices before the run depends on it.

A plan that the user gave, or that a new run has made, may end the run with an error that says what binds. One to which
a run would switch by itself must not: the run goes on with what it has.
"""

from typing import Protocol

from mmtrain.costs import machine_for
from mmtrain.costs.hardware import GIB
from mmtrain.errors import PlanError, ProgramError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_graph import stage_graph
from mmtrain.planning.artifact.plan_memory import DeviceMemory, prove_memory
from mmtrain.program import build_program
from mmtrain.recipe import Recipe


class MakePlan(Protocol):
    """Makes a plan; what it does not know yet is passed by name."""

    def __call__(self, **missing: object) -> Plan:
        """Return a plan; PlanError if there is none."""
        ...


def require_fit(recipe: Recipe, plan: Plan, device: DeviceMemory) -> None:
    """Prove, as building a plan does, that every rank has room for it on `device`.

    Raises:
        PlanError: names the rank that needs most, the kind of memory that binds, and what makes room.
    """
    shape = build_model_shape(recipe)
    limit = prove_memory(recipe, plan, shape, device)
    try:
        build_program(stage_graph(plan, shape), limit, plan.schedule.kind, plan.schedule.order)
    except ProgramError as error:
        raise PlanError(f"the plan cannot run on {device.described}: {error}") from error


def plan_that_fits(recipe: Recipe, device: DeviceMemory, make_plan: MakePlan, **missing: object) -> Plan:
    """Return what `make_plan` makes, if it fits; a `functools.partial` of this can be pickled.

    Raises:
        PlanError: there is no plan, or it does not fit into `device`.
    """
    plan = make_plan(**missing)
    require_fit(recipe, plan, device)
    return plan


def limited_to_device(recipe: Recipe, hardware: str, device: DeviceMemory) -> Recipe:
    """Return the recipe with the memory that a rank has here, where that is less than what is planned for."""
    machine = machine_for(recipe, hardware)
    limits: dict[str, float] = {}
    if device.nbytes < machine.memory_bytes:
        limits["memory_gib"] = device.nbytes / GIB
    if device.host_bytes < machine.host_memory_bytes:
        limits["host_memory_gib"] = device.host_bytes / GIB
    if not limits:
        return recipe
    return recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update=limits)})
