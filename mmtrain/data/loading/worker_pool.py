"""A pool of worker processes that make steps: what is asked of them comes back, even if they do not."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import mmtrain.errors
from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.loading.batch_builder import NO_SAMPLE, StepBuilder, StepRequest
from mmtrain.data.loading.ipc import SharedStatus, create_memory_file, map_file, receive_message, send_message
from mmtrain.data.loading.step_format import to_json
from mmtrain.errors import MmtrainError, RunError

MAX_DEATHS_PER_STEP = 3  # of workers over one step
MAX_FAULTS_PER_SAMPLE = 2  # crashes and hangs over the media of one sample, which are then not read again
HANG_TIMEOUT_S = 60.0  # that a worker may spend on one image, clip or video
HANG_CHECK_INTERVAL_S = 5.0  # how often to `kill_hung_workers` after them
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)  # by one's own doing
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


Tag = TypeVar("Tag", bound=Hashable)


@dataclass(frozen=True)
class StepFailure:
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
    status: SharedStatus
    job: tuple[Tag, StepRequest] | None = None
    shown: int = -1  # what its status said when something changed last
    since_s: float = 0.0  # when that was
    hangs: bool = False


class WorkerPool(Generic[Tag]):
    """`size` worker processes. Not for several threads at once.

    Call `submit` while there are idle workers; wait for `pipes` to become readable; `receive` from those that are; call
    `kill_hung_workers` every `HANG_CHECK_INTERVAL_S` seconds. A worker that dies is replaced and its step is built
    again; one step may cost `MAX_DEATHS_PER_STEP` workers. A worker that hangs is killed. The sample whose media a
    worker was reading when it crashed or hung is tried once more; after that its media are left out, as undecodable
    media are.
    """

    def __init__(
        self, builder: StepBuilder, size: int, notify: NotifyCallback, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the workers; `clock` tells seconds."""
        self._notify, self._clock, self._name = notify, clock, builder.name
        self._faults: Counter[int] = Counter()  # by sample id
        self._looked_s = clock()
        self._state = create_memory_file([memoryview(pickle.dumps(builder, pickle.HIGHEST_PROTOCOL))])
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
    def num_idle(self) -> int:
        """How many steps can be submitted now."""
        return sum(worker.job is None for worker in self._workers.values())

    @property
    def pipes(self) -> list[socket.socket]:
        """What to wait on."""
        return list(self._workers)

    def submit(self, tag: Tag, request: StepRequest) -> None:
        """Have an idle worker make a step; what it becomes is received under `tag`."""
        worker = next(w for w in self._workers.values() if w.job is None)
        self._ask(worker, (tag, request))

    def receive(self, pipe: socket.socket) -> tuple[Tag, memoryview | StepFailure] | None:
        """Read from a readable pipe: a finished step in wire format; None where a worker had died instead."""
        worker = self._workers.get(pipe)
        if worker is None:
            return None
        message = receive_message(pipe)
        if message is None:
            return self._replace(worker)
        assert worker.job is not None, "a worker answers only what it was asked"
        (tag, _), worker.job = worker.job, None
        self._deaths.pop(tag, None)
        answer, files = message
        return tag, StepFailure(**answer["error"]) if "error" in answer else map_file(files[0])

    def kill_hung_workers(self) -> None:
        """Kill workers that hang; what was asked of them is made by others, as `receive_message` finds out."""
        now = self._clock()
        paused, self._looked_s = now - self._looked_s > HANG_TIMEOUT_S, now  # all of us, by a scheduler or a closed lid
        for worker in self._workers.values():
            shown, _ = worker.status.read()
            if worker.job is None or worker.hangs:
                continue
            if shown != worker.shown or paused:
                worker.shown, worker.since_s = shown, now
            elif now - worker.since_s > HANG_TIMEOUT_S:
                worker.hangs = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)

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

    def _replace(self, dead: _Worker[Tag]) -> tuple[Tag, StepFailure] | None:
        """Put a new worker in the place of one that died, to make what that one did not finish."""
        del self._workers[dead.pipe]
        dead.pipe.close()
        new, status = self._fork(replaces=dead.pid)
        ended = f"hung for {HANG_TIMEOUT_S:g} s and was killed" if dead.hangs else _how(status)
        if dead.job is None:
            self._notify(f"loader worker {dead.pid} {ended} while idle; another has taken its place")
            return None
        tag, request = dead.job
        _, sample = dead.status.read()
        if sample != NO_SAMPLE and (dead.hangs or _crashed(status)):
            self._faults[sample] += 1
            then = (
                "it is not read again"
                if self._faults[sample] >= MAX_FAULTS_PER_SAMPLE
                else "another tries it once more"
            )
            self._notify(f"loader worker {dead.pid} {ended} while reading media of {self._name(sample)}; {then}")
            self._ask(new, dead.job)
            return None
        deaths = self._deaths[tag] = self._deaths.get(tag, 0) + 1
        if deaths < MAX_DEATHS_PER_STEP:
            self._notify(f"loader worker {dead.pid} {ended} while preparing step {request.step}; another prepares it")
            self._ask(new, dead.job)
            return None
        del self._deaths[tag]
        text = f"preparing step {request.step} ended {deaths} worker processes; the last one {ended}"
        return tag, StepFailure("RunError", f"{text}. If memory ran out, lower data.workers or data.prefetch", "")

    def _ask(self, worker: _Worker[Tag], job: tuple[Tag, StepRequest]) -> None:
        worker.job, worker.since_s = job, self._clock()
        deadly = [sample for sample, faults in self._faults.items() if faults >= MAX_FAULTS_PER_SAMPLE]
        with contextlib.suppress(OSError):  # it has died, which reading from its pipe will tell
            send_message(worker.pipe, {"request": to_json(job[1]), "deadly": deadly})

    def _fork(self, replaces: int | None = None) -> tuple[_Worker[Tag], int | None]:
        """A new worker, and the status with which the one that it replaces ended."""
        for _ in range(MAX_DEATHS_PER_STEP):
            control = self._control()
            ours, theirs = socket.socketpair()
            status = SharedStatus.create_file()
            try:
                with theirs:
                    send_message(control, {"replaces": replaces}, [theirs.fileno(), status])
                answer = receive_message(control)
            except OSError:
                answer = None
            if answer is not None:
                worker = _Worker[Tag](answer[0]["pid"], ours, SharedStatus(map_file(status)))
                self._workers[ours] = worker
                return worker, answer[0]["ended"]
            os.close(status)
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
                    [sys.executable, "-m", "mmtrain.data.loading.worker_process", *map(str, passed)],
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


def num_available_cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _crashed(status: int | None) -> bool:
    """Whether a process ended by a fault of its own, not because somebody or a lack of memory ended it."""
    return status is not None and -os.waitstatus_to_exitcode(status) in _CRASHES


def _how(status: int | None) -> str:
    """How a process ended, from what `waitpid` gave."""
    if status is None:
        return "was lost"
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
