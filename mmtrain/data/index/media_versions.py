"""Notice media files that have changed since an index was built: compare their sizes and times.

Each file of this machine takes one call of `stat` (5 s for a million on one core, 2026-11-27), in threads where a file
server answers. Remote files take few requests. A folder of many media is listed where its protocol states versions in
listings (object stores; HTTP does not). Each of the other media is asked for, and each that looks changed, or
`MAX_REQUESTS` of them, evenly spaced, if there are more.
"""

import os
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.media.media_bytes import FileMedia, Media
from mmtrain.data.remote.locations import folder_versions, remote_store
from mmtrain.data.remote.remote_files import FileVersion
from mmtrain.errors import RemoteReadError
from mmtrain.recipe.settings.source_path import is_url

STAT_THREADS = 16  # that wait for a file server
_TASK_FILES = 4096
_PATHS = "paths"
_VERSIONS = "versions"
_URLS, _TAGS, _SIZES = "urls", "tags", "sizes"  # of remote files
_NO_FILE = -1  # in place of a size
_MISSING = (0, 0, 0)

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
MediaArrays = dict[str, npt.NDArray[np.generic]]
MAX_REQUESTS = 1000  # some seconds by REQUEST_THREADS, at 50 ms each
REQUEST_THREADS = 16
_MIN_LISTED = 32  # media of a folder: for fewer, listing what may be a large folder is dearer

Versions = Mapping[str, FileVersion | None]  # by URL; None: there is no such file


def run_tasks(
    pool: ThreadPoolExecutor, run: Callable[[_Task], _Result], tasks: Sequence[_Task], may_wait: bool = True
) -> list[_Result]:
    """Run tasks in this thread while they compute, in those of `pool` once one has waited, as for a file server.

    Threads that do not wait would only compete for the interpreter's lock. may_wait: whether threads help at all.
    """
    results: list[_Result] = []
    waits = False
    while len(results) < len(tasks) and not waits:
        started_s = time.perf_counter()
        started_cpu_s = time.thread_time()
        results.append(run(tasks[len(results)]))
        elapsed_s = time.perf_counter() - started_s
        cpu_s = time.thread_time() - started_cpu_s
        waits = may_wait and elapsed_s > 2 * cpu_s
    return [*results, *pool.map(run, tasks[len(results) :])]


@dataclass(frozen=True)
class MediaChanges:
    """What became of the media files that an index depends on."""

    num_files: int
    num_compared: int  # a sample of the remote ones, if there are many
    changed: tuple[str, ...]


class MediaVersions:
    """The size and the times of each media file that an index depends on; of a remote one, size and tag."""

    def __init__(self) -> None:
        """Start without files."""
        self._paths: dict[str, None] = {}
        self._numbers = array("q")  # those of each path
        self._remote: dict[str, FileVersion | None] = {}
        self._adding = threading.Lock()

    def record(self, media: Media) -> None:
        """Look at the file of a medium before it is read; threads may share this object.

        Raises `RemoteReadError` for a server that does not answer.
        """
        if not isinstance(media, FileMedia) or media.path in self._paths or media.path in self._remote:
            return
        if is_url(media.path):
            remote = remote_version(media.path)  # which reading asks for anyway
            with self._adding:
                self._remote.setdefault(media.path, remote)
            return
        version = _version(media.path)
        with self._adding:
            if media.path not in self._paths:
                self._paths[media.path] = None
                self._numbers.extend(version)

    def arrays(self) -> MediaArrays:
        """Return paths and versions as arrays for a file."""
        versions = np.array(self._numbers, dtype=np.int64).reshape(-1, len(_MISSING))
        sizes = [_NO_FILE if version is None else version.num_bytes for version in self._remote.values()]
        tags = ["" if version is None else version.tag for version in self._remote.values()]
        return {
            _PATHS: _joined(self._paths),
            _VERSIONS: versions,
            _URLS: _joined(self._remote),
            _TAGS: _joined(tags),
            _SIZES: np.array(sizes, dtype=np.int64),
        }


