"""The recorder: notes when each action of a step begins and what it waits for, by the clock of the device."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from mmtrain.program import Action, Recv, Send
from mmtrain.program.trace.step_record import ActionRecord, MessageRecord, StepRecord


class DeviceClock(Protocol):
    """Takes marks that cost next to nothing and are turned into seconds when the step is over."""

    def start(self) -> None:
        """A step begins; marks of the one before are no longer wanted."""
        ...

    def mark(self) -> Any:
        """The moment that the device has reached."""
        ...

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When the marks were, in seconds of `time.perf_counter`; the last mark comes last."""
        ...


class HostClock:
    """For a CPU, on which an action is done when its call returns."""

    def __init__(self) -> None:
        self.mark = time.perf_counter

    def start(self) -> None:
        """See `DeviceClock`."""

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """See `DeviceClock`."""
        return list(marks)


class CudaClock:
    """For a GPU, whose kernels run long after they were launched: marks are events on the current stream.

    They are set against the host's clock once a step, by an event recorded when the device was idle.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def start(self) -> None:
        """See `DeviceClock`."""
        self._used = 0
        torch.cuda.synchronize()
        self._zero = self.mark()
        self._zero_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """See `DeviceClock`."""
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._used]
        event.record()
        self._used += 1
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """See `DeviceClock`."""
        marks[-1].synchronize()
        return [self._zero_s + self._zero.elapsed_time(mark) / 1e3 for mark in marks]


def clock_for(device: torch.device) -> DeviceClock:
    """The clock by which actions on the device are timed."""
    return CudaClock() if device.type == "cuda" else HostClock()


class StepRecorder:
    """Records one step at a time: `start_step`, then starts, waits and arrivals, then `stop_step`.

    A mark and an entry of a list for each, a microsecond together: cheap enough for every step. What is made of them
    is worked out in `stop_step`. What is noted outside a step is not kept.
    """

    def __init__(self, clock: DeviceClock | None = None) -> None:
        self._clock = clock or HostClock()
        self._on = False
        self._notes: list[tuple[Action | Send | Recv | str | None, int]] = []
        self._marks: list[Any] = []

    def start_step(self) -> None:
        """A step begins."""
        self._notes.clear()
        self._marks.clear()
        self._clock.start()
        self._on = True

    def start_action(self, doing: Action | str) -> None:
        """An action begins, and the one before it ends."""
        if self._on:
            self._notes.append((doing, _BEGIN))
            self._marks.append(self._clock.mark())

    def wait(self, message: Send | Recv) -> None:
        """The action in progress stands still for a message."""
        if self._on:
            self._notes.append((message, _WAIT))
            self._marks.append(self._clock.mark())

    def arrived(self, nbytes: int) -> None:
        """The message has come, with so many bytes."""
        if self._on:
            self._notes.append((None, nbytes))
            self._marks.append(self._clock.mark())

    def stop_step(self) -> StepRecord:
        """The step is over; say what happened in it."""
        self._notes.append((None, _END))
        self._marks.append(self._clock.mark())
        self._on = False
        return _record(self._notes, self._clock.seconds(self._marks))


_BEGIN, _WAIT, _END = -1, -2, -3  # anything else is the size of a message that came


def _record(notes: Sequence[tuple[Action | Send | Recv | str | None, int]], seconds: Sequence[float]) -> StepRecord:
    done: list[ActionRecord] = []
    moved: list[MessageRecord] = []
    posted: dict[Send | Recv, float] = {}
    doing: Action | Send | Recv | str | None = None
    began = waited = waiting_since = 0.0
    awaited: Send | Recv | None = None
    for (what, kind), now in zip(notes, seconds, strict=True):
        if kind == _WAIT:
            assert isinstance(what, Send | Recv)
            awaited, waiting_since = what, now
        elif kind >= 0:
            assert awaited is not None, "a message comes to who waits for it"
            took = now - waiting_since
            waited += took
            moved.append(MessageRecord(awaited, posted[awaited], now, took, kind))
        else:
            if doing is not None and not isinstance(doing, str):
                done.append(ActionRecord(doing, began, now, waited))
            doing, began, waited = what, now, 0.0
            if isinstance(what, Send | Recv):
                posted[what] = now
    return StepRecord(seconds[0], seconds[-1], tuple(done), tuple(moved))
