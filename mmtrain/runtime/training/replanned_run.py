"""What a run's folder keeps of planning again: recorded costs, and the plans that the run had before."""

import sys
from pathlib import Path

from mmtrain.costs import CostTable
from mmtrain.durable_files import disk_errors_named, set_aside, write_whole
from mmtrain.errors import PlanError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_files import load_plan
from mmtrain.recipe import Recipe
from mmtrain.runtime.run_folder import PLAN_FILE, RECORDED_COSTS_FILE, REPLANNED_FOLDER
from mmtrain.runtime.training.cost_drift import NOTHING_RECORDED, RecordedCosts
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import World


def share_recorded_costs(world: World, request: TrainRequest) -> RecordedCosts:
    """Return on all ranks what the run recorded before it was resumed. A damaged table is set aside."""
    return world.on_first(lambda: _read_recorded_costs(request.run_dir)) if request.resume else NOTHING_RECORDED


def _read_recorded_costs(run_dir: Path) -> RecordedCosts:
    path = run_dir / RECORDED_COSTS_FILE
    table = None
    if path.exists():
        try:
            table = CostTable.load(path)
        except PlanError as error:
            with disk_errors_named(run_dir):
                print(f"mmtrain: {set_aside(path, 'the costs are recorded again')} ({error})", file=sys.stderr)
    return RecordedCosts(table, len(_earlier_plans(run_dir)))


def _earlier_plans(run_dir: Path) -> list[Path]:
    return sorted((run_dir / REPLANNED_FOLDER).glob("plan-until-step-*.json"))


def keep_switch(run_dir: Path, before: Plan, plan: Plan, step: int) -> None:
    """Make `plan` the plan of the run after `step` steps, and keep the one before and the costs of the new one.

    The plan's file is replaced last: a run that is killed in between resumes on the plan before. Raises OSError.
    """
    folder = run_dir / REPLANNED_FOLDER
    folder.mkdir(exist_ok=True)
    write_whole(folder / f"plan-until-step-{step:08d}.json", before.file_text())
    recorded = (run_dir / RECORDED_COSTS_FILE).read_text(encoding="utf-8")
    write_whole(_costs_file(run_dir, plan), recorded)
    write_whole(run_dir / PLAN_FILE, plan.file_text())


def was_replaced(run_dir: Path, plan: Plan) -> bool:
    """Return whether the run has switched from this plan to another one. Files that cannot be read are ignored."""
    for path in _earlier_plans(run_dir):
        try:
            if load_plan(path).sha256 == plan.sha256:
                return True
        except PlanError:
            continue
    return False


def with_costs_of_plan(recipe: Recipe, run_dir: Path, plan: Plan) -> Recipe:
    """Return the recipe with the costs that the plan was made with, where the run has switched to it.

    Samples are arranged by these costs for as long as the run has this plan, whatever it records meanwhile: a run that
    is resumed must arrange them alike.
    """
    path = _costs_file(run_dir, plan)
    if not path.exists():
        return recipe
    return recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"costs": path})})


def _costs_file(run_dir: Path, plan: Plan) -> Path:
    return run_dir / REPLANNED_FOLDER / f"costs-of-plan-{plan.sha256[:12]}.json"
