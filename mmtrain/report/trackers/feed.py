"""Feed trackers from the run's log, each by a thread of its own, so that none of them stops or slows the training.

Each thread reads the log on disk; the training only signals that it has grown. So nothing piles up in memory behind a
slow tracker, and one that failed for a while, or a run that was killed, catches up from the log.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from mmtrain.process_end import expect_hang
from mmtrain.redaction import Redactor
from mmtrain.report.runlog import ANSWERS_FILE, METRICS_FILE, has_answers, is_step
from mmtrain.report.scalars import step_scalars
from mmtrain.report.trackers.tracker import RunEnd, ShownAnswer, TrackedRun, Tracker

MAX_TRACKER_FAILURES = 10  # in a row, after which a run leaves a tracker alone
FIRST_RETRY_S = 5.0  # after a failure; doubles with each further one
MAX_RETRY_S = 600.0
SILENT_TRACKER_S = 60.0  # of one call, after which the user hears that a tracker does not answer
MAX_TRACKER_END_S = 60.0  # in which a tracker may catch up and finish after the last step
MAX_INTERRUPTED_END_S = 5.0  # likewise of a run that a signal or an error ends: nodes are taken away soon
CATCH_UP_STEPS = 500  # sent in a row, before a pause that leaves the processor to the training
CATCH_UP_PAUSE_S = 0.2
Summarize = Callable[[], Mapping[str, str | float]]


@dataclass(frozen=True)
class TrackerLimits:
    """How long trackers may take, in seconds; tests have less patience."""

    first_retry_s: float = FIRST_RETRY_S
    silent_s: float = SILENT_TRACKER_S
    end_s: float = MAX_TRACKER_END_S
    interrupted_end_s: float = MAX_INTERRUPTED_END_S


class LogReader:
    """Reads what was added to the log since the last call: steps in order, each with its answers."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._offset = 0

    def restart(self) -> None:
        """Read from the first step again."""
        self._offset = 0

    def next_steps(self, limit: int) -> list[dict[str, Any]]:
        """Return at most `limit` further steps, as `StepMetrics.to_json` wrote them."""
        steps: list[dict[str, Any]] = []
        try:
            file = (self._run_dir / METRICS_FILE).open("rb")
        except FileNotFoundError:
            return steps
        with file:
            file.seek(self._offset)
            while len(steps) < limit:
                line = file.readline()
                if not line.endswith(b"\n"):  # the rest is not written yet
                    break
                self._offset = file.tell()
                entry = _parsed(line)
                if entry is not None and is_step(entry):
                    steps.append(entry)
        return steps

    def answers_after(self, steps: Sequence[int]) -> dict[int, tuple[ShownAnswer, ...]]:
        """Return the answers that were given after some of the steps."""
        try:
            lines = (self._run_dir / ANSWERS_FILE).read_bytes().splitlines()
        except FileNotFoundError:
            return {}
        wanted = set(steps)
        entries = [entry for entry in map(_parsed, lines) if entry and has_answers(entry) and entry["step"] in wanted]
        return {entry["step"]: tuple(self._answer(a) for a in entry["answers"]) for entry in entries}

    def _answer(self, entry: Mapping[str, Any]) -> ShownAnswer:
        pictures = tuple(self._run_dir / name for name in entry.get("pictures", ()))
        return ShownAnswer(str(entry["question"]), str(entry["expected"]), str(entry["answered"]), pictures)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


