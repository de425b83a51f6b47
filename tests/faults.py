"""Faults that a test injects: `FailAt(rank=1, step=3, kind="kill", action=Backward)`."""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mmtrain.checkpoint import LocalStorage, Storage
from mmtrain.checkpoint.storage import FileSum
from mmtrain.program import Action, Backward, Forward, Step
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.execution.optimizer import Optimizer
from mmtrain.runtime.resilience.signals import STOP_LISTENER_THREAD, StopSignalListener
from tests.waiting import poll

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
    "signal",
    "signal launcher",
    "close terminal",
]
Phase = Literal["start", "step", "save", "evaluate", "shutdown"]
PHASES: tuple[Phase, ...] = get_args(Phase)
# `train.watchdog_s` of runs in which a rank hangs: far more than an action of these small runs takes on a busy machine.
WATCHDOG_S = 4.0
SLOW_S = WATCHDOG_S / 5  # that an action of kind `slow` takes longer
NUM_SLOW_PIECES = 6  # of a file that a slow disk writes; together they take longer than the watchdog waits
NUM_PIECES_BEFORE_STUCK = 3
_STOPPING: tuple[Kind, ...] = ("signal", "signal launcher", "close terminal")
_SURVIVED: tuple[Kind, ...] = ("slow", "exception")  # the latter while a checkpoint is saved


@dataclass
class FailAt(FaultPoints):
    """Injects a fault on `rank` in `step` (from 0; or in each of a range), at the first action of type `action`.

    `nan` replaces the output of the step's forwards; `corrupt`, the kinds of disks concern the
    checkpoint after `step` steps. `once` is a file that records the fault, so that it does not repeat
    when the run restarts. After a signal, to itself or to its launcher, the rank waits in the action until it has noted
    that it is to stop: by itself the signal may arrive in any later step.
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
        _inject(self.kind, self.number)
        if self.kind in _STOPPING:
            poll(_has_noted_a_stop_signal)

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
class FailInEachPhase(FaultPoints):
    """Injects a fault on `rank` in each of `phases`, one for each start of the run, or more if the run survives it.

    `start` is just before the first step, `step` in the first step of this start. `save` is while the checkpoint after
    it is written, `evaluate` in the first validation, and `shutdown` while the last checkpoint is written, after
    `num_steps`. The files of `folder` name the phases that were reached, so that this works over restarts.

    A fault that stops the run arrives in the phase: the rank waits there until it has noted that it is to stop.
    """

    folder: Path
    kind: Kind
    num_steps: int
    rank: int = 1
    number: signal.Signals = signal.SIGTERM
    phases: tuple[Phase, ...] = PHASES

    @property
    def next_phase(self) -> Phase | None:
        """The first phase without a fault so far."""
        return next((phase for phase in self.phases if not (self.folder / phase).exists()), None)

    def start(self, rank: int) -> None:
        """See `FaultPoints`."""
        self._phase = self.next_phase if rank == self.rank else None
        self._has_updated = False
        self._fail_in("start")

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        if isinstance(action, Step):
            self._has_updated = True
        elif isinstance(action, Forward):
            self._fail_in("evaluate" if self._has_updated else "step")

    def checkpoint_storage(self, step: int) -> Storage:
        """See `FaultPoints`."""
        phase: Phase = "shutdown" if step == self.num_steps else "save"
        return _FailingStorage(lambda: self._fail_in(phase)) if self._phase == phase else LocalStorage()

    def _fail_in(self, phase: Phase) -> None:
        if self._phase != phase:
            return
        (self.folder / phase).touch()
        self._phase = self.next_phase if self.kind in _SURVIVED else None
        _inject(self.kind, self.number)
        if self.kind in _STOPPING:
            poll(_has_noted_a_stop_signal)


@dataclass
class SignalBeforeSteps(FaultPoints):
    """Signals the process of `rank` before its first step; SIGSTOP does what a debugger or the system would."""

    rank: int
    number: signal.Signals = signal.SIGSTOP

    def start(self, rank: int) -> None:
        """See `FaultPoints`."""
        if rank == self.rank:
            os.kill(os.getpid(), self.number)
            if self.number != signal.SIGSTOP:
                poll(_has_noted_a_stop_signal)


@dataclass
class FlipBit(FaultPoints):
    """Flips a bit of what `rank` holds under a name, once.

    It does so before the first backward of `step` (from 0), or in its update. `once` is a file that records the fault.
    Where its folder does not exist, the bit flips again after each restore.
    """

    rank: int
    step: int
    name: str
    once: Path
    in_update: bool = False

    def start(self, rank: int) -> None:
        """See `FaultPoints`."""
        self._is_here = rank == self.rank and not self.once.exists()

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """See `FaultPoints`."""
        self._optimizer, self._next_step = optimizer, 0
        if self._is_here and self.in_update:
            for unit in optimizer.units.values():
                unit.step = partial(self._step, unit.step)  # type: ignore[method-assign]

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        self._next_step = step
        if self._is_here and not self.in_update and step == self.step and isinstance(action, Backward):
            self._flip()

    def _step(self, step: Callable[..., None], *arguments: Any) -> None:
        step(*arguments)
        if self._is_here and self._next_step == self.step:
            self._flip()

    def _flip(self) -> None:
        self._is_here = False
        if self.once.parent.exists():
            self.once.touch()
        [held] = [held for held in self._optimizer.held() if held.name == self.name]
        content = held.tensor.detach().view(-1).view(torch.uint8).numpy()  # autograd does not see what numpy writes
        content[1] ^= 1


class AllOf(FaultPoints):
    """Several faults in one run; the first decides where checkpoints go."""

    def __init__(self, *faults: FaultPoints) -> None:
        self.faults = faults

    def start(self, rank: int) -> None:
        """See `FaultPoints`."""
        for fault in self.faults:
            fault.start(rank)

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """See `FaultPoints`."""
        for fault in self.faults:
            fault.take_optimizer(optimizer)

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


class _FailingStorage(LocalStorage):
    def __init__(self, fail: Callable[[], None]) -> None:
        self._fail = fail

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """Fail with half a file; write it if that is survived."""
        content = b"".join(bytes(chunk) for chunk in chunks)
        path.write_bytes(content[: len(content) // 2])
        self._fail()
        path.unlink()
        return super().write(path, [content])


def _inject(kind: Kind, number: signal.Signals) -> None:
    """Do to this process, or to its launcher, what `kind` says."""
    match kind:
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
            os.kill(os.getpid(), number)
        case "signal launcher":
            os.kill(os.getppid(), number)


def _has_noted_a_stop_signal() -> bool:
    """Return whether the thread in which this process listens to stop signals has received one."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0) if thread.name == STOP_LISTENER_THREAD else None
        while frame is not None:
            listener = frame.f_locals.get("self")
            if isinstance(listener, StopSignalListener):
                return listener.stop_requested
            frame = frame.f_back
    raise AssertionError("this process does not listen to stop signals")


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
}
