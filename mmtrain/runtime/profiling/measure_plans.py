"""Run plans for a few steps on the ranks that are to train: `mmtrain plan --measure` ranks them by what they took."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mmtrain.costs import machine_for
from mmtrain.costs.find_hardware import is_same_hardware
from mmtrain.costs.hardware import GIB
from mmtrain.errors import UserError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import Plan, StepMeasurement
from mmtrain.planning.artifact.plan_files import with_planned_groups
from mmtrain.planning.artifact.plan_memory import plan_memory
from mmtrain.recipe import Recipe
from mmtrain.report.scaling import layout_text
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.profiling.measured_turns import LaunchPart, TurnFailure, Turns, run_part
from mmtrain.runtime.resilience.launch import local_addresses
from mmtrain.runtime.world import detect_hardware

MEASURED_STEPS = 3


class MeasuringRanks(Protocol):
    """What runs plans: ranks of this machine, or all that a launcher started (`LaunchedRanks`)."""

    def require_match(self, plan: Plan) -> None:
        """Raise UserError if these ranks are not what the plan was made for."""

    def run(self, turns: Turns) -> Sequence[LaunchPart]:
        """Run the turns until they end, or until a rank fails."""


class LocalRanks:
    """Ranks that are started on this machine, as many as a plan has."""

    def require_match(self, plan: Plan) -> None:
        """See `MeasuringRanks`."""
        hardware = detect_hardware()
        if not is_same_hardware(plan.hardware, hardware):
            raise UserError(
                f"--measure: the plan is for {plan.hardware} and this machine is {hardware}; leave --measure out, or "
                "start `mmtrain plan --measure` on the cluster, with torchrun or srun as for training"
            )
        if torch.cuda.is_available() and plan.world_size > torch.cuda.device_count():
            raise UserError(
                f"--measure: the plan is for {plan.world_size} ranks and this machine has {torch.cuda.device_count()} "
                "GPUs; start `mmtrain plan --measure` on as many, with torchrun or srun as for training, or measure on "
                "one node with --set cluster.ranks"
            )

    def run(self, turns: Turns) -> Sequence[LaunchPart]:
        """See `MeasuringRanks`."""
        return [run_part(turns, local_addresses(turns.world_size))]


@dataclass
class PlanRun:
    """What was seen of a plan in its turns."""

    plan: Plan
    seconds: list[float] = field(default_factory=list)  # of the slowest rank, by step
    memory_ratios: tuple[float, ...] = ()  # by rank, see `StepMeasurement`; empty: unknown
    failure: TurnFailure | None = None  # because of which the plan was left out

    @property
    def measurement(self) -> StepMeasurement:
        """The median of its steps; infinite for a plan that was left out."""
        if self.failure is None:
            fullest = max(self.memory_ratios, default=None)
            return StepMeasurement(statistics.median(self.seconds), fullest, self.memory_ratios)
        if not self.failure.is_out_of_memory:
            return StepMeasurement(math.inf)
        at_least = self.failure.held_bytes / self.failure.counted_bytes
        return StepMeasurement(math.inf, at_least, is_out_of_memory=True)


def measure_plans(
    recipe: Recipe,
    plans: Sequence[Plan],
    ranks: MeasuringRanks,
    num_steps: int = MEASURED_STEPS,
    faults: FaultPoints | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> list[PlanRun]:
    """Measure `num_steps` steps of each plan, after warm-up, and return what was seen, in the order of the plans.

    Plans of as many ranks take turns, step by step. A plan that runs out of memory or fails otherwise is left out, and
    the others go on in new processes where they were.

    note: told of each plan that is left out, when it happens.

    Raises:
        UserError: a plan is for other hardware or for more ranks than there are, or the input of the ranks is wrong.
        RunError: the ranks fail before any plan is built.
    """
    for plan in plans:
        ranks.require_match(plan)
    runs = [PlanRun(plan) for plan in plans]
    for world_size in dict.fromkeys(plan.world_size for plan in plans):
        of_size = [run for run in runs if run.plan.world_size == world_size]
        _measure_in_turn(recipe, of_size, ranks, num_steps, faults or FaultPoints(), note)
    return runs


def _measure_in_turn(
    recipe: Recipe,
    runs: Sequence[PlanRun],
    ranks: MeasuringRanks,
    num_steps: int,
    faults: FaultPoints,
    note: Callable[[str], None],
) -> None:
    """Run plans of as many ranks until each has its steps, or has failed; add to `runs` what was seen."""
    recipe = with_planned_groups(recipe, runs[0].plan)  # one problem's plans have groups of one size
    stay_built = fit_together(recipe, [run.plan for run in runs])
    while left := {n: run for n, run in enumerate(runs) if run.failure is None and len(run.seconds) < num_steps}:
        plans = {number: run.plan for number, run in left.items()}
        num_done = {number: len(run.seconds) for number, run in left.items()}
        parts = ranks.run(Turns(recipe, plans, num_done, num_steps, stay_built, faults))
        for part in parts:
            if part.error is not None:
                raise part.error
            for turn in part.turns:
                runs[turn.plan].seconds.append(turn.seconds)
                runs[turn.plan].memory_ratios = tuple(turn.memory_ratios or runs[turn.plan].memory_ratios)
        failures = [failure for part in parts for failure in part.failures]
        if not failures:
            return  # all turns were taken
        cause = min(failures, key=lambda failure: (not failure.is_out_of_memory, failure.is_secondary))
        if cause.is_out_of_memory and cause.num_built > 1:
            stay_built = False  # the others took the memory, so the plan has another turn by itself
            continue
        runs[cause.plan].failure = cause
        note(describe_failure(cause, runs[cause.plan].plan))


def fit_together(recipe: Recipe, plans: Sequence[Plan]) -> bool:
    """Return whether all plans can stay built on their ranks: of those that wait, weights and their state remain."""
    shape = build_model_shape(recipe)
    waiting_bytes = 0.0
    peaks = []
    for plan in plans:
        memory = plan_memory(recipe, plan, shape).values()
        state = (of_rank.parameters + of_rank.gradients + of_rank.optimizer for of_rank in memory)
        waiting_bytes += max(state) + max(of_rank.communicators for of_rank in memory)
        peaks.append(max(of_rank.total for of_rank in memory))
    return waiting_bytes + max(peaks) <= machine_for(recipe, plans[0].hardware).memory_bytes


def describe_failure(failure: TurnFailure, plan: Plan) -> str:
    """Say why a plan was left out; if memory ran out, by how much its estimate was wrong at least."""
    layout = layout_text(plan)
    if not failure.is_out_of_memory:
        return f"{layout}: failed to run on rank {failure.rank}, and is left out: {failure.text}"
    held_gib, counted_gib = failure.held_bytes / GIB, failure.counted_bytes / GIB
    error = failure.held_bytes / failure.counted_bytes - 1
    if error > 0:
        estimate = f"the estimate is too small by {error:.0%} at least"
    else:
        estimate = "the estimate is not exceeded by what was held, so one large piece or another process had no room"
    return (
        f"{layout}: out of memory on rank {failure.rank}, and left out: the rank held {held_gib:.3g} GiB, and "
        f"{counted_gib:.3g} GiB were counted for its peak; {estimate}"
    )
