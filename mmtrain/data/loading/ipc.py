"""Messages between processes of one machine: short JSON, and files that hold what is large."""

import contextlib
import json
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, Self

_LENGTH = struct.Struct("<I")
_MAX_FILES = 4


def send_message(pipe: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Write one message; the other side gets descriptors of its own for `files`. Raises OSError if nobody reads."""
    text = json.dumps(message).encode()
    if files:
        socket.send_fds(pipe, [_LENGTH.pack(len(text))], files)
        pipe.sendall(text)
    else:
        pipe.sendall(_LENGTH.pack(len(text)) + text)


def receive_message(pipe: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Read one message and the files that came with it; None when the other side is gone."""
    files: list[int] = []
    try:
        head, files, _, _ = socket.recv_fds(pipe, _LENGTH.size, _MAX_FILES, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        head += _exactly(pipe, _LENGTH.size - len(head)) if head else b""
        text = _exactly(pipe, _LENGTH.unpack(head)[0]) if head else b""
    except OSError:  # a peer that was killed resets the connection
        text = b""
    if not text:
        for file in files:
            os.close(file)
        return None
    return json.loads(text), list(files)


def _exactly(pipe: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = pipe.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("the other side ended within a message")
        parts += part
    return parts


def create_memory_file(chunks: Iterable[memoryview]) -> int:
    """Write `chunks` into a file that has no name and lies in memory, so that nothing is left when its users die."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("mmtrain")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    try:
        with open(file, "wb", closefd=False) as writer:
            for chunk in chunks:
                writer.write(chunk)
    except BaseException:
        os.close(file)
        raise
    return file


def map_file(file: int) -> memoryview:
    """The content of a file as memory, for whoever has it alone: writing changes the file. Closes `file`."""
    try:
        size = os.fstat(file).st_size
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # in this thread, not page by page in the reader's
        return memoryview(mmap.mmap(file, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(file)


class SharedStatus:
    """What a process is at, in memory that another one looks at: no message is needed, and it outlives the process."""

    _LAYOUT = struct.Struct("<qq")  # how often something was shown, and what last

    def __init__(self, memory: memoryview) -> None:
        """Show or read in memory that both have mapped, see `create_file`."""
        self._memory = memory

    @staticmethod
    def create_file() -> int:
        """A file to map; nothing was shown yet."""
        return create_memory_file([memoryview(bytes(SharedStatus._LAYOUT.size))])

    def write(self, what: int) -> None:
        """Say what is begun now."""
        count, _ = self.read()
        self._LAYOUT.pack_into(self._memory, 0, count + 1, what)

    def read(self) -> tuple[int, int]:
        """How often something was shown, and what last."""
        count, what = self._LAYOUT.unpack_from(self._memory)
        return count, what


class Waker:
    """Something to wait on that any thread can make readable."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The descriptor that becomes readable."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make it readable; it may be closed already."""
        with contextlib.suppress(OSError):  # one byte is as good as many
            self._writer.send(b"\0")

    def drain(self) -> None:
        """Make it unreadable until the next `wake`."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()
        self._writer.close()
