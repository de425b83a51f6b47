"""Keep copies of a run's checkpoints in an object store, and fetch them from there.

    store/checkpoints/step-00000100/rank-00003.safetensors  as on disk, like all files of a checkpoint
    store/checkpoints/step-00000100/manifest.json           written last: without it there is no checkpoint
    store/checkpoints/step-00000100/manifest.part           written first: what the files are of that came before
    store/abandoned/after-step-00000100/step-00000200/...   what a run that went back left behind

A store knows no renames, so the manifest says that a checkpoint is complete: it is written last and removed first. An
upload that was cut off goes on with the files that are missing, if the checkpoint is still the same.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Protocol

from mmtrain.checkpoint import folders as layout
from mmtrain.checkpoint.manifest import Manifest
from mmtrain.checkpoint.rank_agreement import Ranks, describe
from mmtrain.checkpoint.readers import hold
from mmtrain.checkpoint.retention import Rating, worth_keeping
from mmtrain.checkpoint.save import SavingRun, discard, make_draft, point_latest, write_file
from mmtrain.checkpoint.storage import (
    PIECE_BYTES,
    LocalStorage,
    MonitoredStorage,
    ProgressCallback,
    Storage,
    ignore_progress,
)
from mmtrain.checkpoint.verify_files import complete
from mmtrain.errors import CheckpointError

STORED_FOLDER = "checkpoints"
ABANDONED = "abandoned"
NUM_UPLOADS_AT_ONCE = 4  # files; each has a part of an upload in memory
_MARK = "manifest.part"
Chunks = Iterable[bytes | memoryview]


class CopyStore(Protocol):
    """What copies need of an object store; `mmtrain.data.remote.object_store.ObjectStore` is one."""

    @property
    def url(self) -> str:
        """Return where the store is."""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the bytes of all objects below a folder, by name."""

    def read(self, name: str) -> bytes:
        """Return a small object."""

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of an object."""

    def write(self, name: str, chunks: Callable[[], Chunks], sha256: str | None = None) -> bool:
        """Write an object; return False, and write nothing, for bytes with another sum."""

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""

    def move(self, name: str, target: str) -> None:
        """Give an object another name."""


@dataclass
class CopyReport:
    """What became of the copies, by the names of checkpoints."""

    uploaded: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)  # on disk, so that they were not uploaded
    set_aside: list[str] = field(default_factory=list)  # in the store, since they are of another course of the run
    removed: list[str] = field(default_factory=list)


def stored_checkpoints(store: CopyStore) -> list[str]:
    """Return the names of the complete checkpoints in a store, newest first."""
    return _complete(_by_checkpoint(store))


def copy_checkpoints(root: Path, store: CopyStore, keep: int) -> CopyReport:
    """Make the store hold the checkpoints of `root` that are worth keeping, the newest first, and no older ones.

    The rules are those of the disk, over what is on disk and in the store: after a move to another machine the best
    checkpoint may be in the store alone. What is newer there than the newest of `root`, or differs under the same name,
    is of a course that the run left; it moves to the folder `abandoned` of the store.
    """
    on_disk = _read_manifests(root)
    report = CopyReport()
    if not on_disk:
        return report
    objects = _by_checkpoint(store)
    for name in _of_another_course(store, objects, on_disk):
        _set_aside(store, name, objects.pop(name), next(iter(on_disk)))
        report.set_aside.append(name)
    stored = _complete(objects)

    @cache
    def rate(name: str) -> Rating | None:
        try:
            return Rating.of(Manifest.from_bytes(on_disk[name] if name in on_disk else _manifest_bytes(store, name)))
        except CheckpointError:  # damaged in the store
            return None

    worth = worth_keeping(_newest_first({*on_disk, *stored}), keep, rate)
    for name in worth:
        if name in on_disk and name not in stored:
            _upload_one(store, root / name, on_disk[name], objects.get(name, {}), report)
    for name, its_objects in objects.items():
        mark = _object(name, _MARK)
        if mark in its_objects and name in stored:  # a kill came right after the manifest
            store.remove(mark)
        if name not in worth:  # also what was cut off
            _remove(store, its_objects)
            report.removed.append(name)
    return report


def fetch_newest(
    root: Path,
    store: CopyStore,
    ranks: Ranks,
    run: SavingRun,
    *,
    on_bad: Callable[[str], None],
    progress: ProgressCallback = ignore_progress,
    is_wanted: Callable[[Manifest], bool] | None = None,
) -> Path | None:
    """Fetch the newest checkpoint of a store that is newer than all complete ones of `root`, with all ranks.

    With `is_wanted`, it is the newest that this accepts: perhaps an older one, but none that `root` has. Each file is
    fetched by one rank, and has the sum that the manifest states. A damaged one is reported by `on_bad` on rank 0, and
    then the next older one is fetched. Return the folder; None if there is nothing to fetch. Raises CheckpointError, on
    all ranks, if the store cannot be read.
    """
    storage = MonitoredStorage(LocalStorage(), progress)

    def list_others() -> list[str]:
        on_disk = [folder.name for folder in layout.find(root) if complete(folder)]
        others = (name for name in stored_checkpoints(store) if name not in on_disk)
        return [name for name in others if is_wanted is not None or not on_disk or _age(name) > _age(on_disk[0])]

    for name in ranks.from_zero(f"listing the checkpoints in {store.url}", list_others):
        text = ranks.from_zero(f"reading the manifest of {name} in {store.url}", partial(_manifest_text, store, name))
        try:
            manifest = Manifest.from_bytes(text.encode())
        except CheckpointError as error:
            _report(ranks, on_bad, store, name, [str(error)])
            continue
        if is_wanted is None or is_wanted(manifest):
            folder = _fetch(root, store, name, manifest, ranks, run, storage)
            if isinstance(folder, Path):
                return folder
            _report(ranks, on_bad, store, name, folder)
    return None


def _fetch(
    root: Path, store: CopyStore, name: str, manifest: Manifest, ranks: Ranks, run: SavingRun, storage: Storage
) -> Path | list[str]:
    """Fetch one checkpoint into a draft and commit it; return its folder, or what is wrong with its files."""
    draft = Path(ranks.from_zero(f"preparing to fetch to {root}", lambda: str(make_draft(root, storage, run))))
    problems, failure = [], None
    try:
        for file, expected in list(manifest.files.items())[ranks.rank :: ranks.world_size]:
            if write_file(draft / file, _pieces(store, _object(name, file)), storage) != expected:
                problems.append(f"{file}: it has not the bytes or the SHA-256 that the manifest says")
    except _MissingObjectError as error:
        problems.append(str(error))
    except Exception as error:  # others would wait for this rank
        failure = describe(error)
    outcomes = ranks.gather([problems, failure])

    def commit() -> str | list[str]:
        of_ranks = outcomes or []
        failures = [f"rank {rank}: {failure}" for rank, (_, failure) in enumerate(of_ranks) if failure]
        all_problems = [problem for problems, _ in of_ranks for problem in problems]
        if failures or all_problems:
            discard(draft, storage)
        if failures:
            raise CheckpointError("; ".join(failures))
        if all_problems:
            return all_problems
        write_file(draft / layout.MANIFEST, [manifest.to_bytes()], storage)
        storage.sync_folder(draft)
        run.require_ownership()
        folder = root / name
        if folder.exists():  # a damaged one, which stays
            folder = layout.free_folder(root, manifest.step)
        storage.rename(draft, folder)
        point_latest(root, folder, storage, run)
        return str(folder)

    outcome = ranks.from_zero(f"fetching {name} from {store.url}", commit)
    return Path(outcome) if isinstance(outcome, str) else outcome


class _MissingObjectError(Exception):
    """An object that a manifest names is not there; no OSError, as those of the disk are."""


def _pieces(store: CopyStore, name: str) -> Iterator[bytes]:
    try:
        yield from store.pieces(name)
    except FileNotFoundError:
        raise _MissingObjectError(f"{name.rpartition('/')[2]}: missing") from None


def _report(ranks: Ranks, on_bad: Callable[[str], None], store: CopyStore, name: str, problems: list[str]) -> None:
    if ranks.rank == 0:
        on_bad(f"checkpoint {name} in {store.url} is damaged and not used: {'; '.join(problems)}")


def _read_manifests(root: Path) -> dict[str, bytes]:
    """Return the manifests of the complete checkpoints on the disk, newest first; the run removes some meanwhile."""
    manifests = {}
    for folder in layout.find(root):
        with suppress(OSError):
            if complete(folder):
                manifests[folder.name] = (folder / layout.MANIFEST).read_bytes()
    return manifests


def _by_checkpoint(store: CopyStore) -> dict[str, dict[str, int]]:
    """Return the objects of each checkpoint, complete or not, with their bytes, by the checkpoint's name."""
    objects: dict[str, dict[str, int]] = {}
    for name, size in store.sizes(STORED_FOLDER).items():
        folder, _, rest = name.removeprefix(f"{STORED_FOLDER}/").partition("/")
        if rest and layout.age(Path(folder)) is not None:
            objects.setdefault(folder, {})[name] = size
    return objects


