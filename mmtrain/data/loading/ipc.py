"""Messages between processes of one machine: short JSON over a socket, and memory files for what is large."""

import contextlib
import json
import mmap
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Self

from mmtrain.system_calls import open_memory_file

_LENGTH = struct.Struct("<I")
_MAX_FILES_PER_MESSAGE = 4


def send_message(pipe: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Write one message; the receiver gets descriptors of its own for `files`. Raises OSError if it has ended."""
    text = json.dumps(message).encode()
    if files:
        socket.send_fds(pipe, [_LENGTH.pack(len(text))], files)
        pipe.sendall(text)
    else:
        pipe.sendall(_LENGTH.pack(len(text)) + text)


def receive_message(pipe: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Read one message and the files that came with it; None when the sender has ended."""
    files: list[int] = []
    try:
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        head, files, _, _ = socket.recv_fds(pipe, _LENGTH.size, _MAX_FILES_PER_MESSAGE, flags)
        head += _read_exactly(pipe, _LENGTH.size - len(head)) if head else b""
        text = _read_exactly(pipe, _LENGTH.unpack(head)[0]) if head else b""
    except OSError:  # a killed sender resets the connection
        text = b""
    if not text:
        for file in files:
            os.close(file)
        return None
    return json.loads(text), list(files)


def _read_exactly(pipe: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        part = pipe.recv(count - len(content))
        if not part:
            raise ConnectionResetError("the sender ended within a message")
        content += part
    return content


def create_memory_file(chunks: Iterable[memoryview]) -> int:
    """Write `chunks` into a file without a name, in memory, so that nothing is left when its users die."""
    file = open_memory_file()
    try:
        with open(file, "wb", closefd=False) as writer:
            for chunk in chunks:
                writer.write(chunk)
    except BaseException:
        os.close(file)
        raise
    return file


def map_file(file: int) -> memoryview:
    """Map the content of a file as memory, and close the file. Writing to the memory changes the file."""
    try:
        size = os.fstat(file).st_size
        # Fault the pages in here: otherwise the reader's thread would do it, page by page.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return memoryview(mmap.mmap(file, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(file)


class SharedStatus:
    """What a worker is reading, in memory shared with the process that watches it.

    It needs no messages, and the last status can still be read after the worker has died.
    """

    _LAYOUT = struct.Struct("<qq")  # number of writes, and the sample written last (-1: none)
    _NO_SAMPLE = -1
    _OUTAGE = struct.Struct("<q1024s")  # bytes of a text, and them; behind `_LAYOUT`

    def __init__(self, memory: memoryview) -> None:
        """Use memory that both processes have mapped from the file of `create_file`."""
        self._memory = memory

    @classmethod
    def create_file(cls) -> int:
        """Return a file to map, which holds the status of a worker that has read nothing yet."""
        return create_memory_file([memoryview(cls._LAYOUT.pack(0, cls._NO_SAMPLE) + cls._OUTAGE.pack(0, b""))])

    def write(self, sample: int | None) -> None:
        """Record the sample that is read from now on; None: no media of any sample."""
        num_writes, _ = self.read()
        self._LAYOUT.pack_into(self._memory, 0, num_writes + 1, self._NO_SAMPLE if sample is None else sample)

    def read(self) -> tuple[int, int | None]:
        """Return the number of writes so far, and the sample written last."""
        num_writes, sample = self._LAYOUT.unpack_from(self._memory)
        return num_writes, None if sample == self._NO_SAMPLE else sample

    def write_outage(self, text: str) -> None:
        """Record the storage that is waited for; empty: none."""
        content = text.encode("utf-8", "replace")[: self._OUTAGE.size - 8]
        self._OUTAGE.pack_into(self._memory, self._LAYOUT.size, len(content), content)

    def outage(self) -> str:
        """Return the storage that is waited for."""
        num_bytes, content = self._OUTAGE.unpack_from(self._memory, self._LAYOUT.size)
        return bytes(content[:num_bytes]).decode("utf-8", "replace")


class Waker:
    """A descriptor to wait on that any thread can make readable."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make the descriptor readable; without effect if it is closed already."""
        with contextlib.suppress(OSError):  # if the buffer is full, it is readable
            self._writer.send(b"\0")

    def drain(self) -> None:
        """Make the descriptor unreadable until the next `wake`."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()
        self._writer.close()
