"""Verify a checkpoint file by file against its manifest; the ranks of a job share the hashing."""

import hashlib
from pathlib import Path

from mmtrain.checkpoint.folders import MANIFEST, step_of
from mmtrain.checkpoint.manifest import BEST_STEP, SUSPECT_SINCE, Manifest
from mmtrain.checkpoint.rank_agreement import Ranks
from mmtrain.checkpoint.storage import PIECE_BYTES, FileSum, ProgressCallback, ignore_progress
from mmtrain.errors import CheckpointError


def verify(folder: Path) -> list[str]:
    """Hash every file; return a line for each problem, starting with the file's name. Empty means it is good."""
    return verify_together(folder, Ranks.alone())


def verify_together(folder: Path, ranks: Ranks, progress: ProgressCallback = ignore_progress) -> list[str]:
    """`verify` with the files distributed over all ranks. Every rank gets all problems, so that all decide alike.

    `progress` hears of every piece that this rank has read.
    """
    problems_here: list[str] = []
    try:
        files = list(read_manifest(folder).files.items())[ranks.rank :: ranks.world_size]
        for name, expected in files:
            problem = _problem(folder / name, expected, progress)
            if problem is not None:
                problems_here.append(problem)
    except CheckpointError as error:
        problems_here = [str(error)]
    gathered = ranks.gather(problems_here)
    all_problems = None
    if gathered is not None:  # on rank 0
        # All ranks report a bad manifest in the same words, so drop duplicates.
        all_problems = list(dict.fromkeys(line for lines in gathered for line in lines))
    problems: list[str] = ranks.broadcast(all_problems)
    return problems


def complete(folder: Path) -> bool:
    """Tell whether the manifest is good and all files have their sizes; fast, but changed bytes are not detected."""
    try:
        files = read_manifest(folder).files
        return all((folder / name).stat().st_size == file.num_bytes for name, file in files.items())
    except (CheckpointError, OSError):
        return False


def is_trusted(folder: Path) -> bool:
    """Tell whether a checkpoint is complete, and was not rated suspect when it was saved."""
    return complete(folder) and read_manifest(folder).state.get(SUSPECT_SINCE) is None


def best_step_of(folder: Path) -> int | None:
    """Return the step of the best checkpoint so far, as a checkpoint says; None if it names none, or is damaged."""
    try:
        step = read_manifest(folder).state.get(BEST_STEP)
    except CheckpointError:
        return None
    return step if isinstance(step, int) else None


def read_manifest(folder: Path) -> Manifest:
    """Parse the manifest in `folder`; it must be of the step that the folder's name says.

    Raises CheckpointError whose message starts with the file's name.
    """
    try:
        manifest = Manifest.from_bytes((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST}: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{MANIFEST}: {error}") from None
    if step_of(folder) not in (None, manifest.step):
        raise CheckpointError(f"{MANIFEST}: is of step {manifest.step}, unlike the name of its folder {folder.name}")
    return manifest


def _problem(path: Path, expected: FileSum, progress: ProgressCallback) -> str | None:
    try:
        progress(path, 0)
        num_bytes = path.stat().st_size
        if num_bytes != expected.num_bytes:
            return f"{path.name}: has {num_bytes} bytes, the manifest says {expected.num_bytes}"
        digest = _sha256(path, progress)
    except FileNotFoundError:
        return f"{path.name}: missing"
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if digest != expected.sha256:
        return f"{path.name}: SHA-256 is {digest[:12]}..., the manifest says {expected.sha256[:12]}..."
    return None


def _sha256(path: Path, progress: ProgressCallback) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
            progress(path, num_bytes)
    return digest.hexdigest()
