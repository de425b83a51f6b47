"""`state.json`: the outcome of a run, for scripts that see no exit code (torchrun hides those of its ranks)."""

import json
from pathlib import Path
from typing import Any, Literal, get_args

from mmtrain.durable_files import write_whole

RUN_STATE_FILE = "state.json"
RunStatus = Literal["running", "done", "stopped", "failed"]


def write_run_state(run_dir: Path, status: RunStatus, step: int | None = None, error: str | None = None) -> None:
    """Replace the state atomically: a reader sees the old one or the new one.

    `step` is the last step that a resumed run would not repeat; None leaves it unchanged.
    """
    if step is None:
        step = read_run_state(run_dir).get("step", 0)
    write_whole(run_dir / RUN_STATE_FILE, json.dumps({"status": status, "step": step, "error": error}) + "\n")


def read_run_state(run_dir: Path) -> dict[str, Any]:
    """Return the state; empty if there is none, or if it is damaged: no decision depends on it alone."""
    try:
        state: Any = json.loads((run_dir / RUN_STATE_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    is_state = isinstance(state, dict) and state.get("status") in get_args(RunStatus) and type(state.get("step")) is int
    return state if is_state else {}
