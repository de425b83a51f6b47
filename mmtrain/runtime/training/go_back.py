"""Go back to an earlier checkpoint of a run, and set aside what came after it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtrain.checkpoint import SavingRun, find, is_trusted, set_aside_newer
from mmtrain.checkpoint.folders import step_of
from mmtrain.checkpoint.verify_files import complete, read_manifest
from mmtrain.data.loading.batch_builder import stream_position
from mmtrain.durable_files import read_log, write_whole
from mmtrain.errors import UserError
from mmtrain.report.runlog import METRICS_FILE
from mmtrain.runtime.run_folder import (
    ABANDONED_FOLDER,
    CHECKPOINTS_FOLDER,
    HUGGING_FACE_FOLDER,
    SKIPPED_POSITIONS_FILE,
    SKIPPED_STEPS_FILE,
)

LAST_GOOD = "last-good"
SKIPPED_STATE = "skipped_positions"  # key of the state of checkpoints


@dataclass(frozen=True)
class GoBack:
    """Where to resume a run other than at its newest checkpoint."""

    step: int | None  # after which the checkpoint was saved; None: the newest one that is not suspect
    skip_steps: tuple[int, int] | None = None  # first and last step (from 1) whose samples are not trained on again


def parse_go_back(resume_from: str, skip_steps: str | None) -> GoBack:
    """Parse the values of `--resume-from` and `--skip-steps`. Raises UserError."""
    if resume_from != LAST_GOOD and not resume_from.isdecimal():
        raise UserError(f"--resume-from: {resume_from!r} found; allowed: the step of a checkpoint, or {LAST_GOOD}")
    step = None if resume_from == LAST_GOOD else int(resume_from)
    if skip_steps is None:
        return GoBack(step)
    first, dash, last = skip_steps.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise UserError(f"--skip-steps: {skip_steps!r} found; allowed: a step (120) or a range of steps (120-125)")
    steps = (int(first), int(last or first))
    if not 1 <= steps[0] <= steps[1]:
        raise UserError(f"--skip-steps: {skip_steps!r} found; steps count from 1, and the first comes first")
    return GoBack(step, steps)


def go_back(run_dir: Path, target: GoBack, run: SavingRun) -> str:
    """Make the chosen checkpoint the newest one; return what to tell the user. Call this on rank 0 of `run` only.

    Newer checkpoints and their Hugging Face folders move to the folder `abandoned`, with the log entries of the steps
    after the chosen one. The positions of the data to skip are written to a file, until the first checkpoint that is
    saved holds them.

    Raises UserError if there is no such checkpoint, or for steps to skip that were before it.
    """
    root = run_dir / CHECKPOINTS_FOLDER
    chosen = _choose(root, target)
    state = read_manifest(chosen).state
    next_step = int(state["next_step"])
    positions = _positions_to_skip(target, next_step, tuple(state.get(SKIPPED_STATE, ())))
    abandoned = new_abandoned_folder(run_dir, next_step)
    num_lost = _copy_entries_after(next_step, run_dir / METRICS_FILE, abandoned)
    _copy_entries_after(next_step, run_dir / SKIPPED_STEPS_FILE, abandoned)
    write_whole(run_dir / SKIPPED_POSITIONS_FILE, json.dumps(positions) + "\n")
    set_aside_newer_folders(run_dir, next_step, abandoned / HUGGING_FACE_FOLDER)
    moved = set_aside_newer(root, chosen, abandoned, run)
    text = f"going back to {chosen}"
    if moved or num_lost:
        text += f"; {len(moved)} newer checkpoints and the metrics of {num_lost} steps are in {abandoned}"
    return text


def read_skipped_positions(run_dir: Path, state: dict[str, Any]) -> tuple[int, ...]:
    """Return the positions of the data that a run leaves out, given the state of the checkpoint that it resumes."""
    saved = set(state.get(SKIPPED_STATE, ()))
    try:
        saved |= set(json.loads((run_dir / SKIPPED_POSITIONS_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        pass
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{run_dir / SKIPPED_POSITIONS_FILE} is damaged ({error}): remove it, and repeat --resume-from with "
            "--skip-steps if no checkpoint was saved since"
        ) from error
    return tuple(sorted(saved))


def _choose(root: Path, target: GoBack) -> Path:
    folders = find(root)
    if target.step is None:
        chosen = next((folder for folder in folders if is_trusted(folder)), None)
        if chosen is None:
            raise UserError(
                f"--resume-from {LAST_GOOD}: of the {len(folders)} checkpoints in {root} none is complete and from "
                "before a stretch of unusual steps; name a step"
            )
        return chosen
    steps = {folder: read_manifest(folder).step for folder in folders if complete(folder)}
    chosen = next((folder for folder, step in steps.items() if step == target.step), None)
    if chosen is None:
        steps_text = ", ".join(map(str, sorted(set(steps.values())))) or "none"
        raise UserError(
            f"--resume-from: {target.step} found, but {root} holds no complete checkpoint of that step; allowed: "
            f"{steps_text}, or {LAST_GOOD}"
        )
    return chosen


def _positions_to_skip(target: GoBack, next_step: int, skipped: Sequence[int]) -> tuple[int, ...]:
    """Return the positions that were skipped before and those of the steps to skip now, ascending."""
    if target.skip_steps is None:
        return tuple(skipped)
    first, last = target.skip_steps
    if first <= next_step:
        raise UserError(
            f"--skip-steps: {first}-{last} found, but the checkpoint was saved after step {next_step}, so that the "
            f"weights have seen step {first}; allowed: steps from {next_step + 1} on, or an earlier --resume-from"
        )
    return tuple(sorted({*skipped, *(stream_position(step - 1, skipped) for step in range(first, last + 1))}))


def _copy_entries_after(step: int, path: Path, folder: Path) -> int:
    """Copy the entries of a log that a run which resumes after `step` drops; return how many there are."""
    entries = [entry for entry in read_log(path).entries if entry.get("step", 0) > step]
    if entries:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / path.name, "".join(json.dumps(entry) + "\n" for entry in entries))
    return len(entries)


def set_aside_newer_folders(run_dir: Path, step: int, target: Path) -> list[Path]:
    """Move the Hugging Face folders of later steps than `step` to the folder `target`; return their paths.

    They are of checkpoints that the run does not have any more. Raises OSError.
    """
    moved = []
    for folder in find(run_dir / HUGGING_FACE_FOLDER):
        if (step_of(folder) or 0) > step:
            target.mkdir(parents=True, exist_ok=True)
            folder.rename(target / folder.name)
            moved.append(target / folder.name)
    return moved


def new_abandoned_folder(run_dir: Path, step: int) -> Path:
    """Return a folder that does not exist for what came after `step`: a run may go back to it several times."""
    name = f"after-step-{step:08d}"
    folder, attempt = run_dir / ABANDONED_FOLDER / name, 1
    while folder.exists():
        attempt += 1
        folder = run_dir / ABANDONED_FOLDER / f"{name}-{attempt}"
    return folder