def _complete(objects: Mapping[str, Mapping[str, int]]) -> list[str]:
    return _newest_first(name for name, its_objects in objects.items() if _object(name, layout.MANIFEST) in its_objects)


def _newest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=_age, reverse=True)


def _age(name: str) -> tuple[int, int]:
    age = layout.age(Path(name))
    assert age is not None, "a name of a checkpoint"
    return age


def _object(name: str, file: str) -> str:
    return f"{STORED_FOLDER}/{name}/{file}"


def _manifest_bytes(store: CopyStore, name: str) -> bytes:
    return store.read(_object(name, layout.MANIFEST))


def _manifest_text(store: CopyStore, name: str) -> str:
    return _manifest_bytes(store, name).decode(errors="replace")  # what is damaged has another sum


def _of_another_course(
    store: CopyStore, objects: Mapping[str, Mapping[str, int]], on_disk: Mapping[str, bytes]
) -> list[str]:
    """Return the complete checkpoints of a store that this run has left, or never had; `on_disk`: newest first."""
    newest = _age(next(iter(on_disk)))
    return [
        name
        for name in _complete(objects)
        if _age(name) > newest or (name in on_disk and _manifest_bytes(store, name) != on_disk[name])
    ]


def _set_aside(store: CopyStore, name: str, its_objects: Mapping[str, int], newest: str) -> None:
    """Move a checkpoint to the folder `abandoned`. Its manifest goes last, so that this can be done again."""
    manifest = _object(name, layout.MANIFEST)
    for stored in sorted(its_objects, key=lambda stored: stored == manifest):
        store.move(stored, f"{ABANDONED}/after-{newest}/{stored.removeprefix(f'{STORED_FOLDER}/')}")


