"""The watchdog: end a run that hangs, after writing every rank's stacks and what it waits for to disk."""

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
REPORT_COLLECTION_S = 1.0  # how long a rank waits for the reports of the others
REPORT_POLL_S = 0.05


class Watchdog:
    """Ends this process when `activity` made no progress for `timeout_s`, or when another rank's watchdog found so.

    It runs in a thread. The ranks alarm each other through the run's folder, which they share for their checkpoints:
    the network is what may hang. `end` ends the process and prints the report; tests replace it.
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
        """Prepare to watch `activity`; a timeout of 0 seconds disables the watchdog."""
        self._activity, self._timeout_s, self._run_dir = activity, timeout_s, run_dir
        self._rank, self._world_size = rank, world_size
        self._end = end or _end_process
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
        """Return whether another rank has reported a hang."""
        if not (self._run_dir / FAILURES_FOLDER).exists():
            return False
        return any(f.kind == "hang" for f in read_failures(self._run_dir))

    def _report(self) -> None:
        failure = describe_failure(self._rank, self._activity, "hang")
        path = stacks_path(self._run_dir, self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        write_failure(self._run_dir, failure)  # after the stacks: this file is the alarm on which other ranks end too
        failures = self._collect()
        explanation = ""
        if failures[0].rank == self._rank:  # one rank speaks for all: the first to raise the alarm
            explanation = explain_failures(failures, self._world_size)
            write_run_state(self._run_dir, "failed", error=explanation)
        self._end(explanation)

    def _collect(self) -> list[Failure]:
        """Return the reports of all ranks, or of those that wrote one in time; the first to raise the alarm first."""
        deadline = time.monotonic() + REPORT_COLLECTION_S
        failures = read_failures(self._run_dir)
        while len(failures) < self._world_size and time.monotonic() < deadline:
            self._closed.wait(REPORT_POLL_S)
            failures = read_failures(self._run_dir)
        return failures


def _end_process(report: str) -> None:
    if report:
        print(f"mmtrain: {report}", file=sys.stderr, flush=True)
    # The main thread is inside a wait that nothing can interrupt.
    os._exit(1)
