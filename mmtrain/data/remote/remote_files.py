"""Ask servers for remote files through `fsspec`: what a file is, and ranges of its bytes.

Requests that fail for a reason that may pass (no connection, a time-out, a server error, an answer that is too short)
are repeated after growing pauses. Every answer is checked against the version of the file that was seen first.
"""

import asyncio
import fnmatch
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from mmtrain.data.optional_packages import check_package_fits, require_package
from mmtrain.errors import DataError, RemoteReadError, StorageAwayError

FIRST_PAUSE_S = 0.5  # before the second attempt; each later one is twice as long, up to half as much again by chance
MAX_WHOLE_FILE_BYTES = 256 << 20  # of a file on a server that answers no ranges, which is held in memory
_VERSION_KEYS = (
    *("ETag", "etag", "generation", "VersionId", "blob_id", "sha256", "md5Hash", "Content-MD5"),
    *("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "created"),
)
_HTTP = ("http", "https")
_MISSING = (404, 410)
_DENIED = (401, 403, 407)
_CHANGED = (412, 416)
_PASSING = (408, 425, 429)  # of the client errors, those that another attempt may mend
_PACKAGE_BY_PROTOCOL = {
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    "hf": "huggingface_hub",
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "adlfs"),
}

# Headers that another host needs, too. All others may hold credentials.
_PUBLIC_HEADERS = ("accept", "accept-encoding", "host", "if-match", "range", "user-agent")

T = TypeVar("T")
_redirect_hosts: set[str] = set()  # that the recipes of this process name, in lower case


class _PassingError(Exception):
    """A failure that another attempt may mend."""


@dataclass(frozen=True)
class FileVersion:
    """What is compared to notice that a remote file has changed."""

    num_bytes: int
    tag: str  # ETag, generation or time of change, as the server states it; empty if it states none


def allow_redirects(hosts: Iterable[str]) -> None:
    """Let servers redirect to these hosts from now on; `*.` in front of one means all below it."""
    _redirect_hosts.update(host.lower() for host in hosts)


def redirect_hosts() -> frozenset[str]:
    """Return the hosts that servers may redirect to, for another process to `allow_redirects`."""
    return frozenset(_redirect_hosts)


@dataclass(frozen=True)
class RemoteFiles:
    """Requests to all servers, each repeated up to `attempts` times."""

    timeout_s: float
    attempts: int
    sleep: Callable[[float], None] = time.sleep

    def version(self, url: str) -> FileVersion:
        """Ask for size and version of a file. Raises `FileNotFoundError` and `RemoteReadError`."""
        info = self.repeat(url, lambda files: _call(files, "info", self.timeout_s, _path(files, url)))
        return _version(url, info)

    def read(self, url: str, start: int, stop: int, version: FileVersion) -> tuple[int, bytes]:
        """Read the bytes [start, stop) of a file that must still be of this version.

        Returns where the bytes start and them: of a server without ranges, the whole file. Raises `FileNotFoundError`
        and `RemoteReadError`.
        """
        if url.partition("://")[0].lower() in _HTTP:
            return self.repeat(url, lambda files: self._read_http(files, url, start, stop, version))
        return self.repeat(url, lambda files: self._read_any(files, url, start, stop, version))

    def list_files(self, url: str) -> list[str]:
        """Return the URLs of the files in a folder. Raises `FileNotFoundError` and `RemoteReadError`."""
        entries = self.repeat(url, lambda files: _call(files, "ls", self.timeout_s, _path(files, url), detail=True))
        return _urls(url, [str(entry["name"]) for entry in entries if entry["type"] == "file"])

    def find_files(self, url: str) -> list[str]:
        """Return the URLs of the files in a folder and its folders. Raises as `list_files`."""
        found = self.repeat(url, lambda files: _call(files, "find", self.timeout_s, _path(files, url)))
        return _urls(url, list(found))

    def list_versions(self, url: str) -> dict[str, FileVersion] | None:
        """Return the versions of the files in a folder, by URL; None if the listing does not state them.

        Raises `FileNotFoundError` and `RemoteReadError`.
        """
        if url.partition("://")[0].lower() in _HTTP:
            return None
        entries = self.repeat(url, lambda files: _list_anew(files, url, self.timeout_s))
        of_files = [entry for entry in entries if entry["type"] == "file" and entry.get("size") is not None]
        versions = {_urls(url, [str(entry["name"])])[0]: _version(url, entry) for entry in of_files}
        return versions if all(version.tag for version in versions.values()) else None

    def _read_http(self, files: Any, url: str, start: int, stop: int, version: FileVersion) -> tuple[int, bytes]:
        from fsspec.asyn import sync

        first, content = sync(files.loop, _get_range, files, url, (start, stop), version, timeout=self.timeout_s)
        return int(first), bytes(content)

    def _read_any(self, files: Any, url: str, start: int, stop: int, version: FileVersion) -> tuple[int, bytes]:
        path = _path(files, url)
        options = {} if files.async_impl else {"cache_type": "none"}  # or they read 5 MiB ahead for every range
        content = bytes(_call(files, "cat_file", self.timeout_s, path, start=start, end=stop, **options))
        files.invalidate_cache()  # or a listing from before would answer
        _check_unchanged(url, version, _version(url, _call(files, "info", self.timeout_s, path)))
        if len(content) != stop - start:
            raise _PassingError(f"{len(content)} bytes in place of {stop - start}")
        return start, content

    def repeat(self, url: str, request: Callable[[Any], T]) -> T:
        """Return what a request to the file system of `url` answers, after several attempts if need be.

        Raises `FileNotFoundError` and `RemoteReadError`.
        """
        pause_s = FIRST_PAUSE_S
        for attempt in range(self.attempts):
            if attempt:
                self.sleep(pause_s * random.uniform(1.0, 1.5))
                pause_s *= 2
            try:
                return request(_file_system(url))
            except (RemoteReadError, DataError):
                raise
            except Exception as error:  # protocols have their own types
                for cause in _causes(error):
                    if isinstance(cause, RemoteReadError):
                        raise cause from None
                check_package_fits(error, "fsspec")
                reason = _passing_reason(url, error)
        raise StorageAwayError(
            f"{url}: cannot be reached after {self.attempts} attempts: {reason}; check network and server, then start "
            "again (a run resumes from its last checkpoint)"
        )


