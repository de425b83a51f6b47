"""Notice remote media files that have changed since an index was built, with few requests.

A folder of many media is listed where its protocol states versions in listings (object stores; HTTP does not). Each of
the other media is asked for, and each that looks changed, or `MAX_REQUESTS` of them, evenly spaced, if there are more.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from mmtrain.data.remote.locations import folder_versions, remote_store
from mmtrain.data.remote.remote_files import FileVersion
from mmtrain.errors import RemoteReadError

MAX_REQUESTS = 1000  # some seconds by REQUEST_THREADS, at 50 ms each
REQUEST_THREADS = 16
_MIN_LISTED = 32  # media of a folder: for fewer, listing what may be a large folder is dearer

Versions = Mapping[str, FileVersion | None]  # by URL; None: there is no such file


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
    """Return the versions of the media in folders that can be listed, and of which many are needed."""
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
