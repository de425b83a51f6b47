"""Open a location: the path of a file of this machine, or the URL of a remote one.

A remote file is read in blocks of 1 MiB, which are cached on disk; several that follow each other are fetched with one
request. A process asks for the version of a file once, and from then on the file must not change. The environment says
where the cache is and how long to wait, because machines differ.
"""

import fnmatch
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from mmtrain.data.remote.block_cache import BlockCache
from mmtrain.data.remote.remote_files import FileVersion, RemoteFiles, allow_redirects
from mmtrain.errors import DataError
from mmtrain.recipe.settings.data_settings import DataSettings
from mmtrain.recipe.settings.source_path import is_url

CACHE_FOLDER_VARIABLE = "MMTRAIN_REMOTE_CACHE"
CACHE_SIZE_VARIABLE = "MMTRAIN_REMOTE_CACHE_GIB"
TIMEOUT_VARIABLE = "MMTRAIN_REMOTE_TIMEOUT_S"
ATTEMPTS_VARIABLE = "MMTRAIN_REMOTE_ATTEMPTS"
DEFAULT_CACHE_GIB = 50.0
DEFAULT_TIMEOUT_S = 60.0
DEFAULT_ATTEMPTS = 6
BLOCK_BYTES = 1 << 20
MAX_BLOCKS_PER_REQUEST = 16  # of files that are read from end to end
_MAX_KNOWN_VERSIONS = 200_000  # some 60 MiB
_READ_BUFFER_BYTES = 1 << 16

Version = tuple[int, int | str]  # size of a file, and its time of change or the server's tag


@dataclass(frozen=True)
class RemoteSettings:
    """Where pieces of remote files are kept, and how patient reading is."""

    cache_folder: Path
    cache_bytes: int
    timeout_s: float = DEFAULT_TIMEOUT_S  # of one request, which is for at most 16 MiB
    attempts: int = DEFAULT_ATTEMPTS

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "RemoteSettings":
        """Read the variables `MMTRAIN_REMOTE_*`. Raises `DataError` for values that are no positive numbers."""
        home = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return cls(
            Path(environment.get(CACHE_FOLDER_VARIABLE) or Path(home) / "mmtrain" / "remote"),
            int(_positive(environment, CACHE_SIZE_VARIABLE, DEFAULT_CACHE_GIB) * 2**30),
            _positive(environment, TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S),
            max(1, int(_positive(environment, ATTEMPTS_VARIABLE, DEFAULT_ATTEMPTS))),
        )


def remote_index_folder() -> Path:
    """Return where indexes of remote files are cached. Raises `DataError` as `RemoteSettings.from_environment`."""
    return RemoteSettings.from_environment().cache_folder / "indexes"


