"""Makers of steps that misbehave, for workers: they find this module by name."""

import os
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from mmtrain.balance import BatchMeta
from mmtrain.data.prepare import StepData, StepRequest
from mmtrain.errors import DataError

EMPTY = np.zeros(0, dtype=np.int64)


@dataclass
class Fake:
    """Steps without samples."""

    def meta(self, request: StepRequest) -> BatchMeta:
        return BatchMeta(request.step, 0, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, {})

    def make(self, request: StepRequest) -> StepData:
        return StepData(self.meta(request), {}, {}, ())


@dataclass
class Deadly(Fake):
    """Kills whoever makes step `step`: always, or until a file remembers that it has."""

    step: int
    once: str = ""

    def make(self, request: StepRequest) -> StepData:
        if request.step == self.step and not (self.once and os.path.exists(self.once)):
            if self.once:
                open(self.once, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().make(request)


class Failing(Fake):
    """A mistake of the user's in step 0, one of ours in step 1."""

    def make(self, request: StepRequest) -> StepData:
        if request.step == 0:
            raise DataError("data.seq_len is wrong")
        raise KeyError("lost")


class Stuck(Fake):
    """Never ends."""

    def make(self, request: StepRequest) -> NoReturn:
        while True:
            threading.Event().wait()


class Telling(Fake):
    """Fails with what it sees of its process."""

    def make(self, request: StepRequest) -> NoReturn:
        ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        raise DataError(f"torch {'torch' in sys.modules}, SIGTERM ignored {ignored}")


class Unloadable(Fake):
    """Cannot be read back."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)
