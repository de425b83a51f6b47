"""Step builders that misbehave, for tests of workers, which import this module by name."""

import os
import resource
import signal
import sys
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np

from mmtrain.balance import BatchMeta
from mmtrain.data.loading.batch_builder import NO_MONITOR, ReadMonitor, StepData, StepRequest
from mmtrain.errors import DataError

EMPTY = np.zeros(0, dtype=np.int64)


@dataclass
class FakeStepBuilder:
    """Steps without samples."""

    def meta(self, request: StepRequest) -> BatchMeta:
        return BatchMeta(request.step, 0, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, {})

    def build(self, request: StepRequest, monitor: ReadMonitor = NO_MONITOR) -> StepData:
        return StepData(self.meta(request), {}, {}, ())

    def name(self, sample_id: int) -> str:
        return f"sample {sample_id}"

    @property
    def patience_s(self) -> float:
        return 3600.0

    def find_outage(self, sample_id: int) -> str:
        return ""


@dataclass
class DeadlyStepBuilder(FakeStepBuilder):
    """Kills its process when it builds step `step`: always, or only until the file `once` exists."""

    step: int
    once: str = ""

    def build(self, request: StepRequest, monitor: ReadMonitor = NO_MONITOR) -> StepData:
        if request.step == self.step and not (self.once and os.path.exists(self.once)):
            if self.once:
                open(self.once, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().build(request, monitor)


@dataclass
class HangingStepBuilder(FakeStepBuilder):
    """Hangs over sample 7 unless that is deadly; opening the pipe `reached` blocks until it has started."""

    reached: str

    def build(self, request: StepRequest, monitor: ReadMonitor = NO_MONITOR) -> StepData:
        if 7 not in monitor.deadly:
            monitor.on_read(7)
            open(self.reached, "w").close()
            threading.Event().wait()
        return super().build(request, monitor)


@dataclass
class SlowStepBuilder(FakeStepBuilder):
    """Reads three samples, each until the pipe `go` is opened; opening `reached` blocks until it has started one."""

    reached: str
    go: str

    def build(self, request: StepRequest, monitor: ReadMonitor = NO_MONITOR) -> StepData:
        for sample in range(3):
            monitor.on_read(sample)
            open(self.reached, "w").close()
            open(self.go).close()
        return super().build(request, monitor)


class CrashingStepBuilder(FakeStepBuilder):
    """Crashes over sample 7, as a decoder written in C would that follows a wrong pointer."""

    def build(self, request: StepRequest, monitor: ReadMonitor = NO_MONITOR) -> StepData:
        if 7 not in monitor.deadly:
            monitor.on_read(7)
            _crash()
        return super().build(request, monitor)


class CrashingAtOnceStepBuilder(FakeStepBuilder):
    """Crashes before it reads any sample."""

    def build(self, request: StepRequest, monitor: ReadMonitor = NO_MONITOR) -> NoReturn:
        _crash()


def _crash() -> NoReturn:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:  # until the signal is delivered
        os.kill(os.getpid(), signal.SIGSEGV)


class FailingStepBuilder(FakeStepBuilder):
    """Raises a user error in step 0 and a bug in step 1."""

    def build(self, request: StepRequest, monitor: ReadMonitor = NO_MONITOR) -> StepData:
        if request.step == 0:
            raise DataError("data.seq_len is wrong")
        raise KeyError("lost")


class StuckStepBuilder(FakeStepBuilder):
    """Never finishes."""

    def build(self, request: StepRequest, monitor: ReadMonitor = NO_MONITOR) -> NoReturn:
        while True:
            threading.Event().wait()


class TellingStepBuilder(FakeStepBuilder):
    """Raises an error that describes its process."""

    def build(self, request: StepRequest, monitor: ReadMonitor = NO_MONITOR) -> NoReturn:
        ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        raise DataError(f"torch {'torch' in sys.modules}, SIGTERM ignored {ignored}")


class UnloadableStepBuilder(FakeStepBuilder):
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


class UnsendableStepBuilder(FakeStepBuilder):
    """Cannot be pickled, because of one part of one of its attributes."""

    def __init__(self) -> None:
        self.readers = {"image": partial(int), "video": partial(int, lambda: 0)}