def find_changed(arrays: MediaArrays) -> MediaChanges:
    """Return which of the files that `MediaVersions.arrays` hold have changed, come or gone since.

    Raises `RemoteReadError` for a server that does not answer.
    """
    versions = arrays[_VERSIONS]
    paths = _split(arrays[_PATHS], len(versions))
    tasks = [paths[start : start + _TASK_FILES] for start in range(0, len(paths), _TASK_FILES)]
    with ThreadPoolExecutor(STAT_THREADS) as pool:
        found = run_tasks(pool, _versions_of, tasks)
    today: IntArray = np.array(list(chain.from_iterable(found)), dtype=np.int64).reshape(-1, len(_MISSING))
    changed = [paths[number] for number in np.flatnonzero((today != versions).any(axis=1))]
    sizes = arrays[_SIZES].tolist()
    tags = _split(arrays[_TAGS], len(sizes))
    remote = {
        url: None if size == _NO_FILE else FileVersion(size, tag)
        for url, size, tag in zip(_split(arrays[_URLS], len(sizes)), sizes, tags, strict=True)
    }
    num_remote, changed_remote = find_changed_remote(remote) if remote else (0, [])
    return MediaChanges(len(paths) + len(remote), len(paths) + num_remote, (*changed, *changed_remote))


def _joined(texts: Iterable[str]) -> npt.NDArray[np.uint8]:
    return np.frombuffer("\0".join(texts).encode("utf-8", "surrogatepass"), dtype=np.uint8)


def _split(joined: npt.NDArray[np.generic], count: int) -> list[str]:
    """Return the texts that were joined. Raises ValueError if these are not `count`."""
    texts = joined.tobytes().decode("utf-8", "surrogatepass").split("\0") if count else []
    if len(texts) != count:
        raise ValueError(f"{len(texts)} names of media, but {count} versions")
    return texts


def _versions_of(paths: Sequence[str]) -> list[tuple[int, int, int]]:
    return [_version(path) for path in paths]


def _version(path: str) -> tuple[int, int, int]:
    """Return what changes with the content of a file; a link has that of the file it leads to."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return _MISSING
    # The time of change too: unpacking an archive may give new content an old time of modification.
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def remote_version(url: str) -> FileVersion | None:
    """Return the version of a file; None if there is none. Raises `RemoteReadError`."""
    try:
        return remote_store().version(url)
    except FileNotFoundError:
        return None


def find_changed_remote(indexed: Versions) -> tuple[int, list[str]]:
    """Return how many files were looked at, and those that have changed, come or gone since they were indexed.

    Raises `RemoteReadError` for servers that do not answer.
    """
    with ThreadPoolExecutor(REQUEST_THREADS) as pool:
        listed = _listed(pool, list(indexed))
        # A listing may state versions in another form than the answer for a file, which decides.
        like = {url for url, version in listed.items() if not _are_unlike(indexed[url], version)}
        asked = [url for url in indexed if url not in like]
        if len(asked) > MAX_REQUESTS:
            asked = [asked[number * len(asked) // MAX_REQUESTS] for number in range(MAX_REQUESTS)]
        changed = [
            url
            for url, version in zip(asked, pool.map(remote_version, asked), strict=True)
            if _are_unlike(indexed[url], version)
        ]
    return len(like) + len(asked), changed


def _listed(pool: ThreadPoolExecutor, urls: Sequence[str]) -> dict[str, FileVersion | None]:
    """Return the versions of media in folders that can be listed and from which many media are needed."""
    by_folder: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        by_folder[url.rpartition("/")[0]].append(url)
    folders = [folder for folder, of_folder in by_folder.items() if len(of_folder) >= _MIN_LISTED]
    versions: dict[str, FileVersion | None] = {}
    for folder, found in zip(folders, pool.map(_list_folder, folders), strict=True):
        if found is not None:
            versions |= {url: found.get(url) for url in by_folder[folder]}
    return versions


def _list_folder(folder: str) -> Mapping[str, FileVersion] | None:
    """Return the versions of the files in a folder; None if they are not listed in time, or without versions."""
    try:
        return folder_versions(folder)
    except (FileNotFoundError, RemoteReadError):
        return None  # its files are asked for one by one


def _are_unlike(indexed: FileVersion | None, today: FileVersion | None) -> bool:
    if indexed is None or today is None:
        return indexed is not today
    has_tags = bool(indexed.tag and today.tag)
    return indexed.num_bytes != today.num_bytes or (has_tags and indexed.tag != today.tag)
