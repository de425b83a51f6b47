"""The object store of a run (`train.checkpoint.remote`): what is copied there beside the training, and fetched back.

store/checkpoints/   see `mmtrain.checkpoint.remote_copies`
store/hf/            the Hugging Face folders of `train.checkpoint.hf_every`
store/recipe.yaml, store/plan.json, store/metrics.jsonl   so that the run goes on, and is drawn, elsewhere
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mmtrain.checkpoint import Ranks, SavingRun, find
from mmtrain.checkpoint.folders import age
from mmtrain.checkpoint.manifest import Manifest
from mmtrain.checkpoint.remote_copies import CopyReport, copy_checkpoints, fetch_newest, stored_checkpoints
from mmtrain.checkpoint.retention import Rating
from mmtrain.checkpoint.storage import ProgressCallback, ignore_progress
from mmtrain.data.remote.folder_upload import is_uploaded, remove_folder, upload_folder
from mmtrain.data.remote.object_store import ObjectStore
from mmtrain.durable_files import write_whole
from mmtrain.errors import CheckpointError, MmtrainError, UserError
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.train_settings import CheckpointSettings
from mmtrain.redaction import Redactor
from mmtrain.report.runlog import METRICS_FILE
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, HUGGING_FACE_FOLDER, PLAN_FILE, RECIPE_FILE
from mmtrain.runtime.training.go_back import GoBack

_RECORDS = (RECIPE_FILE, PLAN_FILE, METRICS_FILE)


def open_store(recipe: Recipe) -> ObjectStore | None:
    """Return the store of a recipe's runs; None if it names none. Raises `DataError`; nothing is asked yet."""
    remote = recipe.train.checkpoint.remote
    return None if remote is None else ObjectStore.at(str(remote))


def check_store(recipe: Recipe, *, may_hold_run: bool, notify: Callable[[str], None]) -> bool:
    """Write something to the store of a recipe's runs, say where checkpoints go, and return whether it holds any.

    Raises:
        UserError: the store holds a run already, and this one does not go on with it.
        DataError: a package is missing, or the protocol is none that is known.
        RemoteReadError: the store cannot be written to.
    """
    store = open_store(recipe)
    if store is None:
        return False
    try:
        store.require_writable()
        stored = stored_checkpoints(store)
    except MmtrainError as error:
        raise type(error)(f"train.checkpoint.remote: {error}") from None
    if stored and not may_hold_run:
        raise UserError(
            f"train.checkpoint.remote: {store.url} holds a run already, up to {stored[0]}: continue it with --resume, "
            "or name another place"
        )
    contents = f", which holds {len(stored)}, up to {stored[0]}" if stored else ""
    notify(f"checkpoints are copied to {store.url}{contents}")
    return bool(stored)


def copy_run(run_dir: Path, url: str, settings: CheckpointSettings) -> list[str]:
    """Copy to the store what a run has saved; return what to tell the user. Called in the process that copies."""
    redact = Redactor()
    try:
        store = ObjectStore.at(url)
        report = copy_checkpoints(run_dir / CHECKPOINTS_FOLDER, store, settings.keep)
        for name in _RECORDS if report.uploaded else ():
            if (run_dir / name).is_file():
                store.write(name, partial(_whole, run_dir / name))
        lines = _describe(report, store)
        if settings.hf_every:
            lines += _copy_hugging_face_folders(run_dir / HUGGING_FACE_FOLDER, store, settings.hf_keep)
    except MmtrainError as error:
        raise type(error)(redact(str(error))) from None
    except Exception as error:  # of a library: it may quote what it sent
        raise CheckpointError(redact(f"{type(error).__name__}: {error}")) from None
    return [redact(line) for line in lines]


def _whole(path: Path) -> list[bytes]:
    return [path.read_bytes()]


def _describe(report: CopyReport, store: ObjectStore) -> list[str]:
    place = f"{store.url}/{CHECKPOINTS_FOLDER}"
    lines = [f"copied {name} to {place}" for name in report.uploaded]
    lines += [f"{name} was not copied to {place}: its files are damaged on the disk" for name in report.damaged]
    if report.set_aside:
        lines.append(
            f"{', '.join(report.set_aside)} in {place} are not of this run's course, since it went on from an earlier "
            f"checkpoint: now in {store.url}/abandoned"
        )
    return lines


def _copy_hugging_face_folders(root: Path, store: ObjectStore, keep: int | None) -> list[str]:
    """Upload the folders that the store lacks, or has of another course of the run, and keep as many as on the disk."""
    lines = []
    folders = find(root)
    for folder in folders:
        prefix, source = f"{HUGGING_FACE_FOLDER}/{folder.name}", f"{HUGGING_FACE_FOLDER}/.{folder.name}"
        identity = _identity(folder)
        if is_uploaded(store, prefix) and source in store.sizes(HUGGING_FACE_FOLDER) and store.read(source) == identity:
            continue
        if not folder.exists():  # the run keeps fewer
            continue
        remove_folder(store, prefix)
        upload_folder(store, folder, prefix)
        store.write(source, partial(_once, identity))
        lines.append(f"copied {prefix} to {store.url}")
    if keep is not None:
        stored = {Path(name).parts[1] for name in store.sizes(HUGGING_FACE_FOLDER)}
        newest_first = sorted((name for name in stored if age(Path(name))), reverse=True)
        for name in {*newest_first[keep:]} - {folder.name for folder in folders}:
            remove_folder(store, f"{HUGGING_FACE_FOLDER}/{name}")
            store.remove(f"{HUGGING_FACE_FOLDER}/.{name}")
    return lines


def _identity(folder: Path) -> bytes:
    """Return what tells a folder from one of the same name that was written at another time; it never changes."""
    files = sorted((path, path.stat()) for path in folder.rglob("*") if path.is_file())
    return "\n".join(f"{path.name} {status.st_size} {status.st_mtime_ns}" for path, status in files).encode()


def _once(content: bytes) -> list[bytes]:
    return [content]


def fetch_run(
    recipe: Recipe,
    run_dir: Path,
    ranks: Ranks,
    run: SavingRun,
    *,
    notify: Callable[[str], None],
    progress: ProgressCallback = ignore_progress,
    go_back: GoBack | None = None,
) -> Path | None:
    """Fetch the newest checkpoint of a run from its store, if that is newer than those in its folder, with all ranks.

    Return its folder; None if nothing was fetched. With it come the plan and the metrics, where the folder has none.
    go_back: fetch the checkpoint that it means. Raises CheckpointError.
    """
    store = open_store(recipe)
    if store is None:
        return None

    def is_target(manifest: Manifest) -> bool:
        assert go_back is not None
        return Rating.of(manifest).is_trusted if go_back.step is None else manifest.step == go_back.step

    root = run_dir / CHECKPOINTS_FOLDER
    on_disk = ranks.from_zero(f"listing the checkpoints in {root}", lambda: [folder.name for folder in find(root)])
    is_wanted = None if go_back is None else is_target
    fetched = fetch_newest(root, store, ranks, run, on_bad=notify, progress=progress, is_wanted=is_wanted)
    if fetched is None:
        return None

    def fetch_records() -> None:
        for name in _RECORDS:
            if not (run_dir / name).exists() and name in store.sizes():
                write_whole(run_dir / name, store.read(name).decode())
        newer = f", which is newer than {on_disk[0]} in {root}" if on_disk else ""
        notify(f"fetched {fetched.name} from {store.url}{newer}")

    ranks.from_zero(f"fetching the records of the run from {store.url}", fetch_records)
    return fetched
