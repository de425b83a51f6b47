"""Signs of life that ranks leave in the job's store, and a watch over the ranks before a run has a folder."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from torch._C._distributed_c10d import Store

from mmtrain.errors import RunError
from mmtrain.runtime.rendezvous import MeetingPlace, ranks_text

_HEARTBEATS_KEY = "heartbeats of rank"
START_POLL_S = 0.5


class Heartbeats:
    """Counts the heartbeats of every rank in the job's store; rank 0 watches all others, and these watch rank 0.

    A thread calls `beat`, so the beats of a process that is dead or stopped cease, and those of one that computes do
    not. A store that does not answer counts as silence: rank 0 or the launcher holds it.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, clock: Callable[[], float] = time.monotonic, key: str = ""
    ) -> None:
        """Listen from now on; `key` keeps these beats apart from others in the same store."""
        self._store, self._rank, self._clock, self._key = store, rank, clock, f"{_HEARTBEATS_KEY}{key}"
        watched = range(1, world_size) if rank == 0 else [0]
        self._counts = dict.fromkeys(watched, 0)  # rank -> beats
        self._heard_s = dict.fromkeys(watched, clock())  # rank -> when its count last changed

    def beat(self) -> None:
        """Send one beat and read those of the watched ranks. Raises what the store raises, and may block."""
        self._store.add(f"{self._key} {self._rank}", 1)
        for rank, count in self._counts.items():
            new_count = self._store.add(f"{self._key} {rank}", 0)
            if new_count != count:
                self._counts[rank] = new_count
                self._heard_s[rank] = self._clock()

    def silent_s(self) -> float:
        """Return how long the watched rank that was heard of least recently has been silent."""
        return self._clock() - min(self._heard_s.values())

    def silent_ranks(self, limit_s: float) -> list[int]:
        """Return the watched ranks that were heard of, and have been silent for so long since."""
        now_s = self._clock()
        return [rank for rank, heard_s in self._heard_s.items() if self._counts[rank] and now_s - heard_s >= limit_s]


class StartWatch:
    """Ends this process when another rank that had come does not run, while the ranks meet and compare settings.

    The watchdog takes its place when the run has a folder. Rank 0 names all ranks. The others name rank 0, whose store
    may not answer any more. A rank that never came is named by those that wait for it.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        place: MeetingPlace,
        limit_s: float,
        end: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch from now on; with a limit of 0, nothing is watched. Tests replace `end`.

        `connect` returns a client of the ranks' store that nothing else uses.
        """
        self._connect, self._place, self._limit_s = connect, place, limit_s
        self._end, self._clock = end or _end_process, clock
        self._heartbeats: Heartbeats | None = None
        self._answered_s = clock()  # when the store last answered
        self._closed = threading.Event()
        # Two: the one that beats may hang in a store whose process is stopped.
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._beat, "mmtrain-start-beats"), (self._watch, "mmtrain-start-watch"))
        ]
        if limit_s:
            for thread in self._threads:
                thread.start()

    def close(self) -> None:
        """End the watch. The beats end with it, so this is called when all ranks have got as far."""
        self._closed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _beat(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(RuntimeError):  # the process that holds the store is gone, or not there yet
                if self._heartbeats is None:
                    store = self._connect()
                    self._heartbeats = Heartbeats(
                        store, self._place.rank, self._place.world_size, self._clock, " at the start"
                    )
                self._heartbeats.beat()
            self._answered_s = self._clock()
            self._closed.wait(START_POLL_S)

    def _watch(self) -> None:
        while not self._closed.wait(START_POLL_S):
            silent = [] if self._heartbeats is None else self._heartbeats.silent_ranks(self._limit_s)
            if not silent and self._clock() - self._answered_s >= self._limit_s:
                silent = [0]
            if silent:
                self._end(
                    f"rank {self._place.rank} of {self._place.world_size}: {ranks_text(silent)} came to "
                    f"{self._place.to_text()}, and gave no sign of life for {self._limit_s:g} s while the ranks met "
                    "and compared their settings: dead, or stopped by the system"
                )
                return


def _end_process(text: str) -> None:
    print(f"mmtrain: {text}", file=sys.stderr, flush=True)
    # The main thread is inside a wait that nothing can interrupt.
    os._exit(RunError.exit_code)
