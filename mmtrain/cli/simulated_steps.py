"""A plan's steps simulated on the batches that training sees, for the commands that show them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmtrain.data import DataIndex
    from mmtrain.plan import Plan
    from mmtrain.program import Timeline
    from mmtrain.recipe import Recipe
    from mmtrain.report.comparison import RunTrace


@dataclass(frozen=True)
class SimulatedSteps:
    """What was simulated, on what, and the trace of a run that took the same steps."""

    index: "DataIndex"
    plan: "Plan"
    steps: list[int]  # counted from 1
    timelines: "list[Timeline]"  # of the steps
    trace: "RunTrace | None"


def simulate_steps(
    recipe: "Recipe", plan_path: Path | None, trace_path: Path | None = None, steps: tuple[int, ...] = (1,)
) -> SimulatedSteps:
    """Simulate `steps`, or those of a trace, of the plan in a file, or of one made now.

    Raises UserError for a plan of another recipe, and for a trace that cannot be read or is of another plan.
    """
    from mmtrain.cli.local_cluster import plan_here
    from mmtrain.cli.recipe_index import index_recipe
    from mmtrain.data import GroupStream
    from mmtrain.errors import UserError
    from mmtrain.plan.artifact.balancing_targets import derive_step_targets
    from mmtrain.plan.artifact.plan_files import load_plan, require_match
    from mmtrain.plan.estimate.simulate_plan import simulate_plan
    from mmtrain.recipe import recipe_fingerprint
    from mmtrain.report.comparison import RunTrace

    index = index_recipe(recipe)
    if plan_path is None:
        plan = plan_here(recipe, index.lengths)
    else:
        plan = load_plan(plan_path)
        require_match(plan, recipe_fingerprint(recipe), plan.world_size, plan.hardware)
    trace = None if trace_path is None else RunTrace.load(trace_path)
    if trace is not None and trace.plan_sha256 != plan.sha256:
        raise UserError(f"{trace_path}: recorded with another plan than {plan_path}; give the one that was run")
    stream, global_batch = GroupStream.of(recipe, index), recipe.train.global_batch
    dp = {name: unit.dp for name, unit in plan.units.items()}
    numbers = list(steps) if trace is None else trace.steps
    counts, targets = plan.schedule.num_microbatches, derive_step_targets(recipe, plan, index.lengths)
    timelines = [simulate_plan(recipe, plan, stream.batch(n - 1, global_batch, dp, counts, targets)) for n in numbers]
    return SimulatedSteps(index, plan, numbers, timelines, trace)
