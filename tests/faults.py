"""Faults that a test injects: `FailAt(rank=1, step=3, kind="kill", action=Backward)`."""

import errno
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mmtrain.checkpoint import LocalStorage, Storage
from mmtrain.checkpoint.storage import FileSum
from mmtrain.program import Action, Forward, Step
from mmtrain.runtime.execution.fault_points import FaultPoints

Kind = Literal[
    "kill",
    "stop",
    "hang",
    "exception",
    "out of memory",
    "slow",
    "nan",
    "corrupt",
    "disk full",
    "slow disk",
    "stuck disk",
    "kill saving",
    "signal saving",
    "signal",
    "signal launcher",
]
SLOW_S = 0.3  # that an action of kind `slow` takes longer
NUM_SLOW_PIECES = 8  # of a file that a slow disk writes
NUM_PIECES_BEFORE_STUCK = 3


@dataclass
class FailAt(FaultPoints):
    """Injects a fault on `rank` in `step` (from 0; or in each of a range), at the first action of type `action`.

    `nan` replaces the output of the step's forwards; `corrupt`, the kinds of disks and of `saving` concern the
    checkpoint after `step` steps. `once` is a file that records the fault, so that it does not repeat
    when the run restarts.
    """

    rank: int
    step: int | range
    kind: Kind
    action: type[Action] = Forward
    number: signal.Signals = signal.SIGTERM
    once: Path | None = None

    def start(self, rank: int) -> None:
        """See `FaultPoints`."""
        self._is_here = rank == self.rank
        self._done_steps: set[int] = set()

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        if self.kind in ("nan", *_DISKS) or not isinstance(action, self.action) or not self._due(step):
            return
        self._done_steps.add(step)
        match self.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                threading.Event().wait()
            case "exception":
                raise ValueError("a failure injected by the test")
            case "out of memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            case "slow":
                threading.Event().wait(SLOW_S)
            case "signal":
                os.kill(os.getpid(), self.number)
            case "signal launcher":
                os.kill(os.getppid(), self.number)

    def forward_output(self, step: int, action: Action, output: Tensor) -> Tensor:
        """See `FaultPoints`."""
        return output * torch.nan if self.kind == "nan" and self._due(step) else output

    def checkpoint_storage(self, step: int) -> Storage:
        """See `FaultPoints`."""
        disk = _DISKS.get(self.kind)
        return disk() if disk is not None and self._due(step) else LocalStorage()

    def _due(self, step: int) -> bool:
        steps = self.step if isinstance(self.step, range) else range(self.step, self.step + 1)
        if not self._is_here or step not in steps or step in self._done_steps:
            return False
        if self.once is not None:
            if self.once.exists():
                return False
            self.once.touch()
        return True


@dataclass
class SignalBeforeSteps(FaultPoints):
    """Signals the process of `rank` before its first step; SIGSTOP does what a debugger or the system would."""

    rank: int
    number: signal.Signals = signal.SIGSTOP

    def start(self, rank: int) -> None:
        """See `FaultPoints`."""
        if rank == self.rank:
            os.kill(os.getpid(), self.number)


@dataclass
class SignalInValidation(FaultPoints):
    """Signals the process of `rank` in the first forward after the weights of `step` (from 0) were updated; once."""

    rank: int
    step: int
    number: signal.Signals
    once: Path

    def start(self, rank: int) -> None:
        """See `FaultPoints`."""
        self._is_here, self._has_updated = rank == self.rank, False

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        if isinstance(action, Step):
            self._has_updated = step == self.step
        elif self._is_here and self._has_updated and isinstance(action, Forward) and not self.once.exists():
            self.once.touch()
            os.kill(os.getpid(), self.number)


class AllOf(FaultPoints):
    """Several faults in one run; the first decides where checkpoints go."""

    def __init__(self, *faults: FaultPoints) -> None:
        self.faults = faults

    def start(self, rank: int) -> None:
        """See `FaultPoints`."""
        for fault in self.faults:
            fault.start(rank)

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        for fault in self.faults:
            fault.before_action(step, action)

    def forward_output(self, step: int, action: Action, output: Tensor) -> Tensor:
        """See `FaultPoints`."""
        for fault in self.faults:
            output = fault.forward_output(step, action, output)
        return output

    def checkpoint_storage(self, step: int) -> Storage:
        """See `FaultPoints`."""
        return self.faults[0].checkpoint_storage(step)


class _FullDisk(LocalStorage):
    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """Write a part of the file, then fail."""
        path.write_bytes(b"".join(bytes(chunk) for chunk in chunks)[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class _BadDisk(LocalStorage):
    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """Write the file, then flip a bit of it."""
        written = super().write(path, chunks)
        if path.suffix == ".safetensors":
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        return written


class _SlowDisk(LocalStorage):
    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """Take a while for each of the first pieces."""
        return super().write(path, _delayed(chunks, NUM_SLOW_PIECES, SLOW_S))


class _StuckDisk(LocalStorage):
    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """Write some pieces, then none any more."""
        return super().write(path, _stuck_after(chunks, NUM_PIECES_BEFORE_STUCK))


class _KillsWriter(LocalStorage):
    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """End the process with half a file."""
        path.write_bytes(b"".join(bytes(chunk) for chunk in chunks)[:100])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class _SignalsWriter(LocalStorage):
    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """Ask the process to stop, and write the file."""
        os.kill(os.getpid(), signal.SIGTERM)
        return super().write(path, chunks)


def _delayed(chunks: Iterable[bytes | memoryview], count: int, seconds: float) -> Iterator[bytes | memoryview]:
    for number, chunk in enumerate(chunks):
        if number < count:
            threading.Event().wait(seconds)
        yield chunk


def _stuck_after(chunks: Iterable[bytes | memoryview], count: int) -> Iterator[bytes | memoryview]:
    for number, chunk in enumerate(chunks):
        if number == count:
            threading.Event().wait()
        yield chunk


_DISKS: dict[Kind, type[LocalStorage]] = {
    "disk full": _FullDisk,
    "corrupt": _BadDisk,
    "slow disk": _SlowDisk,
    "stuck disk": _StuckDisk,
    "kill saving": _KillsWriter,
    "signal saving": _SignalsWriter,
}
