"""Notice media files that have changed since an index was built: compare their sizes and times.

This is one call of `stat` for each file (5 s for a million on one core, 2026-11-27), in threads where a file server
answers.
"""

import os
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.media.media_bytes import FileMedia, Media
from mmtrain.recipe.source_path import is_url

STAT_THREADS = 16  # that wait for a file server
_TASK_FILES = 4096
_PATHS = "paths"
_VERSIONS = "versions"
_MISSING = (0, 0, 0)

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
MediaArrays = dict[str, npt.NDArray[np.generic]]


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


class MediaVersions:
    """The size and the times of each media file of this machine that an index depends on."""

    def __init__(self) -> None:
        """Start without files."""
        self._paths: dict[str, None] = {}
        self._numbers = array("q")  # those of each path
        self._adding = threading.Lock()

    def record(self, media: Media) -> None:
        """Look at the file of a medium before it is read; threads may share this object."""
        if not isinstance(media, FileMedia) or is_url(media.path) or media.path in self._paths:
            return
        version = _version(media.path)
        with self._adding:
            if media.path not in self._paths:
                self._paths[media.path] = None
                self._numbers.extend(version)

    def arrays(self) -> MediaArrays:
        """Return paths and versions as arrays for a file."""
        paths = "\0".join(self._paths).encode("utf-8", "surrogatepass")
        versions = np.array(self._numbers, dtype=np.int64).reshape(-1, len(_MISSING))
        return {_PATHS: np.frombuffer(paths, dtype=np.uint8), _VERSIONS: versions}


def find_changed(arrays: MediaArrays) -> tuple[int, list[str]]:
    """Return how many files `MediaVersions.arrays` hold, and those that have changed, come or gone since."""
    versions = arrays[_VERSIONS]
    text = arrays[_PATHS].tobytes().decode("utf-8", "surrogatepass")
    paths = text.split("\0") if len(versions) else []
    if len(paths) != len(versions):
        raise ValueError(f"{len(paths)} paths of media, but {len(versions)} versions")
    tasks = [paths[start : start + _TASK_FILES] for start in range(0, len(paths), _TASK_FILES)]
    with ThreadPoolExecutor(STAT_THREADS) as pool:
        found = run_tasks(pool, _versions_of, tasks)
    today: IntArray = np.array(list(chain.from_iterable(found)), dtype=np.int64).reshape(-1, len(_MISSING))
    changed = np.flatnonzero((today != versions).any(axis=1)).tolist()
    return len(paths), [paths[number] for number in changed]


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
