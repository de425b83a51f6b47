"""The watchdog: end a run that hangs, after writing every rank's stacks and what it waits for to disk."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from torch._C._distributed_c10d import Store

from mmtrain.errors import StoppedAndSaved
from mmtrain.runtime.execution.activity import ENDING, Activity
from mmtrain.runtime.heartbeats import Heartbeats
from mmtrain.runtime.resilience.failures import (
    FAILURES_FOLDER,
    REPORT_COLLECTION_S,
    Failure,
    collect_failures,
    describe_failure,
    explain_failures,
    read_failures,
    show_life,
    stacks_path,
    write_failure,
)
from mmtrain.runtime.resilience.flight_recorder import FlightRecorderDump
from mmtrain.runtime.resilience.signals import stopped_early_text
from mmtrain.runtime.run_folder import write_run_state
from mmtrain.runtime.world import World

WATCHDOG_POLL_S = 0.5
LOST_RANK_SILENCE_S = 15.0  # of an elastic run; as long as torchrun's agents by default wait for each other
BEATS_PER_SILENCE_LIMIT = 5  # few, since rank 0 asks the store about every rank
MAX_LISTENER_END_S = 1.0  # in which the listener ends; one that hangs itself ends with the process
MAX_REPORT_S = 15.0  # in which a report must be on disk: what hangs may be the storage itself
_ADVANCES_KEY = "file advances"
_OUTAGES_KEY = "waits for storage"


class PeerProgress:
    """Counts the progress that all ranks make with files, and their waits for storage, in the job's store.

    One counter of each serves all ranks: who waits need not know who advances, and the report of a rank that is stuck
    itself is made by that rank. A rank that is stuck for `quiet_s` asks whether another one waits for storage.
    """

    def __init__(self, store: Store, activity: Activity, quiet_s: float) -> None:
        self._store, self._activity, self._quiet_s = store, activity, quiet_s
        self._num_waits = 0  # for storage, of all ranks, as this rank knows it
        self._num_own_advances = activity.files.num_advances  # that the other ranks know of
        self._total = 0  # of all ranks, as this rank knows it

    def exchange(self) -> None:
        """Report this rank's progress, and note that of others if this rank waits. Raises what the store raises."""
        self._exchange_waits()
        num_own_advances = self._activity.files.num_advances
        has_advanced = int(num_own_advances != self._num_own_advances)
        if not has_advanced and not self._activity.in_files:
            return
        self._num_own_advances = num_own_advances
        total = self._store.add(_ADVANCES_KEY, has_advanced)
        if total - has_advanced != self._total:
            self._activity.files.peers_advanced()
        self._total = total

    def _exchange_waits(self) -> None:
        """Report that this rank waits for storage, or find out whether another one does."""
        if self._activity.awaits_storage:
            self._num_waits = self._store.add(_OUTAGES_KEY, 1)
        elif self._activity.stuck_s() >= self._quiet_s:
            num_waits = self._store.add(_OUTAGES_KEY, 0)
            if num_waits != self._num_waits:
                self._activity.peers_await_storage()
            self._num_waits = num_waits


