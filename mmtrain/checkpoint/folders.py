"""File and folder names of checkpoints: complete ones, drafts, and the newest one.

root/latest                        name of the newest complete checkpoint, one line
root/step-00000100/                a complete checkpoint; appears by rename, never changes
    manifest.json                  written last: sizes and sums of all other files, the pieces they hold, the state
    rank-00003.safetensors         the pieces of tensors that rank 3 owned
    rank-00003.json                state of rank 3 only, such as its random generators
root/step-00000100-2/              step 100 saved again, after a run went back to an earlier checkpoint
root/draft-9b1d07aa-1f2e3d4c5b6a/  a save or removal in progress, or left over from a crash, of run 9b1d07aa
"""

import re
import uuid
from pathlib import Path

MANIFEST = "manifest.json"
LATEST = "latest"
_DRAFT = "draft-"
_CHECKPOINT_FOLDER_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


def tensor_file(rank: int) -> str:
    """Return the name of a rank's file of tensors."""
    return f"rank-{rank:05d}.safetensors"


def state_file(rank: int) -> str:
    """Return the name of a rank's file of state."""
    return f"rank-{rank:05d}.json"


def step_of(folder: Path) -> int | None:
    """Return the step that a folder's name says; None for the name of another folder."""
    folder_age = age(folder)
    return None if folder_age is None else folder_age[0]


def find(root: Path) -> list[Path]:
    """List all checkpoints in `root`, newest first, without verifying them; empty if `root` does not exist."""
    if not root.is_dir():
        return []
    ages = {path: path_age for path in root.iterdir() if (path_age := age(path)) is not None}
    return sorted(ages, key=lambda path: ages[path], reverse=True)


def latest(root: Path) -> Path | None:
    """Return the checkpoint that the file `latest` names, or None before the first."""
    try:
        return root / (root / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def new_draft(root: Path, run_id: str) -> Path:
    """Return a path that no earlier or crashed save has used."""
    return root / f"{_DRAFT}{run_id}-{uuid.uuid4().hex[:12]}"


def drafts(root: Path, run_id: str) -> list[Path]:
    """List what unfinished saves and removals of one run left behind."""
    return sorted(root.glob(f"{_DRAFT}{run_id}-*"))


def foreign_drafts(root: Path, run_id: str) -> list[Path]:
    """List what other runs left behind, or are working on."""
    return sorted(set(root.glob(f"{_DRAFT}*")) - set(drafts(root, run_id)))


def free_folder(root: Path, step: int) -> Path:
    """Return the folder to commit `step` to. An existing folder, good or damaged, is never replaced: a crash between
    removing the old one and renaming the new one would leave neither.
    """
    attempts = [path_age[1] for path in find(root) if (path_age := age(path)) is not None and path_age[0] == step]
    return root / (f"step-{step:08d}" if not attempts else f"step-{step:08d}-{max(attempts) + 1}")


def age(folder: Path) -> tuple[int, int] | None:
    """Parse (step, attempt) from the name of a checkpoint's folder; None for other names. A newer one has more."""
    match = _CHECKPOINT_FOLDER_NAME.fullmatch(folder.name)
    return None if match is None else (int(match[1]), int(match[2] or 1))
