"""Choose the plan of a run: the user's, that of the run that is resumed, one that was made ahead, or a new one.

A plan that the user gave, or that a new run has made, may end the run with an error that says what binds. One to which
a run would switch by itself must not: the run goes on with what it has.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mmtrain.checkpoint import find
from mmtrain.costs import machine_for
from mmtrain.costs.hardware import GIB
from mmtrain.data import DataIndex
from mmtrain.data.stream.count_groups import keep_groups
from mmtrain.durable_files import disk_errors_named, write_whole
from mmtrain.errors import PlanError, ProgramError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_change import describe_plan_change
from mmtrain.planning.artifact.plan_files import load_plan, require_match, with_planned_groups
from mmtrain.planning.artifact.plan_graph import stage_graph
from mmtrain.planning.artifact.plan_memory import DeviceMemory, prove_memory
from mmtrain.program import build_program
from mmtrain.recipe import Recipe
from mmtrain.report.runlog import time_of_last_step
from mmtrain.runtime.resilience.out_of_memory import smallest_device_memory
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, PLAN_FILE, RECIPE_FILE
from mmtrain.runtime.training.standby_plans import (
    is_made_for,
    load_plan_of_run,
    load_standby_plan,
    save_standby_plan,
    standby_plan_path,
)
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import World


@dataclass(frozen=True)
class ChosenPlan:
    """The plan of a run, and what a run that is resumed must know of the time before."""

    plan: Plan
    before: Plan | None = None  # which the run was executed with until now, where it is for another number of ranks
    planning_s: float = 0.0  # that the plan took at this start; 0 for one that was there
    last_step_s: float | None = None  # time of day of the last step before, in seconds since 1970

    def describe_change(self, run_dir: Path) -> list[str]:
        """Return lines on what is new for a run that goes on with another number of ranks; none if it does not."""
        if self.before is None:
            return []
        origin = f"was made ahead ({standby_plan_path(run_dir, self.plan.world_size)})"
        if self.planning_s:
            origin = f"was made now, in {self.planning_s:.1f} s"
        return [*describe_plan_change(self.before, self.plan), f"the plan {origin}"]


def keeps_files(request: TrainRequest) -> bool:
    """Return whether recipe and plan in the run's folder stay until a checkpoint is restored.

    A resume may still be refused, and those in the folder are what the run was trained by.
    """
    folder = request.run_dir
    return request.resume and (folder / RECIPE_FILE).exists() and bool(find(folder / CHECKPOINTS_FOLDER))


def choose_plan(request: TrainRequest, world: World, index: DataIndex) -> ChosenPlan:
    """Return the same plan on all ranks; rank 0 chooses it and writes it into the folder of a new run.

    An elastic run that goes on uses no plan that does not fit its devices: it makes another one, for what they have. A
    run on GPUs of several kinds plans for the memory of the smallest.

    Raises PlanError for a plan of the user that was made for something else, and if no plan fits.
    """
    limits_memory = request.elastic or request.mixed_devices
    device = smallest_device_memory(request.recipe, request.hardware, world) if limits_memory else None
    chosen: ChosenPlan = world.on_first(lambda: _choose(request, world.size, index, device))
    return chosen


def _choose(request: TrainRequest, num_ranks: int, index: DataIndex, device: DeviceMemory | None) -> ChosenPlan:
    """Choose the plan on rank 0; `device`: the memory that plans of an elastic run must fit into."""
    run_dir, fingerprint = request.run_dir, request.recipe_sha256
    before = load_plan_of_run(run_dir / PLAN_FILE, _notify) if request.resume else None
    plan = _plan_of_user(request, num_ranks)
    if request.resume:
        plan = _if_it_fits(request, plan, device)
    if plan is None and before is not None and is_made_for(before, fingerprint, num_ranks, request.hardware):
        plan = _if_it_fits(request, before, device)
    if plan is None and request.elastic:
        standby = load_standby_plan(run_dir, fingerprint, num_ranks, request.hardware, _notify)
        plan = _if_it_fits(request, standby, device)
    planning_s = 0.0
    if plan is None:
        start_s = time.perf_counter()
        recipe = request.recipe
        if before is not None and not recipe.states_groups:
            recipe = keep_groups(with_planned_groups(recipe, before), recipe, index.lengths)
        plan = request.planner(
            recipe if device is None else limited_to_device(recipe, request.hardware, device),
            index.lengths,
            world_size=num_ranks,
            hardware=request.hardware,
            recipe_sha256=fingerprint,
        )
        planning_s = time.perf_counter() - start_s
    with disk_errors_named(run_dir):
        if not keeps_files(request):
            write_whole(run_dir / PLAN_FILE, plan.file_text())
        if request.elastic:
            save_standby_plan(run_dir, plan)  # for when the run has had fewer ranks and gets these back
    has_other_ranks = before is not None and before.world_size != num_ranks
    last_step_s = time_of_last_step(run_dir) if request.resume else None
    return ChosenPlan(plan, before if has_other_ranks else None, planning_s, last_step_s=last_step_s)


def _if_it_fits(request: TrainRequest, plan: Plan | None, device: DeviceMemory | None) -> Plan | None:
    """Return a plan that an elastic run would go on with; None, with the reason on stderr, if it does not fit."""
    if plan is None or device is None:
        return plan
    try:
        require_fit(with_planned_groups(request.recipe, plan), plan, device)
    except PlanError as error:
        ranks = f"{plan.world_size} rank{'s' * (plan.world_size != 1)}"
        _notify(f"a plan for {ranks} is refused, and the run goes on with another one: {error}")
        return None
    return plan


def _plan_of_user(request: TrainRequest, num_ranks: int) -> Plan | None:
    """Load the plan of `--plan`; None if there is none, or if ranks of the run for which it was made are gone."""
    if request.plan_path is None:
        return None
    plan = load_plan(request.plan_path)
    if request.elastic and request.resume and plan.world_size != num_ranks:
        _notify(f"--plan {request.plan_path} is for {plan.world_size} ranks and not for {num_ranks}: not used now")
        return None
    require_match(plan, request.recipe, num_ranks, request.hardware)
    return plan


def _notify(text: str) -> None:
    print(f"mmtrain: {text}", file=sys.stderr, flush=True)


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
