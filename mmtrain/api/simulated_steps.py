"""Simulate steps of a plan on the batches that training will see, for `simulate` and `report`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mmtrain.api.faults import Fault, FaultOutcome
    from mmtrain.balance import BatchMeta
    from mmtrain.data import DataIndex
    from mmtrain.planning import Plan
    from mmtrain.program import Timeline
    from mmtrain.recipe import Recipe
    from mmtrain.report.comparison import RunTrace


@dataclass(frozen=True)
class SimulatedSteps:
    """Simulated steps, the plan and data they belong to, and the trace of a run of the same steps."""

    index: "DataIndex"
    plan: "Plan"
    steps: list[int]  # numbers, counted from 1
    timelines: "list[Timeline]"  # one per step
    trace: "RunTrace | None"
    fault: "FaultOutcome | None" = None  # what a fault does in the first of the steps

    @property
    def step_time_s(self) -> float:
        """Seconds of a step, mean over the simulated ones."""
        return sum(timeline.step_time_s for timeline in self.timelines) / len(self.timelines)

    def __str__(self) -> str:
        """Return what `mmtrain simulate` prints."""
        from mmtrain.report.comparison import comparison_rows, comparison_text, critical_path_rows
        from mmtrain.report.plain_text import DEFAULT_WIDTH

        rows, path = comparison_rows(self.timelines, self.trace), critical_path_rows(self.timelines)
        text = comparison_text(rows, self.timelines[0].bubble_shares(), path, DEFAULT_WIDTH)
        return text if self.fault is None else f"{text}\n{self.fault.consequences}"

    def __repr__(self) -> str:
        steps = ", ".join(map(str, self.steps))
        return f"SimulatedSteps(steps {steps}: {self.step_time_s:.4g} s per step of {self.plan.placement})"

    def _repr_html_(self) -> str:
        from mmtrain.report.notebook_html import steps_html

        consequences = None if self.fault is None else self.fault.consequences
        return steps_html(self.plan, self.timelines, self.trace, consequences)


def simulate_steps(
    recipe: "Recipe",
    plan_path: Path | None,
    trace_path: Path | None = None,
    steps: tuple[int, ...] = (1,),
    fault: "Fault | None" = None,
) -> SimulatedSteps:
    """Simulate these steps of a plan, or the steps that a trace recorded; with `fault`, also what it does to the first.

    The plan comes from `plan_path`; without it, the recipe is planned now. Raises UserError for a plan of another
    recipe, for a trace that cannot be read or was recorded with another plan, and for a fault of a rank that the plan
    does not have.
    """
    from mmtrain.errors import UserError
    from mmtrain.planning.artifact.plan_files import with_planned_groups
    from mmtrain.planning.evaluate.simulate_plan import plan_timing, simulate_plan
    from mmtrain.report.comparison import RunTrace

    trace = None if trace_path is None else RunTrace.load(trace_path)
    numbers = list(steps) if trace is None else trace.steps
    index, plan = index_and_plan(recipe, plan_path)
    if trace is not None and trace.plan_sha256 != plan.sha256:
        raise UserError(f"{trace_path}: recorded with another plan than {plan_path}; give the plan of that run")
    recipe = with_planned_groups(recipe, plan)
    batches = step_batches(recipe, index, plan, numbers)
    timelines = [simulate_plan(recipe, plan, batch) for batch in batches]
    simulated = SimulatedSteps(index, plan, numbers, timelines, trace)
    if fault is None:
        return simulated
    from mmtrain.api.faults import simulate_fault

    timing = plan_timing(recipe, plan, batches[0])
    return replace(simulated, fault=simulate_fault(recipe, plan, timing, timelines[0].step_time_s, fault))


def simulate_source(
    source: Path,
    overrides: "Sequence[str]" = (),
    plan: Path | None = None,
    against: Path | None = None,
    step: int = 1,
    fault: "Fault | None" = None,
) -> SimulatedSteps:
    """Simulate the steps that the arguments name: of a recipe, of a plan and a run, or of a run.

    Args:
        source: a recipe, the folder of a run, or a plan file, which needs `against`.
        overrides: settings of the recipe, as in `--set`.
        plan: a plan file for a recipe; by default that of `against`, else one is made.
        against: the folder of a run whose trace is compared.
        step: to simulate, counted from 1; of a run, those that it recorded are simulated.
        fault: what happens to a rank in the first of the steps.

    Raises:
        UserError: the arguments contradict each other, or name something that cannot be read.
    """
    from mmtrain.errors import UserError
    from mmtrain.recipe import load_recipe
    from mmtrain.runtime.run_folder import PLAN_FILE, RECIPE_FILE, TRACE_FILE

    is_plan = source.suffix.lower() == ".json"
    is_run = source.is_dir()
    if is_plan and against is None:
        raise UserError(
            f"simulate {source}: a plan file names no data; give its recipe (RECIPE --plan {source}) or a run of it "
            "(--against RUN)"
        )
    if plan is not None and (is_plan or is_run):
        raise UserError(f"simulate {source}: --plan FILE goes with a recipe, not with a plan or a run")
    if is_run and against is not None:
        raise UserError(
            f"simulate {source}: a run is compared with its own trace; --against goes with a recipe or a plan"
        )
    run = source if is_run else against
    recipe_path = run / RECIPE_FILE if run is not None and (is_plan or is_run) else source
    recipe = load_recipe(recipe_path, overrides).recipe
    plan_path = source if is_plan else plan
    if plan_path is None and run is not None:
        plan_path = run / PLAN_FILE
    return simulate_steps(recipe, plan_path, run / TRACE_FILE if run else None, (step,), fault)


def index_and_plan(recipe: "Recipe", plan_path: Path | None) -> "tuple[DataIndex, Plan]":
    """Return the recipe's data and the plan.

    The plan comes from `plan_path`; without it, the recipe is planned now. Raises UserError for a plan of another
    recipe.
    """
    from mmtrain.api.local_cluster import require_costs
    from mmtrain.api.plans import make_plan
    from mmtrain.api.recipe_index import index_recipe
    from mmtrain.planning.artifact.plan_files import load_plan, require_match

    if plan_path is None:
        require_costs(recipe)
    index = index_recipe(recipe)
    if plan_path is None:
        plan = make_plan(recipe, index.lengths).plan
    else:
        plan = load_plan(plan_path)
        require_match(plan, recipe, plan.world_size, plan.hardware)
    return index, plan


def step_batches(
    recipe: "Recipe", index: "DataIndex", plan: "Plan", steps: "Sequence[int]" = (1,)
) -> "list[BatchMeta]":
    """Return the batches that training by this plan sees in these steps, counted from 1."""
    from mmtrain.data import GroupStream
    from mmtrain.planning.artifact.balancing_targets import derive_step_targets

    stream = GroupStream.of(recipe, index)
    data_parallel = {name: unit.dp for name, unit in plan.units.items()}
    num_microbatches = plan.schedule.num_microbatches
    targets = derive_step_targets(recipe, plan, index.lengths)
    return [
        stream.batch(number - 1, recipe.train.num_groups, data_parallel, num_microbatches, targets) for number in steps
    ]
