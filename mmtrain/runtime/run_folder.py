"""Names of the files in a run's folder; `run_state` names its state, `report.runlog` its metrics."""

from pathlib import Path

from mmtrain.errors import UserError
from mmtrain.recipe import Recipe, load_recipe

RECIPE_FILE = "recipe.yaml"  # with all defaults filled in
PLAN_FILE = "plan.json"
RECORDED_COSTS_FILE = "recorded_costs.json"  # the plan's costs, corrected by what the run recorded
REPLANNED_FOLDER = "replanned"  # plans that the run had before it switched in living processes
FASTER_PLAN_FILE = "faster_plan.json"  # that was made with them, if it is faster than the run's
CHECKPOINTS_FOLDER = "checkpoints"
QUARANTINE_FILE = "quarantine.jsonl"  # samples set aside, and why
TRACE_FILE = "trace.json"  # of the steps that `train.trace_steps` names
SKIPPED_POSITIONS_FILE = "skipped_positions.json"  # of the data, that `--skip-steps` leaves out
ABANDONED_FOLDER = "abandoned"  # what came after the checkpoints that the run went back to
SKIPPED_STEPS_FILE = "skipped.jsonl"  # steps whose gradient was not finite, with their samples
STANDBY_PLANS_FOLDER = "plans"  # for other numbers of ranks, with `--elastic`


def load_run_recipe(run_dir: Path) -> Recipe:
    """Load the recipe of a run. Raises UserError if the folder is none of a run."""
    path = run_dir / RECIPE_FILE
    if not path.is_file():
        problem = f"it has no {RECIPE_FILE}" if run_dir.is_dir() else "there is no such folder"
        raise UserError(
            f"{run_dir}: not the folder of a run: {problem}. Name the folder that `mmtrain train` wrote to "
            "(`run_dir` of its recipe, by default runs/<name>)"
        )
    return load_recipe(path).recipe
