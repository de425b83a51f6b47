"""An index kept on disk: read again while nothing that it depends on has changed, built anew when in doubt.

    .mmtrain-index/<key>/         <key>: SHA-256 over what lengths depend on
        samples.bin               records of the usable samples, see `table`
        arrays.safetensors        where records end, and all lengths
        rest.json                 format, what was set aside, sums of the two files above

A folder appears whole, by renaming, and does not change afterwards. Beside the data its name also depends on a secret
of the user: data sets come from elsewhere, and an index that came with one could name any file of this machine.

Media are not among what the key covers (looking at a million files is what a cache saves): who replaces pictures under
the same names touches the data file, or removes the folder.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors.numpy import load_file, save_file

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.formats.read_source import list_shards
from mmtrain.data.formats.sample import Quarantined
from mmtrain.data.index.sample_table import SampleTable
from mmtrain.errors import DataError
from mmtrain.recipe.schema import Recipe, SourceSettings
from mmtrain.recipe.settings import select

INDEX_FOLDER_NAME = ".mmtrain-index"
MIN_SOURCE_BYTES = 1 << 20  # smaller sources are read in no time
MAX_INDEXES_PER_FOLDER = 4  # indexes in one folder; the ones used longest ago go
_FORMAT = 2
_LIBRARIES = ("Pillow", "tokenizers", "soundfile", "av", "pyarrow")
_RECORDS, _ARRAYS, _REST = "samples.bin", "arrays.safetensors", "rest.json"


@dataclass(frozen=True)
class StoredIndex:
    """What reading the sources found, before weights and encoders give it its final form."""

    samples: SampleTable
    arrays: dict[str, IntArray]
    quarantined: tuple[Quarantined, ...]
    content_sha256: str


class IndexCache:
    """The place of one index.

    Use it inside `held`, so that of all processes of a machine one builds and the others read.
    """

    def __init__(self, folder: Path, key: str) -> None:
        """Keep it as `folder`/`key`."""
        self.folder, self._place = folder, folder / key
        self._made: Path | None = None

    @classmethod
    def of(cls, recipe: Recipe, sources: Sequence[SourceSettings]) -> "IndexCache | None":
        """The place for a recipe's index; None for small sources."""
        try:
            files = [(file, file.stat()) for source in sources for file in list_shards(source.path)]
            tokenizer = recipe.data.tokenizer_file.read_bytes()
        except (OSError, DataError):  # reading them will say what is wrong
            return None
        if sum(status.st_size for _, status in files) < MIN_SOURCE_BYTES:
            return None
        folder, secret = recipe.data.index_cache, ""
        if folder is None:
            folder, secret = files[0][0].parent / INDEX_FOLDER_NAME, _secret()
            if not secret:
                return None
        settings = select(recipe, "lengths")
        settings["data"]["sources"] = [select(source, "lengths") for source in sources]  # may be those of validation
        facts = {
            "secret": secret,
            "format": _FORMAT,
            "code": _code_sha256(),
            "libraries": _versions(),
            # Unpacking may give new content an old time, but never an old time of the change.
            "files": [(str(file), s.st_size, s.st_mtime_ns, s.st_ctime_ns) for file, s in files],
            "tokenizer": hashlib.sha256(tokenizer).hexdigest(),
            "settings": settings,
        }
        return cls(folder, hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the place alone; where nothing can be written or locked, everybody builds for himself."""
        with ExitStack() as closing:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = closing.enter_context(open(self.folder / "lock", "ab"))
                fcntl.flock(lock, fcntl.LOCK_EX)  # given back by closing, or by the end of the process
            yield

    def load(self, notify: Callable[[str], None]) -> StoredIndex | None:
        """The index kept here; None if there is none, or a broken one, which is removed and told about."""
        if not self._place.exists():
            return None
        try:
            rest = json.loads((self._place / _REST).read_text(encoding="utf-8"))
            for name in (_RECORDS, _ARRAYS):
                if _sum(self._place / name) != rest["sums"][name]:
                    raise ValueError(f"{name} is not what was written")
            arrays = {name: array.astype(np.int64) for name, array in load_file(self._place / _ARRAYS).items()}
            table = SampleTable(self._place / _RECORDS, arrays["ends"])
            quarantined = tuple(Quarantined(**entry) for entry in rest["quarantined"])
            os.utime(self._place)
            return StoredIndex(table, arrays, quarantined, rest["content_sha256"])
        except Exception as error:  # whatever is wrong with it, the sources are still there
            notify(f"the index kept in {self._place} is broken ({type(error).__name__}: {error}); building it anew")
            shutil.rmtree(self._place, ignore_errors=True)
            return None

    @contextmanager
    def records(self) -> Iterator[BinaryIO]:
        """A new file for the records; what `store` does not make part of the index is gone afterwards.

        Raises OSError where nothing can be written.
        """
        self._made = Path(tempfile.mkdtemp(prefix="making-", dir=self.folder))
        try:
            with open(self._made / _RECORDS, "wb") as file:
                yield file
        finally:
            shutil.rmtree(self._made, ignore_errors=True)

    def store(
        self, records: BinaryIO, arrays: dict[str, IntArray], quarantined: Sequence[Quarantined], content_sha256: str
    ) -> StoredIndex:
        """Keep an index whose records are in the file that `records` opened."""
        assert self._made is not None, "store is called while the file of `records` is open"
        records.flush()
        save_file({name: _narrow(array) for name, array in arrays.items()}, self._made / _ARRAYS)
        sums = {name: _sum(self._made / name) for name in (_RECORDS, _ARRAYS)}
        rest: dict[str, Any] = {"sums": sums, "content_sha256": content_sha256}
        rest["quarantined"] = [asdict(entry) for entry in quarantined]
        (self._made / _REST).write_text(json.dumps(rest), encoding="utf-8")
        for path, mode in ((self._made / _ARRAYS, 0o644), (self._made, 0o755)):
            path.chmod(mode)  # others may read what lies beside data that they read
        try:
            os.rename(self._made, self._place)
        except OSError:
            if not self._place.exists():  # else, without locks, another process was first
                raise
        self._forget()
        return StoredIndex(
            SampleTable(self._place / _RECORDS, arrays["ends"]), arrays, tuple(quarantined), content_sha256
        )

    def _forget(self) -> None:
        """Remove the indexes that were used longest ago, and what a killed process left behind."""
        kept = [entry for entry in self.folder.iterdir() if entry.is_dir()]
        kept.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
        for entry in [e for e in kept if e.name.startswith("making-")] + kept[MAX_INDEXES_PER_FOLDER:]:
            shutil.rmtree(entry, ignore_errors=True)


def _narrow(array: IntArray) -> "np.ndarray[Any, Any]":
    """The same numbers in half the bytes, where they fit."""
    return array.astype(np.int32) if not len(array) or array.max() < 2**31 else array


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _secret() -> str:
    """Sixteen bytes that only this user knows, made once; none where nothing of the user's can be kept."""
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmtrain" / "secret"
    try:
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=place.parent) as file:  # readable by its owner alone
                file.write(os.urandom(16).hex())
                file.flush()
                with suppress(FileExistsError):  # another process was first, and its secret is the one
                    os.link(file.name, place)
        return place.read_text(encoding="ascii")
    except (OSError, RuntimeError):  # no home, or none to write to
        return ""


@cache
def _versions() -> dict[str, str]:
    """Of the libraries that read headers and split texts, those that are there."""
    found = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@cache
def _code_sha256() -> str:
    """Hash the source of the whole `data` package: any change of it may change the lengths that are read."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()
