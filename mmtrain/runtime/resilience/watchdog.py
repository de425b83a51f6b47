"""The watchdog: when nothing moves any more, every rank's stacks and what it waits for go to disk, and the run ends."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.resilience.failures import (
    FAILURES_FOLDER,
    Failure,
    describe_failure,
    explain_failures,
    read_failures,
    stacks_path,
    write_failure,
)
from mmtrain.runtime.run_state import write_run_state

WATCHDOG_POLL_S = 0.5
REPORT_COLLECTION_S = 1.0  # how long the ranks that raised the alarm wait for the reports of the others


class Watchdog:
    """A thread that ends this process when `activity` has not changed for `timeout_s`, or any rank has found so.

    The ranks call each other through the run's folder, which they share for their checkpoints: the network is what
    may hang. `end` is what ends the process, with the report for people; tests replace it.
    """

    def __init__(
        self,
        activity: Activity,
        timeout_s: float,
        run_dir: Path,
        rank: int,
        world_size: int,
        end: Callable[[str], None] | None = None,
    ) -> None:
        """Watch; a timeout of 0 seconds means never."""
        self._activity, self._timeout_s, self._run_dir = activity, timeout_s, run_dir
        self._rank, self._world_size, self._end = rank, world_size, end or _end_process
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mmtrain-watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._timeout_s:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        if self._timeout_s:
            self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(WATCHDOG_POLL_S, self._timeout_s / 4)):
            if self._activity.stuck_s() >= self._timeout_s or self._alarmed():
                self._report()
                return

    def _alarmed(self) -> bool:
        return (
            any(f.kind == "hang" for f in read_failures(self._run_dir))
            if (self._run_dir / FAILURES_FOLDER).exists()
            else False
        )

    def _report(self) -> None:
        own = describe_failure(self._rank, self._activity, "hang")
        path = stacks_path(self._run_dir, self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        write_failure(self._run_dir, own)  # after the stacks: this file is the alarm, and the others then leave too
        failures = self._collect()
        if failures[0].rank == self._rank:
            write_run_state(self._run_dir, "failed", error=explain_failures(failures, self._world_size))
        self._end(explain_failures(failures, self._world_size) if failures[0].rank == self._rank else "")

    def _collect(self) -> list[Failure]:
        """The reports of all ranks, or of those that could give one in time; the first to raise the alarm first."""
        deadline = time.monotonic() + REPORT_COLLECTION_S
        while len(found := read_failures(self._run_dir)) < self._world_size and time.monotonic() < deadline:
            self._closed.wait(0.05)
        return found


def _end_process(report: str) -> None:
    if report:
        print(f"mmtrain: {report}", file=sys.stderr, flush=True)
    # The main thread sits in a wait that nothing can break.
    os._exit(1)
