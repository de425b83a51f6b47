"""Run plans on this machine, or on all ranks that a launcher started: what `plan --measure` chooses by."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mmtrain.api.plans import StartedRanks
from mmtrain.api.recipe_index import print_note
from mmtrain.extras import TRAIN, require_extra, require_forks
from mmtrain.recipe import Recipe, require_runnable
from mmtrain.report.plain_text import seconds_text
from mmtrain.report.scaling import layout_text

if TYPE_CHECKING:
    from mmtrain.planning import Plan
    from mmtrain.planning.artifact.plan import StepMeasurement
    from mmtrain.runtime.profiling.launched_ranks import LaunchedRanks
    from mmtrain.runtime.profiling.measure_plans import PlanRun


def join_launched_ranks() -> "LaunchedRanks | None":
    """Meet the other processes that torchrun or SLURM started; None where this one starts its own ranks.

    A launcher's single process starts its own, too: its variables may be left from something else.
    Raises UserError where plans cannot run.
    """
    _require_ranks()
    from mmtrain.runtime.profiling.launched_ranks import LaunchedRanks
    from mmtrain.runtime.world import find_address, introduce_address

    address = find_address()
    if address is None or address.world_size == 1:
        return None
    introduce_address(address)
    return LaunchedRanks(address)


def started_ranks(recipe: Recipe, ranks: "LaunchedRanks | None") -> StartedRanks | None:
    """Return the ranks that plans must use; None where the recipe or this machine decides.

    Raises LaunchError if the recipe names another number than the launcher has started.
    """
    if ranks is None:
        return None
    ranks.require_number(recipe.cluster.ranks)
    return StartedRanks(ranks.num_ranks)


def plan_timer(
    recipe: Recipe, ranks: "LaunchedRanks | None" = None
) -> "Callable[[Sequence[Plan]], list[StepMeasurement]]":
    """Return a function that runs a few steps of plans in turn and returns what each took.

    `plan --measure` ranks plans by it. The function prints each result to stderr; a plan that fails while it runs takes
    infinitely long. ranks: those of a launcher; by default plans run on ranks of their own on this machine.
    Raises UserError where plans cannot run.
    """
    _require_ranks()
    require_runnable(recipe, "plan --measure")
    from mmtrain.runtime.profiling.measure_plans import LocalRanks, measure_plans

    def measured(plans: "Sequence[Plan]") -> "list[StepMeasurement]":
        print_note(f"running {len(plans)} plan{'s' * (len(plans) != 1)} in turn, step by step")
        runs = measure_plans(recipe, plans, ranks or LocalRanks(), note=print_note)
        for run in runs:
            if run.failure is None:
                print_note(_describe(run))
        return [run.measurement for run in runs]

    return measured


def _require_ranks() -> None:
    require_forks("plan --measure")
    require_extra(TRAIN, "`mmtrain plan --measure`", "leave out --measure, and plans are ranked by predicted times")


def _describe(run: "PlanRun") -> str:
    """Say what the steps of a plan took, and what its ranks held if that is known."""
    step = run.measurement
    text = (
        f"{layout_text(run.plan)}: {seconds_text(step.seconds)} per step, "
        f"predicted {seconds_text(run.plan.predicted.step_time_s)}"
    )
    return text if step.memory_ratio is None else f"{text}; {step.memory_ratio:.2f} of the memory that is counted"
