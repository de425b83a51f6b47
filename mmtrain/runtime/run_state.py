"""`state.json`: the outcome of a run, for scripts that see no exit code (torchrun hides those of its ranks)."""

import json
import os
from pathlib import Path
from typing import Any, Literal

RUN_STATE_FILE = "state.json"
RunStatus = Literal["running", "done", "stopped", "failed"]


def write_run_state(run_dir: Path, status: RunStatus, step: int | None = None, error: str | None = None) -> None:
    """Replace the state atomically: a reader sees the old one or the new one.

    `step` is the last step that a resumed run would not repeat; None leaves it unchanged.
    """
    if step is None:
        step = read_run_state(run_dir).get("step", 0)
    draft = run_dir / f"{RUN_STATE_FILE}.{os.getpid()}"  # ranks may fail at the same moment
    draft.write_text(json.dumps({"status": status, "step": step, "error": error}) + "\n", encoding="utf-8")
    draft.replace(run_dir / RUN_STATE_FILE)


def read_run_state(run_dir: Path) -> dict[str, Any]:
    """Return the state; empty if there is none."""
    path = run_dir / RUN_STATE_FILE
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return state
