"""Cache an index on disk: read it while nothing that it depends on has changed, and build it anew when in doubt.

    .mmtrain-index/<key>-<n>/     <key>: SHA-256 of everything that lengths depend on but media; the largest n counts
        samples.bin               records of the usable samples, see `sample_table`
        arrays.safetensors        where records end, and all lengths; mapped, so that all processes share it
        media.safetensors         the media in files of their own, see `media_versions`
        rest.json                 quarantined samples, sums of the columns, checksums of the three files above
        checked                   when checksums and media files were last compared
        <hash>, lock              arrays that runs derive from the index, see `shared_arrays`

A folder appears complete, by renaming, and what it has then does not change afterwards. Its name also depends on a
secret of the user. Data sets come from elsewhere, and an index that came with one could name any file of this machine.

Sizes and times of media files are compared before an index is used, and all lengths are read anew if one has changed.
Of many remote ones a sample is compared: asking a server a million times is what the cache saves.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors.numpy import load, load_file, save, save_file

from mmtrain.balance.columns import ColumnFacts, FilePlace, StoredColumn
from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.formats.energon import description_files
from mmtrain.data.formats.read_source import list_shards
from mmtrain.data.formats.sample import Quarantined
from mmtrain.data.index.media_versions import MediaVersions, find_changed
from mmtrain.data.index.sample_table import SampleTable
from mmtrain.data.media.nearest_name import show_path
from mmtrain.data.remote.locations import location_version, remote_index_folder
from mmtrain.data.text.tokenizer_folder import tokenizer_sha256
from mmtrain.durable_files import take_lock
from mmtrain.errors import DataError, RemoteReadError
from mmtrain.recipe.settings.base import select
from mmtrain.recipe.settings.data_settings import DataPart, SourceSettings
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.recipe.settings.source_path import RemotePath, SourcePath
from mmtrain.system_calls import open_memory_file

INDEX_FOLDER_NAME = ".mmtrain-index"
MIN_SOURCE_BYTES = 1 << 20  # indexing a smaller source takes less than a second
MAX_INDEXES_PER_FOLDER = 4  # the least recently used ones are removed
_FORMAT_VERSION = 7
_LIBRARIES = (
    "Pillow",
    "tokenizers",
    "jinja2",
    "soundfile",
    "av",
    "pillow-heif",
    "pyarrow",
)  # that read headers and split texts
_RECORDS_FILE = "samples.bin"
_ARRAYS_FILE = "arrays.safetensors"
_MEDIA_FILE = "media.safetensors"
_REST_FILE = "rest.json"
_CHECKED_FILE = "checked"
_SUMMED_FILES = (_RECORDS_FILE, _ARRAYS_FILE, _MEDIA_FILE)
_BUILD_PREFIX = "making-"  # of a folder that is being built
_SECRET_BYTES = 16
SUMMED_BLOCK_BYTES = 1 << 20
SUMMED_BLOCKS = 1024
_DTYPES = {f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}  # by safetensors' names


@dataclass(frozen=True)
class StoredIndex:
    """What reading the sources yields, before weights and encoder settings turn it into a `DataIndex`."""

    samples: SampleTable
    arrays: dict[str, StoredColumn]
    quarantined: tuple[Quarantined, ...]
    content_sha256: str
    warnings: tuple[str, ...]  # of the tokenizer, and of what texts spell
    folder: Path | None = None  # where it is cached


class IndexCache:
    """The place of one index on disk.

    Use it inside `locked`, so that one process of a machine builds the index and the others read it.
    """

    def __init__(self, folder: Path, key: str) -> None:
        """Cache the index in `folder`, under names that start with `key`."""
        self.folder = folder
        self._key = key
        self._started_ns = time.time_ns()

    @classmethod
    def for_recipe(
        cls, recipe: Recipe, sources: Sequence[SourceSettings], part: DataPart = "train"
    ) -> "IndexCache | None":
        """Return the place for a recipe's index; None for small sources, and where no index can be trusted."""
        try:
            shards = [file for source in sources for file in list_shards(source.path, source.split)]
            described: list[Path] = []
            for source in sources:
                described += [] if isinstance(source.path, RemotePath) else description_files(source.path)
            files = [(file, _file_version(file)) for file in (*shards, *described)]
            tokenizer = tokenizer_sha256(recipe.data.tokenizer_path, recipe.model.hf)
        except (OSError, DataError):  # reading the sources will report it
            return None
        if sum(version[0] for _, version in files) < MIN_SOURCE_BYTES:
            return None
        folder = recipe.data.index_cache
        secret = ""
        if folder is None:
            first = files[0][0]
            folder = remote_index_folder() if isinstance(first, RemotePath) else first.parent / INDEX_FOLDER_NAME
            secret = _user_secret()
            if not secret:
                return None
        settings = select(recipe, "lengths")
        settings["data"]["sources"] = [select(source, "lengths") for source in sources]  # may be those of validation
        dependencies: dict[str, Any] = {
            "secret": secret,
            "format": _FORMAT_VERSION,
            "code": _code_sha256(),
            "libraries": _library_versions(),
            "files": [(str(file), *version) for file, version in files],
            "tokenizer": tokenizer,
            "settings": settings,
        }
        if recipe.data.validation_fraction is not None:
            dependencies["part"] = part
        return cls(folder, hashlib.sha256(json.dumps(dependencies, sort_keys=True).encode()).hexdigest()[:32])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder exclusively; where it cannot be written or locked, every process builds its own index."""
        with ExitStack() as closing:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = closing.enter_context(open(self.folder / "lock", "ab"))
                take_lock(lock.fileno(), wait=True)
            yield

    def load(self, notify: NotifyCallback) -> StoredIndex | None:
        """Return the cached index; None, with a note, if it is broken or media have changed, and if there is none."""
        _, place = self._newest()
        if place is None:
            return None
        try:
            rest = json.loads((place / _REST_FILE).read_text(encoding="utf-8"))
            if not self._is_unchanged(place, rest["sums"], notify):
                return None
            stored = _stored_index(place, rest)
            os.utime(place)  # marks it as recently used
            return stored
        except RemoteReadError:  # of media, which building the index would not read either
            raise
        except Exception as error:  # whatever is wrong with it, the sources are still there
            notify(f"the index cached in {place} is broken ({type(error).__name__}: {error}); building it anew")
            shutil.rmtree(place, ignore_errors=True)
            return None

    def _newest(self) -> tuple[int, Path | None]:
        """Return the number and the folder of the index that was built last; those before may still be in use."""
        names = [folder.name.rpartition("-")[2] for folder in self.folder.glob(f"{self._key}-*")]
        numbers = [int(name) for name in names if name.isdecimal()]
        number = max(numbers, default=0)
        return number, self.folder / f"{self._key}-{number}" if numbers else None

    def _is_unchanged(self, place: Path, sums: Mapping[str, str], notify: NotifyCallback) -> bool:
        """Compare checksums, and media files with those indexed, unless another process has since this one started.

        Returns False if media have changed. Raises ValueError for a file of the index that has.
        """
        checked = place / _CHECKED_FILE
        if checked.exists() and int(checked.read_text(encoding="ascii") or 0) > self._started_ns:
            return True
        started_ns = time.time_ns()
        for name in _SUMMED_FILES:
            if _file_sha256(place / name) != sums[name]:
                raise ValueError(f"{name} is not what was written")
        media = find_changed(load_file(place / _MEDIA_FILE))
        if media.changed:
            notify(
                f"{len(media.changed):,} of {media.num_compared:,} media files have changed since they were indexed, "
                f"the first: {show_path(media.changed[0])}; reading all lengths anew"
            )
            return False
        if media.num_compared < media.num_files:
            notify(
                f"of {media.num_files:,} media files {media.num_compared:,} were looked at, and have not changed since "
                f"they were indexed; the others are remote. To read all lengths anew, remove {place}"
            )
        with suppress(OSError):  # of a folder that this user may only read
            checked.write_text(str(started_ns), encoding="ascii")
        return True

    @contextmanager
    def new_index(self) -> Iterator["NewIndex"]:
        """Make a new index; it is removed afterwards unless `NewIndex.finish` makes it a part of the cache.

        Raises OSError where nothing can be written.
        """
        build_folder = Path(tempfile.mkdtemp(prefix=_BUILD_PREFIX, dir=self.folder))
        try:
            with open(build_folder / _RECORDS_FILE, "wb") as file:
                yield NewIndex(self, build_folder, file)
        finally:
            shutil.rmtree(build_folder, ignore_errors=True)

    def take(self, build_folder: Path, rest: Mapping[str, Any]) -> StoredIndex:
        """Make a folder with an index a part of the cache. rest: what is in its `_REST_FILE`."""
        place = self.folder / f"{self._key}-{self._newest()[0] + 1}"
        try:
            os.rename(build_folder, place)
        except OSError:
            if not place.exists():  # else, where locks do not work, another process was first
                raise
        self._remove_old()
        return _stored_index(place, rest)

    def _remove_old(self) -> None:
        """Remove the least recently used indexes, and what killed processes left behind."""
        folders = [entry for entry in self.folder.iterdir() if entry.is_dir()]
        folders.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        unfinished = [folder for folder in folders if folder.name.startswith(_BUILD_PREFIX)]
        for folder in unfinished + folders[MAX_INDEXES_PER_FOLDER:]:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class IndexContent:
    """What a process that reads sources hands to the one that uses the index, besides records."""

    media: MediaVersions | None
    arrays: dict[str, StoredColumn]
    quarantined: Sequence[Quarantined]
    content_sha256: str
    warnings: tuple[str, ...]

    def rest(self) -> dict[str, Any]:
        """Return as a JSON value what is neither arrays nor versions of media."""
        return {
            "columns": {name: column.facts for name, column in self.arrays.items()},
            "content_sha256": self.content_sha256,
            "quarantined": [asdict(entry) for entry in self.quarantined],
            "warnings": list(self.warnings),
        }


class NewIndex:
    """An index that is written to the disk by one process, and taken by the cache in another one."""

    def __init__(self, cache: IndexCache, folder: Path, records: BinaryIO) -> None:
        """Write to `folder`; `records` is the open file there for them."""
        self._cache, self._folder, self.records = cache, folder, records

    def write(self, content: IndexContent) -> dict[str, Any]:
        """Write all but the records, and return what `finish` needs, as a JSON value."""
        self.records.flush()
        assert content.media is not None, "the index is cached, which needs to know when media change"
        save_file({name: column.stored for name, column in content.arrays.items()}, self._folder / _ARRAYS_FILE)
        save_file(content.media.arrays(), self._folder / _MEDIA_FILE)
        rest = {**content.rest(), "sums": {name: _file_sha256(self._folder / name) for name in _SUMMED_FILES}}
        (self._folder / _REST_FILE).write_text(json.dumps(rest), encoding="utf-8")
        # Other users may read what is beside data that they can read.
        for name in (_ARRAYS_FILE, _MEDIA_FILE):
            (self._folder / name).chmod(0o644)
        self._folder.chmod(0o755)
        return rest

    def finish(self, rest: Mapping[str, Any]) -> StoredIndex:
        """Make it a part of the cache."""
        self.records.close()  # Windows renames no folder in which a file is open
        return self._cache.take(self._folder, rest)


class IndexInMemory:
    """An index that is written to memory that two processes share: of small sources."""

    def __init__(self, records: BinaryIO) -> None:
        """Write to the file `records`, which has no name."""
        self.records = records

    def write(self, content: IndexContent) -> dict[str, Any]:
        """Write all, and return what `finish` needs, as a JSON value."""
        num_bytes = self.records.tell()
        self.records.write(save({name: column.stored for name, column in content.arrays.items()}))
        self.records.flush()
        return {**content.rest(), "num_bytes": num_bytes}

    def finish(self, rest: Mapping[str, Any]) -> StoredIndex:
        """Read what the other process has written."""
        self.records.seek(0)
        records = self.records.read(rest["num_bytes"])
        facts = {name: ColumnFacts(*of_column) for name, of_column in rest["columns"].items()}
        arrays = {name: StoredColumn(rows, None, facts[name]) for name, rows in load(self.records.read()).items()}
        quarantined = tuple(Quarantined(**entry) for entry in rest["quarantined"])
        table = SampleTable(records, arrays["ends"])
        return StoredIndex(table, arrays, quarantined, rest["content_sha256"], tuple(rest["warnings"]))


@contextmanager
def index_in_memory() -> Iterator[IndexInMemory]:
    """Make a new index in memory."""
    with open(open_memory_file(), "w+b") as file:
        yield IndexInMemory(file)


def _stored_index(place: Path, rest: Mapping[str, Any]) -> StoredIndex:
    """Map the index in a folder."""
    arrays = _map_columns(place / _ARRAYS_FILE, rest["columns"])
    table = SampleTable(place / _RECORDS_FILE, arrays["ends"])
    quarantined = tuple(Quarantined(**entry) for entry in rest["quarantined"])
    return StoredIndex(table, arrays, quarantined, rest["content_sha256"], tuple(rest["warnings"]), place)


def _file_version(file: SourcePath) -> tuple[int, *tuple[int | str, ...]]:
    """Return the size of a file, and what changes with its content."""
    if isinstance(file, RemotePath):
        return location_version(str(file))
    status = file.stat()
    # The time of change too: unpacking an archive may give new content an old time of modification.
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _map_columns(path: Path, facts: Mapping[str, Sequence[Any]]) -> dict[str, StoredColumn]:
    """Map the arrays of a safetensors file, each with what is known of all its rows."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    columns = {}
    for name, of_column in facts.items():
        start, end = header[name]["data_offsets"]
        dtype = _DTYPES[header[name]["dtype"]]
        place = FilePlace(path, 8 + header_bytes + start, dtype.str, (end - start) // dtype.itemsize)
        columns[name] = StoredColumn.mapped(place, ColumnFacts(*of_column))
    return columns


def _file_sha256(path: Path) -> str:
    """Hash a file: its size and all of it; of one above 1 GiB, `SUMMED_BLOCKS` blocks that are evenly spaced.

    The records of a billion samples are 300 GB, which no start should have to read.
    """
    num_bytes = path.stat().st_size
    num_blocks = -(-num_bytes // SUMMED_BLOCK_BYTES)
    digest = hashlib.sha256(str(num_bytes).encode())
    with path.open("rb") as file:
        for number in range(min(num_blocks, SUMMED_BLOCKS)):
            block = number if num_blocks <= SUMMED_BLOCKS else number * (num_blocks - 1) // (SUMMED_BLOCKS - 1)
            file.seek(block * SUMMED_BLOCK_BYTES)
            digest.update(file.read(SUMMED_BLOCK_BYTES))
    return digest.hexdigest()


def _user_secret() -> str:
    """Return random text that only this user can read, made once; empty where the user has no place to keep it."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmtrain" / "secret"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # readable by its owner alone
                file.write(os.urandom(_SECRET_BYTES).hex())
                file.flush()
                with suppress(FileExistsError):  # another process was first, and its secret counts
                    os.link(file.name, path)
        return path.read_text(encoding="ascii")
    except (OSError, RuntimeError):  # no home folder, or none that can be written
        return ""


@cache
def _library_versions() -> dict[str, str]:
    """Return the versions of those `_LIBRARIES` that are installed."""
    versions = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


@cache
def _code_sha256() -> str:
    """Hash the source of the packages `data` and `families`: any change of it may change the lengths that are read."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted([*(root / "data").rglob("*.py"), *(root / "families").rglob("*.py")]):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