class Watchdog:
    """Ends this process when `activity` made no progress for `timeout_s`, or when another rank's watchdog found so.

    Before the first step there are phases that may take any time; in these it ends when another rank's process does not
    run for `timeout_s`, or when this rank plans and uses no processor time for so long. With `silence_limit_s` it ends
    in later phases too when a process does not run for so long: on a network that does not report a lost node, waiting
    for a message says nothing. When a signal has stopped another rank before the first step, this process ends as well
    (`end_early`).

    One thread watches. Another one looks for the alarms of other ranks in the run's folder, which they share for their
    checkpoints since the network is what may hang, and for their progress with files. A third one beats. Both the
    folder and the store may hang too, and then the first thread still ends the process. `end` does that and prints the
    report; tests replace it.
    """

    def __init__(
        self,
        activity: Activity,
        timeout_s: float,
        run_dir: Path,
        world: World,
        end: Callable[[str], None] | None = None,
        may_write: Callable[[], bool] = lambda: True,
        silence_limit_s: float | None = None,
    ) -> None:
        """Prepare to watch `activity`; a timeout of 0 seconds disables the watchdog.

        `may_write` returns False when another run has taken the folder, whose ranks would take a report for an alarm.
        """
        self._activity, self._timeout_s, self._run_dir = activity, timeout_s, run_dir
        self._rank, self._world_size = world.rank, world.size
        self._peers = PeerProgress(world.store, activity, timeout_s / 2) if world.store else None
        self._heartbeats = Heartbeats(world.store, world.rank, world.size) if world.store else None
        self._end, self._may_write = end or _end_process, may_write
        self.end_early: Callable[[], None] = _end_early  # tests replace it
        self._silence_limit_s = silence_limit_s
        self._next_beat_s = 0.0
        self._closed = threading.Event()
        self._alarmed = threading.Event()  # another rank has reported a hang
        self._poll_s = min(WATCHDOG_POLL_S, timeout_s / 4)
        self._watcher = threading.Thread(target=self._watch, name="mmtrain-watchdog", daemon=True)
        self._listener = threading.Thread(target=self._listen, name="mmtrain-watchdog-peers", daemon=True)
        # Of its own: the listener may hang in the run's folder, and a process with slow storage is alive.
        self._beater = threading.Thread(target=self._beat, name="mmtrain-heartbeats", daemon=True)

    def __enter__(self) -> Self:
        if self._timeout_s:
            self._listener.start()
            self._beater.start()
            self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        if self._timeout_s:
            self._watcher.join()
            self._listener.join(MAX_LISTENER_END_S)
            self._beater.join(MAX_LISTENER_END_S)

    def _watch(self) -> None:
        while not self._closed.wait(self._poll_s):
            if self._is_stuck() or self._alarmed.is_set():
                self._end(self._report_in_time())
                return

    def _is_stuck(self) -> bool:
        limit_s = self._timeout_s if self._activity.is_starting else self._silence_limit_s
        if limit_s is not None and self._heartbeats is not None and self._heartbeats.silent_s() >= limit_s:
            return self._activity.doing != ENDING  # another rank may have ended already
        is_timed = self._activity.is_computing or not self._activity.is_starting
        return is_timed and self._activity.stuck_s() >= self._timeout_s

    def _listen(self) -> None:
        """Exchange progress with other ranks and look for their alarms, until the watchdog closes."""
        while not self._closed.wait(self._poll_s):
            with contextlib.suppress(RuntimeError):  # the process that holds the store is gone
                if self._peers is not None:
                    self._peers.exchange()
            if not (self._run_dir / FAILURES_FOLDER).exists():
                continue
            kinds = {failure.kind for failure in read_failures(self._run_dir)}
            if "stopped" in kinds and self._activity.doing != ENDING:
                self.end_early()
                return
            if "lost peer" in kinds and self._may_write():
                show_life(self._run_dir, self._rank)
            if "hang" in kinds:
                self._alarmed.set()
                return

    def _beat(self) -> None:
        """Show the other ranks that this process runs, and listen to them, until the watchdog closes."""
        while self._heartbeats is not None and not self._closed.wait(self._poll_s):
            if self._must_beat():
                with contextlib.suppress(RuntimeError):  # the process that holds the store is gone
                    self._heartbeats.beat()

    def _must_beat(self) -> bool:
        """Return whether a beat is due: always before the first step, later a few times in the limit of silence."""
        if self._activity.is_starting:
            return True
        if self._silence_limit_s is None or time.monotonic() < self._next_beat_s:
            return False
        self._next_beat_s = time.monotonic() + self._silence_limit_s / BEATS_PER_SILENCE_LIMIT
        return True

    def _report_in_time(self) -> str:
        """Write this rank's report; return what the user should read, which is empty on all ranks but one."""
        failure = describe_failure(self._rank, self._activity, "hang")
        explanations: list[str] = []
        writer = threading.Thread(
            target=lambda: explanations.append(self._report(failure)), name="mmtrain-watchdog-report", daemon=True
        )
        writer.start()
        writer.join(MAX_REPORT_S)
        if explanations:
            return explanations[0]
        return f"{failure.to_text()}\n  no report could be written to {self._run_dir} in {MAX_REPORT_S:.0f} s"

    def _report(self, failure: Failure) -> str:
        if not self._may_write():
            return f"{failure.to_text()}\n  another run has taken {self._run_dir}, so that no report was written there"
        path = stacks_path(self._run_dir, self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        dump = FlightRecorderDump(self._run_dir, self._rank)
        write_failure(self._run_dir, failure)  # after the stacks: this file is the alarm on which other ranks end too
        failures = collect_failures(self._run_dir, self._world_size, REPORT_COLLECTION_S, self._closed.wait)
        dump.wait()
        explanation = ""
        if failures[0].rank == self._rank:  # one rank speaks for all: the first to raise the alarm
            explanation = explain_failures(failures, self._world_size)
            write_run_state(self._run_dir, "failed", error=explanation)
        return explanation


def _end_process(report: str) -> None:
    if report:
        print(f"mmtrain: {report}", file=sys.stderr, flush=True)
    # The main thread is inside a wait that nothing can interrupt.
    os._exit(1)


def _end_early() -> None:
    print(f"mmtrain: {stopped_early_text('a signal to another rank')}", file=sys.stderr, flush=True)
    os._exit(StoppedAndSaved.exit_code)
