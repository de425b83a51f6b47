"""Record when each action of a step starts and what it waits for, by the clock of the device."""

import time
from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import torch

from mmtrain.program import Action, Recv, Send
from mmtrain.program.trace.step_record import ActionRecord, MessageRecord, StepRecord


class DeviceClock(Protocol):
    """Takes marks at almost no cost, and turns them into seconds when the step is over."""

    def start(self) -> None:
        """Start a step; marks of the step before become invalid."""
        ...

    def mark(self) -> Any:
        """Mark the moment that the device has reached."""
        ...

    def has_passed(self, mark: Any) -> bool:
        """Return whether the device has reached the mark; a thread other than the one that took it may ask."""
        ...

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the times of the marks in seconds of `time.perf_counter`; the latest mark must come last."""
        ...


class HostClock:
    """The clock of a CPU, on which an action is done when its call returns."""

    def __init__(self) -> None:
        self.mark = time.perf_counter

    def start(self) -> None:
        """See `DeviceClock`."""

    def has_passed(self, mark: float) -> bool:
        """See `DeviceClock`."""
        return True

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """See `DeviceClock`."""
        return list(marks)


class CudaClock:
    """The clock of a GPU, whose kernels run long after their launch: marks are events on the current stream.

    An event recorded once a step on an idle device relates them to the host's clock.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._num_used = 0

    def start(self) -> None:
        """See `DeviceClock`."""
        self._num_used = 0
        torch.cuda.synchronize()
        self._zero = self.mark()
        self._zero_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """See `DeviceClock`."""
        if self._num_used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._num_used]
        event.record()
        self._num_used += 1
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        """See `DeviceClock`."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """See `DeviceClock`."""
        marks[-1].synchronize()
        return [self._zero_s + self._zero.elapsed_time(mark) / 1e3 for mark in marks]


def clock_for(device: torch.device) -> DeviceClock:
    """Return the clock by which actions on the device are timed."""
    return CudaClock() if device.type == "cuda" else HostClock()


class _NoteKind(Enum):
    START = auto()  # of an action; ends the one before
    WAIT = auto()  # of the action in progress for a message, or for reductions
    ARRIVED = auto()  # that message, or those
    END = auto()  # of the step


class _Note(NamedTuple):
    kind: _NoteKind
    subject: Action | str | None = None  # an action or a phase; the message that is waited for; None: reductions
    nbytes: int = 0  # that arrived


class DevicePosition(NamedTuple):
    """What a device is at while the host is ahead of it."""

    mark: int  # of the step, which grows as the device advances
    doing: Action | str
    waiting: Send | Recv | None  # the message that it waits for


class StepRecorder:
    """Records one step at a time: `start_step`, then starts, waits and arrivals, then `stop_step`.

    Each costs a mark and a list entry, a microsecond together: cheap enough for every step. `stop_step` works out what
    they mean. Nothing is recorded outside a step.
    """

    def __init__(self, clock: DeviceClock | None = None) -> None:
        self._clock = clock or HostClock()
        self._is_recording = False
        self._notes: list[_Note] = []
        self._marks: list[Any] = []

    def start_step(self) -> None:
        """Start recording a step."""
        # Not cleared: the watchdog's thread may be reading them.
        self._notes = []
        self._marks = []
        self._clock.start()
        self._is_recording = True

    def start_action(self, doing: Action | str) -> None:
        """Record that an action or a phase starts, and that the one before it has ended."""
        if self._is_recording:
            self._notes.append(_Note(_NoteKind.START, doing))
            self._marks.append(self._clock.mark())

    def wait(self, message: Send | Recv | None) -> None:
        """Record that the action in progress stands still for a message; None: for reductions started before."""
        if self._is_recording:
            self._notes.append(_Note(_NoteKind.WAIT, message))
            self._marks.append(self._clock.mark())

    def arrived(self, nbytes: int) -> None:
        """Record that what was awaited, a message of `nbytes`, has arrived."""
        if self._is_recording:
            self._notes.append(_Note(_NoteKind.ARRIVED, nbytes=nbytes))
            self._marks.append(self._clock.mark())

    def stop_step(self) -> StepRecord:
        """End the step; return what happened in it."""
        self._notes.append(_Note(_NoteKind.END))
        self._marks.append(self._clock.mark())
        self._is_recording = False
        return _to_record(self._notes, self._clock.seconds(self._marks))

    def device_position(self) -> DevicePosition | None:
        """Return what the device is at; None where it has done all that was launched. Any thread may ask.

        The first mark that the device has not passed stands behind it. A kernel that waits for another rank holds up
        the compute stream, so all later marks are ahead too, and the host may have launched the rest of the step.
        """
        notes, marks = self._notes, self._marks
        num_passed = bisect_left(range(len(marks)), True, key=lambda number: not self._clock.has_passed(marks[number]))
        if num_passed == len(marks):
            return None
        passed = notes[:num_passed]
        starts = [note.subject for note in passed if note.kind is _NoteKind.START]
        if not starts or starts[-1] is None:
            return None
        last = passed[-1]
        awaited = last.subject if last.kind is _NoteKind.WAIT and isinstance(last.subject, Send | Recv) else None
        return DevicePosition(num_passed, starts[-1], awaited)


def _to_record(notes: Sequence[_Note], seconds: Sequence[float]) -> StepRecord:
    """Turn notes and their times into the actions and messages of a step."""
    actions: list[ActionRecord] = []
    messages: list[MessageRecord] = []
    posted_s: dict[Send | Recv, float] = {}
    doing: Action | str | None = None
    start_s = 0.0  # of what is being done
    wait_s = 0.0  # of it, so far
    wait_start_s = 0.0
    awaited: Send | Recv | None = None
    for note, now_s in zip(notes, seconds, strict=True):
        if note.kind is _NoteKind.WAIT:
            awaited = note.subject if isinstance(note.subject, Send | Recv) else None
            wait_start_s = now_s
        elif note.kind is _NoteKind.ARRIVED:
            wait_s += now_s - wait_start_s
            if awaited is not None:
                record = MessageRecord(awaited, posted_s[awaited], now_s, now_s - wait_start_s, note.nbytes)
                messages.append(record)
        else:
            if doing is not None and not isinstance(doing, str):
                actions.append(ActionRecord(doing, start_s, now_s, wait_s))
            doing = note.subject
            start_s = now_s
            wait_s = 0.0
            if isinstance(doing, Send | Recv):
                posted_s[doing] = now_s
    return StepRecord(seconds[0], seconds[-1], tuple(actions), tuple(messages))
