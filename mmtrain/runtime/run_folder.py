"""Names of the files in a run's folder, and `state.json`; `report.runlog` names its metrics.

`state.json` holds the outcome of a run, for scripts that see no exit code (torchrun hides those of its ranks).
"""

import json
from pathlib import Path
from typing import Any, Literal, get_args

from mmtrain.durable_files import write_whole
from mmtrain.errors import UserError
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.redaction import process_redactor

RECIPE_FILE = "recipe.yaml"  # with all defaults filled in
PLAN_FILE = "plan.json"
REPLANNED_FOLDER = "replanned"  # plans that the run had before it switched in living processes
FASTER_PLAN_FILE = "faster_plan.json"  # that was made with them, if it is faster than the run's
CHECKPOINTS_FOLDER = "checkpoints"
HUGGING_FACE_FOLDER = "hf"  # checkpoints in the form that `mmtrain export` writes, with `train.checkpoint.hf_every`
QUARANTINE_FILE = "quarantine.jsonl"  # samples set aside, and why
TRACE_FILE = "trace.json"  # of the steps that `train.trace_steps` names
SKIPPED_POSITIONS_FILE = "skipped_positions.json"  # of the data, that `--skip-steps` leaves out
ABANDONED_FOLDER = "abandoned"  # what came after the checkpoints that the run went back to
SKIPPED_STEPS_FILE = "skipped.jsonl"  # steps whose gradient was not finite, with their samples
CORRUPTION_FILE = "corruption.jsonl"  # what changed by itself of weights and optimizer state, and when it was found
COPIES_FILE = "peer_copies.json"  # tells copies in memory of the run's present course from those that it has left
STANDBY_PLANS_FOLDER = "plans"  # for other numbers of ranks, with `--elastic`
RUN_STATE_FILE = "state.json"
RunStatus = Literal["running", "done", "stopped", "failed"]


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


def write_run_state(
    run_dir: Path,
    status: RunStatus,
    step: int | None = None,
    error: str | None = None,
    ended_early: str | None = None,
) -> None:
    """Replace the state atomically: a reader sees the old one or the new one.

    `step` is the last step that a resumed run would not repeat; None leaves it unchanged. `ended_early` says why a run
    is done before its last step.
    """
    if step is None:
        step = read_run_state(run_dir).get("step", 0)
    shown_error = None if error is None else process_redactor()(error)
    state = {"status": status, "step": step, "error": shown_error}
    if ended_early is not None:
        state["ended_early"] = ended_early
    write_whole(run_dir / RUN_STATE_FILE, json.dumps(state) + "\n")


def read_run_state(run_dir: Path) -> dict[str, Any]:
    """Return the state; empty if there is none, or if it is damaged: no decision depends on it alone."""
    try:
        state: Any = json.loads((run_dir / RUN_STATE_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    is_state = isinstance(state, dict) and state.get("status") in get_args(RunStatus) and type(state.get("step")) is int
    return state if is_state else {}