def _file_system(url: str) -> Any:
    """Return the file system of a URL's protocol; `fsspec` keeps one for each protocol and process."""
    protocol = url.partition("://")[0].lower()
    fsspec = require_package("fsspec", "remote", f"{url}: reading remote files")
    package = _PACKAGE_BY_PROTOCOL.get(protocol)
    try:
        options = {"get_client": _guarded_client} if protocol in _HTTP else {}
        return fsspec.filesystem(protocol, **options)
    except ImportError as error:
        install = "'mmtrain[remote]'" if protocol in _HTTP else package
        needed = f"the `{package}` package, which is not installed here: pip install {install}" if package else error
        raise DataError(f"{url}: the protocol {protocol} needs {needed}") from None
    except ValueError:
        raise DataError(
            f"{url}: unknown protocol {protocol}; allowed: https, s3, gs, hf and others of fsspec"
        ) from None


async def _guarded_client(**options: Any) -> Any:
    """Return a session of aiohttp that follows redirects to allowed hosts only, and without the user's headers."""
    import aiohttp

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_check_redirect)
    return aiohttp.ClientSession(**{**options, "trace_configs": [*options.get("trace_configs", ()), trace]})


async def _check_redirect(_session: Any, _context: Any, redirect: Any) -> None:
    """Raise `RemoteReadError` for a redirect that is not allowed; remove headers that are for the first server."""
    from yarl import URL

    place = redirect.response.headers.get("Location") or redirect.response.headers.get("URI") or ""
    target = redirect.url.join(URL(place))
    if target.origin() == redirect.url.origin():
        return
    host = (target.host or "").lower()
    is_allowed = any(fnmatch.fnmatchcase(host, pattern) for pattern in _redirect_hosts)
    if not is_allowed or (redirect.url.scheme, target.scheme) == ("https", "http"):
        raise RemoteReadError(
            f"{redirect.url.origin()}{redirect.url.path}: the server redirects to {target.origin()}; allowed: itself, "
            "hosts of the sources, and those that data.limits.redirect_hosts names, never from https to http. Name the "
            "host there if you trust it"
        )
    for name in list(redirect.headers):
        if name.lower() not in _PUBLIC_HEADERS:
            del redirect.headers[name]


def _list_anew(files: Any, url: str, timeout_s: float) -> Any:
    files.invalidate_cache()  # or a listing from before would answer
    return _call(files, "ls", timeout_s, _path(files, url), detail=True)


def _path(files: Any, url: str) -> str:
    return str(files._strip_protocol(url))


def _urls(url: str, names: list[str]) -> list[str]:
    """Return names of a file system as URLs of the protocol of `url`, in order."""
    protocol = url.partition("://")[0]
    return sorted(name if "://" in name else f"{protocol}://{name.lstrip('/')}" for name in names)


def _call(files: Any, method: str, timeout_s: float, *arguments: Any, **options: Any) -> Any:
    """Call a method of a file system; only asynchronous ones can be interrupted."""
    if files.async_impl:
        options["timeout"] = timeout_s
    return getattr(files, method)(*arguments, **options)