def _positive(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise DataError(f"environment variable {name}: found {text!r}, allowed: a number above 0")
    return value


class RemoteStore:
    """Remote files through the cache of this machine."""

    def __init__(self, files: RemoteFiles, cache: BlockCache) -> None:
        """Fetch with `files` what is not in `cache`."""
        self.files = files
        self._cache = cache
        self._versions: OrderedDict[str, FileVersion] = OrderedDict()
        self._changing_versions = threading.Lock()

    def version(self, url: str) -> FileVersion:
        """Return the version of a file that this process saw first. Raises `FileNotFoundError`, `RemoteReadError`."""
        known = self._versions.get(url)
        if known is None:
            known = self.files.version(url)
            self.pin({url: known})
        return known

    def known_versions(self) -> dict[str, FileVersion]:
        """Return the versions of the files that this process has seen, for another process to `pin`."""
        with self._changing_versions:
            return dict(self._versions)

    def pin(self, versions: Mapping[str, FileVersion]) -> None:
        """Expect these versions from now on."""
        with self._changing_versions:
            for url, version in versions.items():
                self._versions.setdefault(url, version)
            while len(self._versions) > _MAX_KNOWN_VERSIONS:
                self._versions.popitem(last=False)

    def blocks(self, url: str, first: int, count: int) -> list[bytes]:
        """Return blocks that follow each other, from the first one to at most `count`, cached or fetched.

        Fetches up to the next one that is cached.
        """
        version = self.version(url)
        cached = self._load(url, version, first)
        if cached is not None:
            return [cached]
        with self._cache.fetching(url, version, first):
            cached = self._load(url, version, first)  # perhaps another process has fetched it
            return [cached] if cached is not None else self._fetch(url, version, first, count)

    def _load(self, url: str, version: FileVersion, number: int) -> bytes | None:
        return self._cache.load(url, version, number, _block_size(version, number))

    def _fetch(self, url: str, version: FileVersion, first: int, count: int) -> list[bytes]:
        stop = min((first + count) * BLOCK_BYTES, version.num_bytes)
        start, content = self.files.read(url, first * BLOCK_BYTES, stop, version)
        blocks = [content[i : i + BLOCK_BYTES] for i in range(0, len(content), BLOCK_BYTES)]
        first_fetched = start // BLOCK_BYTES
        for number, block in enumerate(blocks, first_fetched):
            self._cache.store(url, version, number, block)
        return blocks[first - first_fetched :][:count]


def _block_size(version: FileVersion, number: int) -> int:
    return min(BLOCK_BYTES, version.num_bytes - number * BLOCK_BYTES)


class SeekableReader(io.RawIOBase):
    """What readers of a known number of bytes share: all but the reading."""

    def __init__(self, num_bytes: int) -> None:
        """Start at the first byte."""
        self._num_bytes = num_bytes
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte; the end may be passed. Raises OSError for one before the first."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        if start + offset < 0:
            raise OSError(f"seek to {start + offset}")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        """Return the number of the next byte."""
        return self._position


class _RemoteReader(SeekableReader):
    """A remote file, read block by block."""

    def __init__(self, store: RemoteStore, url: str) -> None:
        super().__init__(store.version(url).num_bytes)
        self.name = url
        self._store = store
        self._first_block = 0  # of those in memory
        self._blocks: list[bytes] = []
        self._next_count = 1  # blocks of the next request, if reading goes on where it was

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        number, start = divmod(self._position, BLOCK_BYTES)
        if self._position >= self._num_bytes:
            return 0
        if not self._first_block <= number < self._first_block + len(self._blocks):
            goes_on = bool(self._blocks) and number == self._first_block + len(self._blocks)
            self._next_count = min(2 * self._next_count, MAX_BLOCKS_PER_REQUEST) if goes_on else 1
            self._blocks = []  # before others are in memory
            self._blocks = self._store.blocks(self.name, number, self._next_count)
            self._first_block = number
        piece = self._blocks[number - self._first_block][start : start + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


@lru_cache(maxsize=1)
def remote_store() -> RemoteStore:
    """Return the store of this process, as the environment says. Raises `DataError` where nothing can be cached."""
    settings = RemoteSettings.from_environment()
    files = RemoteFiles(settings.timeout_s, settings.attempts)
    return RemoteStore(files, BlockCache(settings.cache_folder, settings.cache_bytes))


def trust_hosts(data: DataSettings) -> None:
    """Let servers redirect to the hosts that a recipe names: those of its sources, and `data.limits.redirect_hosts`."""
    places = [urlsplit(str(source.path)) for source in (*data.sources, *data.validation)]
    hosts = [place.hostname for place in places if place.scheme in ("http", "https") and place.hostname]
    allow_redirects([*data.limits.redirect_hosts, *hosts])


def open_location(location: str) -> BinaryIO:
    """Open a file of this machine or a remote one for reading. Raises OSError, and `RemoteReadError` for servers."""
    if not is_url(location):
        return open(location, "rb")
    return io.BufferedReader(_RemoteReader(remote_store(), location), _READ_BUFFER_BYTES)


def location_version(location: str) -> Version:
    """Return what changes when a file does. Raises OSError, and `RemoteReadError` for servers."""
    if is_url(location):
        version = remote_store().version(location)
        return version.num_bytes, version.tag
    status = os.stat(location)
    return status.st_size, status.st_mtime_ns


def matching_urls(pattern: str) -> list[str]:
    """Return the URLs that a pattern with `*` or `[` in its last name matches, in order; no hidden ones, as in a shell.

    Raises `FileNotFoundError` and `RemoteReadError`.
    """
    folder, _, name = pattern.rpartition("/")
    urls = remote_store().files.list_files(f"{folder}/")
    names = [(url, url.rpartition("/")[2]) for url in urls]
    shown = [(url, last) for url, last in names if name.startswith(".") or not last.startswith(".")]
    return [url for url, last in shown if fnmatch.fnmatchcase(last, name)]


def files_below(folder: str) -> list[str]:
    """Return the URLs of all files in a folder and its folders, in order.

    Raises `FileNotFoundError` and `RemoteReadError`.
    """
    return remote_store().files.find_files(folder)


def folder_versions(folder: str) -> dict[str, FileVersion] | None:
    """Return the versions of the files in a remote folder, by URL; None if its server lists no versions.

    Raises `FileNotFoundError` and, after a single attempt, `RemoteReadError`.
    """
    return replace(remote_store().files, attempts=1).list_versions(f"{folder}/")


def known_versions() -> dict[str, FileVersion]:
    """Return the versions of the remote files that this process has seen, for its workers to `pin_versions`."""
    return remote_store().known_versions() if remote_store.cache_info().currsize else {}


def pin_versions(versions: Mapping[str, FileVersion]) -> None:
    """Expect the versions of remote files that another process has seen."""
    if versions:
        remote_store().pin(versions)