def _upload_one(store: CopyStore, folder: Path, text: bytes, there: Mapping[str, int], report: CopyReport) -> None:
    held = hold(folder)  # so that the run does not remove it meanwhile
    if held is not None:
        (report.uploaded if _upload(store, folder, text, there) else report.damaged).append(folder.name)


def _upload(store: CopyStore, folder: Path, text: bytes, there: Mapping[str, int]) -> bool:
    """Upload the files of a checkpoint that are not there, and its manifest last; return False if one is damaged."""
    manifest, mark = Manifest.from_bytes(text), _object(folder.name, _MARK)
    if mark not in there or store.read(mark) != text:
        _remove(store, there)
        there = {}
        store.write(mark, lambda: [text])
    missing = [name for name, file in manifest.files.items() if there.get(_object(folder.name, name)) != file.num_bytes]

    def upload(name: str) -> bool:
        return store.write(_object(folder.name, name), partial(_chunks, folder / name), manifest.files[name].sha256)

    with ThreadPoolExecutor(NUM_UPLOADS_AT_ONCE) as threads:
        is_good = all(list(threads.map(upload, missing)))
    if is_good:
        store.write(_object(folder.name, layout.MANIFEST), lambda: [text])
        store.remove(mark)
    return is_good


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(PIECE_BYTES):
            yield chunk


def _remove(store: CopyStore, its_objects: Iterable[str]) -> None:
    """Remove a checkpoint from a store, its manifest first: what a kill leaves is no checkpoint."""
    for name in sorted(its_objects, key=lambda name: not name.endswith(f"/{layout.MANIFEST}")):
        store.remove(name)