def _version(url: str, info: dict[str, Any]) -> FileVersion:
    if info.get("type") == "directory":
        raise RemoteReadError(f"{url}: a folder, where a file is meant; name the files in it")
    if info.get("size") is None:
        raise RemoteReadError(f"{url}: the server does not state its size, without which no range of it can be read")
    tag = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
    return FileVersion(int(info["size"]), tag)


def _check_unchanged(url: str, version: FileVersion, found: FileVersion) -> None:
    """Raise `RemoteReadError` where a file is no longer the one that was opened."""
    if found.num_bytes != version.num_bytes or (found.tag and version.tag and found.tag != version.tag):
        raise RemoteReadError(
            f"{url}: it changed while in use, from {version.num_bytes} bytes (version {version.tag or 'unknown'}) "
            f"to {found.num_bytes} bytes (version {found.tag or 'unknown'}); start again, so that it is indexed anew"
        )


async def _get_range(files: Any, url: str, span: tuple[int, int], version: FileVersion) -> tuple[int, bytes]:
    """Get a range by HTTP; what the answer says of itself is checked before its body is believed."""
    start, stop = span
    options = {**files.kwargs}
    headers = {**options.pop("headers", {}), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    if version.tag.startswith('"'):  # a strong ETag
        headers["If-Match"] = version.tag
    session = await files.set_session()
    async with session.get(files.encode_url(url), headers=headers, **options) as response:
        if response.status in _CHANGED:
            raise RemoteReadError(f"{url}: it changed while it was in use; start again, so that it is indexed anew")
        response.raise_for_status()
        stated = response.headers.get("Content-Range", "")
        num_bytes = stated.rpartition("/")[2] if response.status == 206 else response.headers.get("Content-Length", "")
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
        if num_bytes.isdigit():
            _check_unchanged(url, version, FileVersion(int(num_bytes), tag))
        if response.status == 206:
            content = await response.read()
            if stated and not stated.startswith(f"bytes {start}-{stop - 1}/"):
                raise _PassingError(f"the range {stated!r} in place of bytes {start}-{stop - 1}")
            if len(content) != stop - start:
                raise _PassingError(f"{len(content)} bytes in place of {stop - start}")
            return start, content
        if version.num_bytes > MAX_WHOLE_FILE_BYTES:
            raise RemoteReadError(
                f"{url}: the server answers no ranges, and the file has {version.num_bytes} bytes; allowed: "
                f"{MAX_WHOLE_FILE_BYTES}; use a server with ranges, or smaller files"
            )
        content = await response.read()
        if len(content) != version.num_bytes:
            raise _PassingError(f"{len(content)} bytes in place of {version.num_bytes}")
        return 0, content


def _passing_reason(url: str, error: Exception) -> str:
    """Return what happened if another attempt may mend it; raise what it means otherwise."""
    causes = list(_causes(error))
    if type(error).__name__ == "ClientPayloadError":  # its cause has a status that no server sent
        return "the answer broke off"
    status = next((status for status in map(_status, causes) if status is not None), None)
    if status in _DENIED or any(map(_is_denial, causes)):
        what = "denied" if status is None else f"denied (status {status})"
        raise StorageAwayError(
            f"{url}: {what}; credentials come from the environment of this machine, never from recipes"
        ) from None
    if status in _MISSING or (status is None and isinstance(causes[-1], FileNotFoundError)):
        raise FileNotFoundError(2, "no such file", url) from None
    if status is not None and 400 <= status < 500 and status not in _PASSING:
        raise RemoteReadError(f"{url}: the server answers with status {status}") from None
    if status is not None:
        return f"status {status}"
    root = causes[-1]
    if isinstance(root, _PassingError):
        return str(root)
    if isinstance(root, TimeoutError | asyncio.TimeoutError) or "Timeout" in type(root).__name__:
        return "no answer in time"
    text = str(root).partition("\n")[0]
    return type(root).__name__ if "://" in text else f"{type(root).__name__}: {text}"  # URLs of redirects are signed


def _is_denial(error: BaseException) -> bool:
    return isinstance(error, PermissionError) or str(error).startswith("Forbidden: ")  # of gcsfs, without a status


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, the origin last."""
    while error is not None:
        yield error
        error = error.__cause__


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(status := getattr(error, "status", None), int):
        return status
    if isinstance(status := getattr(response, "status_code", None), int):
        return status
    if isinstance(response, dict):  # of S3, as botocore parses it
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    code = getattr(error, "code", None)
    return code if isinstance(code, int) and 100 <= code < 600 else None
