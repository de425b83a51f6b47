"""Go back to an earlier checkpoint: move newer ones out of the way, where nothing removes or resumes them."""

from pathlib import Path

from mmtrain.checkpoint import folders as layout
from mmtrain.checkpoint.save import SavingRun, point_latest
from mmtrain.checkpoint.storage import LocalStorage


def set_aside_newer(root: Path, chosen: Path, target: Path, run: SavingRun) -> list[Path]:
    """Move the checkpoints of `root` that are newer than `chosen` to the folder `target` for `run`; return their paths.

    The newest moves first and `latest` changes last: after a crash in between, the newest that remains is one of those
    to abandon or `chosen`, and calling this again completes it. Raises OSError.
    """
    storage = LocalStorage()
    folders = layout.find(root)
    moved = []
    for folder in folders[: folders.index(chosen)]:
        storage.make_folder(target)
        storage.rename(folder, target / folder.name)
        moved.append(target / folder.name)
    if moved:
        storage.sync_folder(target)
        point_latest(root, chosen, storage, run)
    return moved
