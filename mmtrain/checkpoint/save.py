"""Save a checkpoint: every rank writes its files, rank 0 commits by rename, then old checkpoints are removed."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmtrain.checkpoint import folders as layout
from mmtrain.checkpoint import tensorfile
from mmtrain.checkpoint.manifest import Manifest, join_pieces
from mmtrain.checkpoint.rank_agreement import Ranks, describe
from mmtrain.checkpoint.readers import removing
from mmtrain.checkpoint.retention import Rating, worth_keeping
from mmtrain.checkpoint.storage import (
    FileSum,
    LocalStorage,
    MonitoredStorage,
    ProgressCallback,
    Storage,
    ignore_progress,
)
from mmtrain.checkpoint.tensor_pieces import Shard
from mmtrain.checkpoint.verify_files import complete, read_manifest, verify_together
from mmtrain.errors import CheckpointError


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint.

    `state` and `rank_state` are JSON values: position in the data, schedule, random generators as integers or hex. A
    value of `state[SUSPECT_SINCE]` other than None rates the checkpoint as suspect: its weights may be spoiled.
    `state[BEST_STEP]` names the step of the best checkpoint so far, which is kept. `verify` raises CheckpointError if
    the shards have changed until they were written; then nothing is committed.
    """

    step: int
    shards: Sequence[Shard]  # the pieces this rank owns: exactly one of the ranks that hold the same tensor passes it
    state: Mapping[str, Any] = field(default_factory=dict)  # common to all ranks; the one of rank 0 is saved
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    verify: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class SavingRun:
    """The run that saves. Its drafts carry its id; what other runs left, or are writing, is not touched.

    `still_needs` says of an old checkpoint, on rank 0, whether something is still to be made of it; it is kept.
    """

    run_id: str = "0"
    require_ownership: Callable[[], None] = lambda: None  # raises if another run has taken the folder
    still_needs: Callable[[Path], bool] = lambda folder: False


def save(
    root: Path,
    snapshot: Snapshot,
    *,
    keep: int,
    ranks: Ranks,
    storage: Storage | None = None,
    progress: ProgressCallback = ignore_progress,
    run: SavingRun | None = None,
) -> Path:
    """Save one checkpoint together with all ranks; return its folder.

    When this returns, the checkpoint survives a power cut and `latest` names it. Afterwards the `keep` newest
    checkpoints remain, the newest one that is not suspect, the best ones that all these name, and those that the run
    still needs; no checkpoint is removed while one of the newest is found damaged.
    `progress` hears of every piece of a file that this rank has written or read.

    Raises CheckpointError, the same on every rank, if any rank fails, or if another run owns the folder now. Then
    nothing was committed, earlier checkpoints are untouched and the draft is removed (by the next save of this run, if
    this process dies first).
    """
    storage = MonitoredStorage(storage or LocalStorage(), progress)
    run = run or SavingRun()
    # No rank may write before rank 0 has made the folder, and all must use the same name.
    draft = Path(ranks.from_zero(f"preparing to save in {root}", lambda: str(make_draft(root, storage, run))))
    # Rank 0 must not write the manifest, which declares the files complete, before every rank's files are on disk.
    records = ranks.gather(_write_rank_files(draft, snapshot, ranks.rank, storage))
    # No rank may continue, and perhaps exit or count this step as saved, before the commit.
    folder = Path(
        ranks.from_zero(
            f"saving step {snapshot.step}", lambda: str(_commit(root, draft, snapshot, records or [], storage, run))
        )
    )
    _retire(folder, keep, ranks, storage, run, progress)
    return folder


def make_draft(root: Path, storage: Storage, run: SavingRun) -> Path:
    """Remove what crashed saves of this run left, since it may fill the disk, and make a folder for this save."""
    run.require_ownership()
    for leftover in layout.drafts(root, run.run_id):
        storage.remove(leftover)
    draft = layout.new_draft(root, run.run_id)
    storage.make_folder(draft)
    return draft


def _write_rank_files(draft: Path, snapshot: Snapshot, rank: int, storage: Storage) -> dict[str, Any]:
    """Write this rank's two files; return their sums and pieces, or the error.

    Errors are returned and not raised: if this rank left here, the others would wait in `gather`.
    """
    try:
        pieces = describe_pieces(snapshot.shards, rank)
        rank_state = json.dumps(snapshot.rank_state, allow_nan=False).encode()
        contents: dict[str, Iterable[bytes | memoryview]] = {
            layout.tensor_file(rank): tensorfile.chunks(snapshot.shards),
            layout.state_file(rank): [rank_state],
        }
        files = {name: asdict(write_file(draft / name, chunks, storage)) for name, chunks in contents.items()}
        snapshot.verify()
        return {"files": files, "pieces": pieces}
    except Exception as error:
        return {"error": f"rank {rank}: {describe(error)}"}