@dataclass
class _Feed:
    """One tracker with its thread. Fields below `run` belong to the thread, which others only read."""

    name: str
    open: Callable[[], Tracker]  # may import packages and take seconds
    run: TrackedRun
    notify: Callable[[str], None]  # from another thread than the training's
    redact: Redactor
    limits: TrackerLimits
    more: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)
    end: RunEnd = "interrupted"
    summary: Mapping[str, str | float] = field(default_factory=dict)
    call_since_s: float | None = None  # of the call that is under way
    last_step: int = 0  # that the tracker has heard of
    num_failures: int = 0  # in a row
    has_failed: bool = False
    is_done: bool = False
    was_silent: bool = False

    def __post_init__(self) -> None:
        self.reader = LogReader(self.run.run_dir)
        # A daemon: a tracker that never answers must not keep the process from ending.
        self.thread = threading.Thread(target=self._feed, name=f"mmtrain-tracker-{self.name}", daemon=True)

    def _feed(self) -> None:
        while self.num_failures < MAX_TRACKER_FAILURES and not self.is_done:
            tracker: Tracker | None = None
            try:
                self.call_since_s = time.monotonic()
                tracker = self.open()
                self.reader.restart()
                self.last_step = tracker.start(self.run)
                self._tell_until_closed(tracker)
                self.is_done = True
            except Exception as error:  # whatever a tracker raises, in its own code or a server's answer
                self._failed(tracker, error)

    def _tell_until_closed(self, tracker: Tracker) -> None:
        while True:
            self.more.clear()
            is_closing = self.closing.is_set()  # read first: what was logged before is sent below
            self._tell_all(tracker)
            if is_closing:
                tracker.finish(self.end, self.summary)
                self.call_since_s = None
                return
            self.call_since_s = None
            self.more.wait()

    def _tell_all(self, tracker: Tracker) -> None:
        """Tell the tracker what it has not heard of; a pause between long parts leaves the training its processor."""
        while steps := [step for step in self.reader.next_steps(CATCH_UP_STEPS) if step["step"] > self.last_step]:
            evaluated = [step["step"] for step in steps if step.get("val_exact") is not None]
            answers = self.reader.answers_after(evaluated) if evaluated else {}
            for step in steps:
                self.call_since_s = time.monotonic()
                number = step["step"]
                if number in answers:
                    tracker.log_answers(number, [self._redacted(answer) for answer in answers[number]])
                tracker.log_step(number, step_scalars(step))
                self.last_step = number
            if len(steps) == CATCH_UP_STEPS:
                self.closing.wait(CATCH_UP_PAUSE_S)
        self.call_since_s = time.monotonic()
        tracker.flush()
        self.num_failures = 0

    def _redacted(self, answer: ShownAnswer) -> ShownAnswer:
        question, expected, answered = map(self.redact, (answer.question, answer.expected, answer.answered))
        return ShownAnswer(question, expected, answered, answer.pictures)

    def _failed(self, tracker: Tracker | None, error: Exception) -> None:
        self.call_since_s = None
        self.num_failures += 1
        if not self.has_failed:
            self.has_failed = True
            reason = self.redact(f"{type(error).__name__}: {error}")
            self.notify(
                f"tracker {self.name}: {reason}. The training goes on; the tracker is tried again, and metrics.jsonl "
                "has every step"
            )
        if tracker is not None:
            with contextlib.suppress(Exception):  # it has failed already, and the user knows
                tracker.abandon()
        if self.num_failures < MAX_TRACKER_FAILURES:
            self.closing.wait(min(self.limits.first_retry_s * 2 ** (self.num_failures - 1), MAX_RETRY_S))

    def notice_silence(self) -> None:
        """Tell the user, once, of a tracker that does not answer."""
        since_s = self.call_since_s
        if self.was_silent or since_s is None or time.monotonic() - since_s < self.limits.silent_s:
            return
        self.was_silent = True
        self.notify(
            f"tracker {self.name}: no answer for {self.limits.silent_s:.0f} s. The training goes on; metrics.jsonl has "
            "every step"
        )


class TrackerFeeds:
    """The trackers of a run, on the rank that logs. No method waits for a tracker, except `close` for a bounded time.

    Threads start with the first step: until then processes are forked, and a fork beside a thread that imports packages
    may copy a lock that nobody opens again.
    """

    def __init__(
        self,
        run: TrackedRun | None,
        openers: Mapping[str, Callable[[], Tracker]],
        notify: Callable[[str], None],
        summarize: Summarize = dict,
        limits: TrackerLimits = TrackerLimits(),
    ) -> None:
        redact = Redactor()
        self._summarize, self._limits, self._notify = summarize, limits, notify
        self._feeds = (
            []
            if run is None
            else [_Feed(name, opener, run, notify, redact, limits) for name, opener in openers.items()]
        )
        self._is_started = False
        self._is_complete = False

    def more(self, is_last: bool = False) -> None:
        """Say that the log has another step; `is_last`: the run is complete with it."""
        self._is_complete = self._is_complete or is_last
        for feed in self._feeds:
            if not self._is_started:
                feed.thread.start()
            feed.more.set()
            feed.notice_silence()
        self._is_started = True

    def last_steps(self) -> dict[str, int]:
        """Return the last step of which each tracker has heard."""
        return {feed.name: feed.last_step for feed in self._feeds}

    def close(self) -> None:
        """Let the trackers catch up and finish, for a bounded time; say which of them did not."""
        if not self._is_started:
            return
        end: RunEnd = "done" if self._is_complete else "interrupted"
        summary = self._summarize() if self._is_complete else {}
        for feed in self._feeds:
            feed.end, feed.summary = end, summary
            feed.closing.set()
            feed.more.set()
        end_s = time.monotonic() + (self._limits.end_s if self._is_complete else self._limits.interrupted_end_s)
        for feed in self._feeds:
            feed.thread.join(max(end_s - time.monotonic(), 0.0))
            if not feed.is_done:
                if feed.thread.is_alive():
                    expect_hang()
                self._notify(
                    f"tracker {feed.name}: it has the steps up to {feed.last_step} at most; metrics.jsonl has every "
                    "step"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
