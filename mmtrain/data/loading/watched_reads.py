"""Watch what threads of this process read: reading blocks while a file server is away, and another thread must tell."""

import threading
import time
from collections.abc import Callable
from typing import Self

from mmtrain.data.loading.batch_builder import ReadMonitor
from mmtrain.data.loading.storage_outage import OutageReport, ReadWatch

WATCH_INTERVAL_S = 5.0


class WatchedReads:
    """What one thread of this process reads, and the thread that watches it. Close it, or use it as a context."""

    def __init__(
        self, find_outage: Callable[[int], str], report: OutageReport, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start to watch; the reader gets `monitor`."""
        self._find_outage, self._report, self._clock = find_outage, report, clock
        self._status: tuple[int, int | None] = (0, None)  # replaced as a whole, since two threads share it
        self._outage = ""  # that the reader itself waits for
        self._watch = ReadWatch()
        self.monitor = ReadMonitor(self._note_read, on_outage=self._note_outage)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mmtrain-storage-watch", daemon=True)
        self._thread.start()

    def read(self) -> tuple[int, int | None]:
        """See `ReaderStatus`."""
        return self._status

    def outage(self) -> str:
        """See `ReaderStatus`."""
        return self._outage

    def look(self) -> None:
        """Look once, and report what has changed."""
        self._watch.look(self, self._clock(), self._find_outage)
        self._report.tell(self._watch.outage)

    def close(self) -> None:
        """Stop watching: the reader waits for nothing any more."""
        self._closed.set()
        self._thread.join()
        self._report.tell("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closed.wait(WATCH_INTERVAL_S):
            self.look()

    def _note_read(self, sample_id: int | None) -> None:
        self._status = (self._status[0] + 1, sample_id)

    def _note_outage(self, outage: str) -> None:
        self._outage = outage