def describe_pieces(shards: Sequence[Shard], rank: int) -> dict[str, dict[str, Any]]:
    """Return the pieces that a rank saves of each tensor, as `join_pieces` takes them. Raises CheckpointError."""
    pieces: dict[str, dict[str, Any]] = {}
    for shard in shards:
        dtype = tensorfile.dtype_name(shard.tensor)
        shape = shard.spec.full_shape
        record = pieces.setdefault(shard.name, {"dtype": dtype, "shape": shape, "pieces": []})
        if (record["dtype"], record["shape"]) != (dtype, shape):
            raise CheckpointError(f"{shard.name}: pieces of different shapes or dtypes on rank {rank}")
        record["pieces"].append(shard.spec.to_text())
    return pieces


def _commit(
    root: Path,
    draft: Path,
    snapshot: Snapshot,
    records: Sequence[Mapping[str, Any]],
    storage: Storage,
    run: SavingRun,
) -> Path:
    """Write the manifest, rename the draft to the checkpoint, and point `latest` at it. For rank 0 only."""
    try:
        errors = [record["error"] for record in records if "error" in record]
        if errors:
            raise CheckpointError("; ".join(errors))
        files = {name: FileSum(**file) for record in records for name, file in record["files"].items()}
        tensors = join_pieces([record["pieces"] for record in records])
        manifest = Manifest(snapshot.step, len(records), snapshot.state, files, tensors)
        write_file(draft / layout.MANIFEST, [manifest.to_bytes()], storage)
        storage.sync_folder(draft)  # the files' names must be on disk before the folder is renamed
        run.require_ownership()  # writing may have taken long
        folder = layout.free_folder(root, snapshot.step)
        storage.rename(draft, folder)
    except Exception as error:
        discard(draft, storage)
        raise CheckpointError(
            f"{describe(error)}. Nothing was committed; earlier checkpoints in {root} are untouched."
        ) from error
    point_latest(root, folder, storage, run)
    return folder


def point_latest(root: Path, folder: Path, storage: Storage, run: SavingRun) -> None:
    """Replace `latest` atomically, so that a reader sees the old name or the new one."""
    draft = layout.new_draft(root, run.run_id)
    try:
        storage.sync_folder(root)  # the folder's name must be on disk before `latest` contains it
        write_file(draft, [f"{folder.name}\n".encode()], storage)
        storage.rename(draft, root / layout.LATEST)
        storage.sync_folder(root)
    except Exception as error:
        discard(draft, storage)
        raise CheckpointError(
            f"{folder} is complete, but `latest` may still name the one before: {describe(error)}"
        ) from error


def _retire(saved: Path, keep: int, ranks: Ranks, storage: Storage, run: SavingRun, progress: ProgressCallback) -> None:
    """Remove all but the `keep` newest checkpoints and those of `_needed`, unless one of the newest is damaged.

    The newest is the one just `saved`. What claims to be of a later step is foreign, or was damaged when the run
    resumed from an earlier one. It neither counts nor is removed: else removal would stop until the run is past it. One
    that is being read stays until a later save.

    Each checkpoint is hashed once more, at the save after its own, when reads come from the disk and no longer from the
    page cache; the others are only checked for completeness. A damaged one stops all removal until `keep` good ones are
    newer.
    """
    root = saved.parent

    def find_up_to_saved() -> list[str]:
        folders = layout.find(root)
        return [str(path) for path in folders[folders.index(saved) :]]

    # Rank 0 lists for all ranks: other ranks may see the folder at another moment.
    folders = [Path(text) for text in ranks.from_zero(f"listing the checkpoints in {root}", find_up_to_saved)]
    newest = folders[:keep]
    needed = ranks.from_zero(
        f"rating the checkpoints in {root}", lambda: [str(path) for path in _needed(folders, keep, run)]
    )
    old = [folder for folder in folders if str(folder) not in needed]
    if not old or verify_together(newest[min(2, keep) - 1], ranks, progress):
        return

    def remove() -> None:
        run.require_ownership()
        if not all(complete(folder) for folder in newest):
            return
        for folder in old:
            # Rename first: a checkpoint that a crash left half removed would look complete.
            draft = layout.new_draft(root, run.run_id)
            with removing(folder) as may_remove:
                if not may_remove:  # the next save finds it again
                    continue
                storage.rename(folder, draft)
            storage.remove(draft)

    # No rank may start the next save, or exit, while rank 0 is still removing or after it failed.
    ranks.from_zero(f"removing old checkpoints from {root}", remove)


def _needed(folders: Sequence[Path], keep: int, run: SavingRun) -> list[Path]:
    """Return what `worth_keeping` names, and what the run still needs. `folders`: newest first."""

    def rate(folder: Path) -> Rating | None:
        return Rating.of(read_manifest(folder)) if complete(folder) else None

    return [*worth_keeping(folders, keep, rate), *filter(run.still_needs, folders)]


def write_file(path: Path, chunks: Iterable[bytes | memoryview], storage: Storage) -> FileSum:
    """Write a file; name it in errors, since the operating system does not when the disk is full."""
    try:
        return storage.write(path, chunks)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def discard(draft: Path, storage: Storage) -> None:
    """Remove a draft after a failure; if even that fails, the next save removes it."""
    try:
        storage.remove(draft)
    except OSError:
        return


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
