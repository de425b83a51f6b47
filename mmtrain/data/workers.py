"""A pool of worker processes that make steps: what is asked of them comes back, even if they do not."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import mmtrain.errors
from mmtrain.data.pipes import mapped, memory_file, receive, send
from mmtrain.data.prepare import StepMaker, StepRequest
from mmtrain.data.wire import to_json
from mmtrain.errors import MmtrainError, RunError

MAX_DEATHS = 3  # of workers over one step
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

Note = Callable[[str], None]
Tag = TypeVar("Tag", bound=Hashable)


@dataclass(frozen=True)
class Failure:
    """Why a step could not be made, as texts that go between machines."""

    kind: str  # name of the `MmtrainError`; empty: another error, which is a bug
    message: str
    traceback: str

    def error(self, step: int) -> MmtrainError:
        """The error to raise; the traceback is in the message of a bug, and in a note otherwise."""
        if not self.kind:
            return RunError(f"preparing step {step} failed: {self.message}\n{self.traceback}")
        kind = getattr(mmtrain.errors, self.kind, RunError)
        error: MmtrainError = kind(self.message)
        error.add_note(self.traceback)
        return error


@dataclass
class _Worker(Generic[Tag]):
    pid: int
    pipe: socket.socket
    job: tuple[Tag, StepRequest] | None = None


class Pool(Generic[Tag]):
    """`size` worker processes. Not for several threads at once.

    Submit while there are `idle` workers; wait for `pipes` to become readable; `receive` from those that are. A worker
    that dies is replaced and its step made again, which `note` is told; one step may cost `MAX_DEATHS` workers.
    """

    def __init__(self, maker: StepMaker, size: int, note: Note) -> None:
        """Start the workers."""
        self._note = note
        self._state = memory_file([memoryview(pickle.dumps(maker, pickle.HIGHEST_PROTOCOL))])
        self._host: subprocess.Popen[bytes] | None = None
        self._deaths: dict[Tag, int] = {}
        self._workers: dict[socket.socket, _Worker[Tag]] = {}
        try:
            for _ in range(size):
                self._fork()
        except BaseException:
            self.close()
            raise

    @property
    def idle(self) -> int:
        """How many steps can be submitted now."""
        return sum(worker.job is None for worker in self._workers.values())

    @property
    def pipes(self) -> list[socket.socket]:
        """What to wait on."""
        return list(self._workers)

    def submit(self, tag: Tag, request: StepRequest) -> None:
        """Have an idle worker make a step; what it becomes is received under `tag`."""
        worker = next(w for w in self._workers.values() if w.job is None)
        worker.job = tag, request
        with contextlib.suppress(OSError):  # it has died, which reading from its pipe will tell
            send(worker.pipe, {"request": to_json(request)})

    def receive(self, pipe: socket.socket) -> tuple[Tag, memoryview | Failure] | None:
        """Read from a readable pipe: a finished step in wire format; None where a worker had died instead."""
        worker = self._workers.get(pipe)
        if worker is None:
            return None
        message = receive(pipe)
        if message is None:
            return self._replace(worker)
        assert worker.job is not None, "a worker answers only what it was asked"
        (tag, _), worker.job = worker.job, None
        self._deaths.pop(tag, None)
        answer, files = message
        return tag, Failure(**answer["error"]) if "error" in answer else mapped(files[0])

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for pipe in self._workers:
            pipe.close()
        self._workers.clear()
        self._end_host()
        if self._state >= 0:
            os.close(self._state)
            self._state = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _replace(self, dead: _Worker[Tag]) -> tuple[Tag, Failure] | None:
        """Put a new worker in the place of one that died, to make what that one did not finish."""
        del self._workers[dead.pipe]
        dead.pipe.close()
        new, ended = self._fork(replaces=dead.pid)
        if dead.job is None:
            self._note(f"loader worker {dead.pid} {ended} while idle; another has taken its place")
            return None
        tag, request = dead.job
        deaths = self._deaths[tag] = self._deaths.get(tag, 0) + 1
        if deaths < MAX_DEATHS:
            self._note(f"loader worker {dead.pid} {ended} while preparing step {request.step}; another prepares it")
            new.job = dead.job
            with contextlib.suppress(OSError):
                send(new.pipe, {"request": to_json(request)})
            return None
        del self._deaths[tag]
        text = f"preparing step {request.step} ended {deaths} worker processes; the last one {ended}"
        return tag, Failure("RunError", f"{text}. If memory ran out, lower data.workers or data.prefetch", "")

    def _fork(self, replaces: int | None = None) -> tuple[_Worker[Tag], str]:
        """A new worker, and how the one that it replaces ended."""
        for _ in range(MAX_DEATHS):
            control = self._control()
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    send(control, {"replaces": replaces}, [theirs.fileno()])
                answer = receive(control)
            except OSError:
                answer = None
            if answer is not None:
                worker = _Worker[Tag](answer[0]["pid"], ours)
                self._workers[ours] = worker
                return worker, _how(answer[0]["ended"])
            ours.close()
            self._end_host()
        raise RunError("the process that starts loader workers ends at once; what it says is on stderr")

    def _control(self) -> socket.socket:
        """The host's pipe; a host is started where there is none."""
        if self._host is None:
            self._pipe, theirs = socket.socketpair()
            with theirs:
                passed = (theirs.fileno(), self._state)
                os.lseek(self._state, 0, os.SEEK_SET)
                self._host = subprocess.Popen(
                    [sys.executable, "-m", "mmtrain.data.worker", *map(str, passed)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=passed,
                    env=os.environ | _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                    start_new_session=True,  # Ctrl-C is for the trainer
                )
        return self._pipe

    def _end_host(self) -> None:
        if self._host is not None:
            self._pipe.close()
            self._host.wait()
            self._host = None


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _how(status: int | None) -> str:
    """How a process ended, from what `waitpid` gave."""
    if status is None:
        return "was lost"
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
