"""Objects of a store (`s3://`, `gs://`, ...) below one URL: list, read, write and remove them, with retries.

Objects appear whole or not at all: a store has no half objects and no renames. What lies above, such as the order in
which the files of a checkpoint appear, is `mmtrain.checkpoint.remote_copies`.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mmtrain.data.remote.locations import RemoteSettings
from mmtrain.data.remote.remote_files import RemoteFiles
from mmtrain.errors import RemoteReadError

PIECE_BYTES = 16 << 20  # read with one request, and handed to the writer at once
PART_BYTES = 64 << 20  # of an upload in parts; S3 takes 10,000 of them: objects of up to 640 GB
_PROBE = ".mmtrain-can-write"
Chunks = Iterable[bytes | memoryview]


@dataclass(frozen=True)
class ObjectStore:
    """The objects below `url`, by names relative to it, such as `checkpoints/step-00000100/manifest.json`."""

    url: str  # without a slash at its end
    files: RemoteFiles

    @classmethod
    def at(cls, url: str) -> "ObjectStore":
        """Open a store, patient as the environment says. Raises `DataError`; nothing is asked yet."""
        settings = RemoteSettings.from_environment()
        return cls(url.rstrip("/"), RemoteFiles(settings.timeout_s, settings.attempts))

    def place(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.url}/{name}"

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the bytes of all objects below `prefix`, a folder's name, by name; empty if there are none.

        Raises `RemoteReadError`.
        """
        folder = self.place(prefix) if prefix else self.url

        def find(files: Any) -> dict[str, int]:
            files.invalidate_cache()  # or a listing from before would answer
            root = str(files._strip_protocol(self.url)).strip("/")
            infos = files.find(files._strip_protocol(folder), detail=True)
            return {path.strip("/").removeprefix(f"{root}/"): int(info["size"]) for path, info in infos.items()}

        try:
            return self.files.repeat(folder, find)
        except FileNotFoundError:
            return {}

    def read(self, name: str) -> bytes:
        """Return a small object whole. Raises `FileNotFoundError` and `RemoteReadError`."""
        return self.files.repeat(self.place(name), lambda files: bytes(files.cat_file(_path(files, self.place(name)))))

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of an object in order; one that changes meanwhile is an error.

        Raises `FileNotFoundError` and `RemoteReadError`.
        """
        url = self.place(name)
        version = self.files.version(url)
        for start in range(0, version.num_bytes, PIECE_BYTES):
            yield self.files.read(url, start, min(start + PIECE_BYTES, version.num_bytes), version)[1]

    def write(self, name: str, chunks: Callable[[], Chunks], sha256: str | None = None) -> bool:
        """Write an object, in parts if it is large; every attempt reads `chunks()` from the start.

        Return False, and write nothing, if the bytes do not have the sum `sha256`: they are damaged on this machine.
        Raises `RemoteReadError` for what the store does not take, and for what cannot be read here.
        """
        url = self.place(name)
        try:
            return self.files.repeat(url, lambda files: _write(files, url, _readable(url, chunks), sha256))
        except FileNotFoundError:
            raise RemoteReadError(
                f"{url}: cannot be written: there is no such bucket; create it, or name another one"
            ) from None

    def remove(self, name: str) -> None:
        """Remove an object, if it is there. Raises `RemoteReadError`."""
        url = self.place(name)
        try:
            self.files.repeat(url, lambda files: files.rm_file(_path(files, url)))
        except FileNotFoundError:
            return

    def move(self, name: str, target: str) -> None:
        """Copy an object inside the store, then remove it. Raises `FileNotFoundError` and `RemoteReadError`."""
        url, to = self.place(name), self.place(target)
        self.files.repeat(url, lambda files: files.cp_file(_path(files, url), _path(files, to)))
        self.remove(name)

    def require_writable(self) -> None:
        """Write and remove a small object. Raises `RemoteReadError`, which says what is wrong."""
        self.write(_PROBE, lambda: [b"mmtrain\n"])
        self.remove(_PROBE)


def _path(files: Any, url: str) -> str:
    return str(files._strip_protocol(url))


def _readable(url: str, chunks: Callable[[], Chunks]) -> Iterator[bytes | memoryview]:
    """Yield chunks; tell errors of this machine's disk from those of the store, which are repeated."""
    try:
        yield from chunks()
    except OSError as error:
        raise RemoteReadError(f"{url}: not written: {error.filename}: {error.strerror or error}") from None


def _write(files: Any, url: str, chunks: Chunks, sha256: str | None) -> bool:
    """Write one object, or nothing: a file of `fsspec` that is closed, also by an error, would leave its first part."""
    digest = hashlib.sha256()
    file = files.open(_path(files, url), "wb", block_size=PART_BYTES)
    is_whole = False
    try:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
        is_whole = sha256 in (None, digest.hexdigest())
        if is_whole:
            file.close()
    finally:
        if not is_whole:
            _discard(files, url, file)
    return is_whole


def _discard(files: Any, url: str, file: Any) -> None:
    """Drop what was written of an object; the error that ended it is raised afterwards."""
    from fsspec.spec import AbstractBufferedFile

    with suppress(Exception):
        if isinstance(file, AbstractBufferedFile):
            file.discard()  # the parts that were uploaded
            file.closed = True
        else:  # a file system that shows files before they are complete
            file.close()
            files.rm_file(_path(files, url))
