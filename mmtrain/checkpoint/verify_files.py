"""Is a checkpoint what was saved? Answered from its manifest, file by file; a job's ranks share the hashing."""

import hashlib
from pathlib import Path

from mmtrain.checkpoint.folders import MANIFEST
from mmtrain.checkpoint.manifest import Manifest
from mmtrain.checkpoint.rank_agreement import Ranks
from mmtrain.checkpoint.storage import FileSum
from mmtrain.errors import CheckpointError


def verify(folder: Path) -> list[str]:
    """Hash every file; return what is wrong, each line beginning with the file's name. Empty: it is good."""
    return verify_together(folder, Ranks.alone())


def verify_together(folder: Path, ranks: Ranks) -> list[str]:
    """`verify` with the files dealt to all ranks. Every rank gets the whole list, so all decide alike."""
    own: list[str] = []
    try:
        names = list(read_manifest(folder).files.items())[ranks.rank :: ranks.world_size]
        own = [problem for name, file in names if (problem := _problem(folder / name, file))]
    except CheckpointError as error:
        own = [str(error)]
    found = ranks.gather(own)
    # A manifest that is bad is reported by all ranks, in the same words.
    together = None if found is None else list(dict.fromkeys(line for lines in found for line in lines))
    problems: list[str] = ranks.broadcast(together)
    return problems


def complete(folder: Path) -> bool:
    """Whether the manifest is good and all files have their sizes: quick, but blind to flipped bytes."""
    try:
        files = read_manifest(folder).files
        return all((folder / name).stat().st_size == file.num_bytes for name, file in files.items())
    except (CheckpointError, OSError):
        return False


def read_manifest(folder: Path) -> Manifest:
    """Parse `folder`'s manifest. Raises CheckpointError, its message beginning with the file's name."""
    try:
        return Manifest.from_bytes((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST}: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{MANIFEST}: {error}") from None


def _problem(path: Path, expected: FileSum) -> str | None:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected.num_bytes:
            return f"{path.name}: has {num_bytes} bytes, the manifest says {expected.num_bytes}"
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{path.name}: missing"
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if found != expected.sha256:
        return f"{path.name}: SHA-256 is {found[:12]}..., the manifest says {expected.sha256[:12]}..."
    return None
