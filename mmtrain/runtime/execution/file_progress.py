"""How far a rank is with the files of a checkpoint, for the watchdog: storage may be slow without being stuck."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class _Position:
    """The file in progress; replaced as a whole, so that another thread reads what belongs together."""

    path: Path | None
    num_bytes: int  # read or written since the start
    start_s: float
    changed_s: float


class FileProgress:
    """The file that this rank reads or writes, and when this rank or another one last made progress with files.

    The thread that works on files calls `advance`; the watchdog reads from another thread. While this rank waits in a
    collective for others (`waiting_for_ranks`), their progress counts; else only its own does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.waits_for_ranks = False
        self.num_advances = 0  # since the process started: what other ranks compare
        self._peers_changed_s = clock()
        self._position = _Position(None, 0, clock(), clock())

    def start(self) -> None:
        """Start a save or a load; nothing is read or written yet."""
        now_s = self._clock()
        self._position = _Position(None, 0, now_s, now_s)
        self.num_advances += 1

    def advance(self, path: Path, num_bytes: int) -> None:
        """Note that `num_bytes` of a file were read or written, or with 0 that work on a file or folder starts."""
        position = self._position
        self._position = replace(position, path=path, num_bytes=position.num_bytes + num_bytes, changed_s=self._clock())
        self.num_advances += 1

    def peers_advanced(self) -> None:
        """Note that another rank has made progress."""
        self._peers_changed_s = self._clock()

    @contextlib.contextmanager
    def waiting_for_ranks(self) -> Iterator[None]:
        """Run the body, a collective, in which this rank does nothing itself."""
        self.waits_for_ranks = True
        try:
            yield
        finally:
            # This rank's own work starts now, with a file that it has not named yet.
            self._position = replace(self._position, path=None, changed_s=self._clock())
            self.waits_for_ranks = False
            self.num_advances += 1

    @property
    def changed_s(self) -> float:
        """When, by the clock, what this rank waits for last made progress."""
        own_s = self._position.changed_s
        return max(own_s, self._peers_changed_s) if self.waits_for_ranks else own_s

    def to_text(self) -> str | None:
        """Return the file that this rank is at, its speed so far, and since when nothing happens; None without one."""
        position = self._position
        if position.path is None or self.waits_for_ranks:
            return None
        still_s = self._clock() - position.changed_s
        text = f"no progress with {position.path} for {still_s:.0f} s"
        seconds = position.changed_s - position.start_s
        if not position.num_bytes or not seconds:
            return f"{text}; no byte before that"
        megabytes = position.num_bytes / MEGABYTE
        return f"{text}; {megabytes:.2f} MB at {megabytes / seconds:.2f} MB/s before that"
