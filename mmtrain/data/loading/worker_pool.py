"""A pool of worker processes that build steps: every submitted step comes back, even if workers crash or hang."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

import mmtrain.errors
from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.loading.batch_builder import StepBuilder, StepData, StepRequest
from mmtrain.data.loading.ipc import SharedStatus, create_memory_file, map_file, receive_message, send_message
from mmtrain.data.loading.step_format import to_json, unpack
from mmtrain.data.loading.storage_outage import ReadWatch, given_up
from mmtrain.data.remote.locations import known_versions
from mmtrain.data.remote.remote_files import redirect_hosts
from mmtrain.errors import MmtrainError, RunError
from mmtrain.system_calls import named_signals

MAX_DEATHS_PER_STEP = 3  # of workers, before the step is given up
MAX_FAULTS_PER_SAMPLE = 2  # crashes and hangs over its media, before they are left out
HANG_TIMEOUT_S = 60.0  # that a worker may spend on one image, clip or video
HANG_CHECK_INTERVAL_S = 5.0
HOST_ANSWER_LIMIT_S = 300.0  # of starting Python and reading the index; forking a worker takes milliseconds
MAX_HOST_END_S = 2.0  # in which the host kills its workers and ends
_CRASH_SIGNALS = named_signals(("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"))  # caused by itself
# Workers are the parallelism: threads inside them would only compete.
_SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

Tag = TypeVar("Tag", bound=Hashable)


@dataclass(frozen=True)
class StepFailure:
    """Why a step could not be built, as texts that are sent between processes and machines."""

    kind: str  # name of the `MmtrainError`; empty for any other error, which is a bug
    message: str
    traceback: str

    def error(self, step: int) -> MmtrainError:
        """Return the error to raise; the traceback of a bug is in its message, any other in a note."""
        if not self.kind:
            return RunError(f"preparing step {step} failed: {self.message}\n{self.traceback}")
        kind = getattr(mmtrain.errors, self.kind, RunError)
        error: MmtrainError = kind(self.message)
        error.add_note(self.traceback)
        return error


@dataclass(frozen=True)
class _Job(Generic[Tag]):
    tag: Tag
    request: StepRequest


@dataclass
class _Worker(Generic[Tag]):
    pid: int
    pipe: socket.socket
    status: SharedStatus
    job: _Job[Tag] | None = None
    watch: ReadWatch = field(default_factory=ReadWatch)
    is_hung: bool = False


class WorkerPool(Generic[Tag]):
    """`size` worker processes. Not thread-safe.

    Call `submit` while there are idle workers; wait for `pipes` to become readable; `receive` from those that are; call
    `kill_hung_workers` every `HANG_CHECK_INTERVAL_S` seconds. A worker that dies is replaced and its step is built
    again; one step may cost `MAX_DEATHS_PER_STEP` workers. A worker that hangs is killed. The sample whose media a
    worker was reading when it crashed or hung is tried once more; after that its media are left out, as undecodable
    media are. A worker that waits for storage that is away does not hang; its step fails after the builder's
    patience.
    """

    def __init__(
        self,
        builder: StepBuilder,
        size: int,
        notify: NotifyCallback,
        clock: Callable[[], float] = time.monotonic,
        tell_outage: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start the workers.

        `notify` is called when one dies, and `clock` returns seconds. `tell_outage` is called by each
        `kill_hung_workers` with the storage that a worker waits for, or with an empty text.
        """
        self._notify = notify
        self._clock, self._tell_outage = clock, tell_outage
        self._sample_name = builder.name
        self._find_outage, self._patience_s = builder.find_outage, builder.patience_s
        self._faults: Counter[int] = Counter()  # sample id -> crashes and hangs over its media
        self._last_check_s = clock()
        self._builder_file: int | None = create_memory_file(
            [memoryview(pickle_for_process((builder, known_versions(), redirect_hosts()), "loader workers"))]
        )
        self._host: subprocess.Popen[bytes] | None = None
        self._deaths: Counter[Tag] = Counter()  # of workers, over each step
        self._workers: dict[socket.socket, _Worker[Tag]] = {}
        try:
            for _ in range(size):
                self._start_worker()
        except BaseException:
            self.close()
            raise

    @property
    def num_idle(self) -> int:
        """The number of steps that can be submitted now."""
        return sum(worker.job is None for worker in self._workers.values())

    @property
    def pipes(self) -> list[socket.socket]:
        """The pipes to wait on; they change when a worker is replaced."""
        return list(self._workers)

    def submit(self, tag: Tag, request: StepRequest) -> None:
        """Let an idle worker build a step; `receive` will return the result with `tag`."""
        worker = next(worker for worker in self._workers.values() if worker.job is None)
        self._assign(worker, _Job(tag, request))

    def receive(self, pipe: socket.socket) -> tuple[Tag, memoryview | StepFailure] | None:
        """Read from a readable pipe: return a tag and its step in wire format; None if the worker had died instead."""
        worker = self._workers.get(pipe)
        if worker is None:
            return None
        message = receive_message(pipe)
        if message is None:
            return self._replace(worker)
        assert worker.job is not None, "a worker sends nothing unless it has a job"
        tag = worker.job.tag
        worker.job = None
        self._deaths.pop(tag, None)
        answer, files = message
        return tag, StepFailure(**answer["error"]) if "error" in answer else map_file(files[0])

    def kill_hung_workers(self) -> None:
        """Kill workers that hang; `receive` will notice that they died and assign their steps to others."""
        now_s = self._clock()
        # If nobody checked for so long, all processes were paused: by a scheduler, or by the lid of a laptop.
        was_paused = now_s - self._last_check_s > HANG_TIMEOUT_S
        self._last_check_s = now_s
        for worker in self._workers.values():
            if worker.job is None or worker.is_hung:
                continue
            stuck_s = worker.watch.look(worker.status, now_s, self._find_outage, was_paused)
            # One that waits by itself gives up by itself.
            is_forsaken = worker.watch.outage_s(now_s) > self._patience_s + HANG_TIMEOUT_S
            if stuck_s > HANG_TIMEOUT_S or is_forsaken:
                worker.is_hung = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
        outages = (worker.watch.outage for worker in self._workers.values() if worker.job is not None)
        self._tell_outage(next(filter(None, outages), ""))

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for pipe in self._workers:
            pipe.close()
        self._workers.clear()
        self._end_host()
        if self._builder_file is not None:
            os.close(self._builder_file)
            self._builder_file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _replace(self, dead: _Worker[Tag]) -> tuple[Tag, StepFailure] | None:
        """Replace a worker that died by a new one, which builds the step of the dead one.

        Returns the failure of that step if it has cost too many workers.
        """
        del self._workers[dead.pipe]
        dead.pipe.close()
        new, exit_status = self._start_worker(replaces=dead.pid)
        ended = f"hung for {HANG_TIMEOUT_S:g} s and was killed" if dead.is_hung else _describe_end(exit_status)
        job = dead.job
        if job is None:
            self._notify(f"loader worker {dead.pid} {ended} while idle; another has taken its place")
            return None
        if dead.is_hung and dead.watch.outage:
            error = given_up(dead.watch.outage, self._patience_s)
            return job.tag, StepFailure(type(error).__name__, str(error), "")
        _, sample = dead.status.read()
        if sample is not None and (dead.is_hung or _is_crash(exit_status)):
            self._faults[sample] += 1
            is_given_up = self._faults[sample] >= MAX_FAULTS_PER_SAMPLE
            then = "it is not read again" if is_given_up else "another tries it once more"
            self._notify(f"loader worker {dead.pid} {ended} while reading media of {self._sample_name(sample)}; {then}")
            self._assign(new, job)
            return None
        self._deaths[job.tag] += 1
        step = job.request.step
        if self._deaths[job.tag] < MAX_DEATHS_PER_STEP:
            self._notify(f"loader worker {dead.pid} {ended} while preparing step {step}; another prepares it")
            self._assign(new, job)
            return None
        num_deaths = self._deaths.pop(job.tag)
        text = f"preparing step {step} ended {num_deaths} worker processes; the last one {ended}"
        return job.tag, StepFailure("RunError", f"{text}. If memory ran out, lower data.workers or data.prefetch", "")

    def _assign(self, worker: _Worker[Tag], job: _Job[Tag]) -> None:
        worker.job = job
        worker.watch.start(self._clock())
        deadly = [sample for sample, faults in self._faults.items() if faults >= MAX_FAULTS_PER_SAMPLE]
        with contextlib.suppress(OSError):  # it has died, which reading from its pipe will show
            send_message(worker.pipe, {"request": to_json(job.request), "deadly": deadly})

    def _start_worker(self, replaces: int | None = None) -> tuple[_Worker[Tag], int | None]:
        """Let the host fork a worker.

        Returns it, and the exit status of the worker that it replaces, as `waitpid` gave it; None if that was lost.
        """
        for _ in range(MAX_DEATHS_PER_STEP):
            control = self._connect_host()
            ours, theirs = socket.socketpair()
            status_file = SharedStatus.create_file()
            try:
                with theirs:
                    send_message(control, {"replaces": replaces}, [theirs.fileno(), status_file])
                answer = receive_message(control)
            except OSError:
                answer = None
            if answer is not None:
                content, _ = answer
                worker = _Worker[Tag](content["pid"], ours, SharedStatus(map_file(status_file)))
                self._workers[ours] = worker
                return worker, content["ended"]
            os.close(status_file)
            ours.close()
            self._end_host()
        raise RunError("the process that starts loader workers ends at once; what it says is on stderr")

    def _connect_host(self) -> socket.socket:
        """Return the pipe of the host, which is started if there is none."""
        if self._host is None:
            assert self._builder_file is not None, "the pool is closed"
            self._pipe, theirs = socket.socketpair()
            with theirs:
                passed = (theirs.fileno(), self._builder_file)
                os.lseek(self._builder_file, 0, os.SEEK_SET)
                self._pipe.settimeout(HOST_ANSWER_LIMIT_S)  # one that is stopped answers nothing, and is replaced
                self._host = subprocess.Popen(
                    [sys.executable, "-P", "-m", "mmtrain.data.loading.worker_process", *map(str, passed)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=passed,
                    env=os.environ | _SINGLE_THREADED | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                    start_new_session=True,  # Ctrl-C is for the trainer
                )
        return self._pipe

    def _end_host(self) -> None:
        """End the host, which ends the workers; kill all of them if it does not: its process may be stopped."""
        if self._host is None:
            return
        self._pipe.close()
        try:
            self._host.wait(MAX_HOST_END_S)
        except subprocess.TimeoutExpired:
            self._notify(f"the process that starts loader workers did not end in {MAX_HOST_END_S:g} s; it is killed")
            # A session of its own, whose group no other process has joined; nobody else has collected the host.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._host.pid, signal.SIGKILL)
            self._host.wait()
        self._host = None


def _is_crash(exit_status: int | None) -> bool:
    """Return whether a process ended by its own fault, and not because someone or a lack of memory ended it."""
    return exit_status is not None and -os.waitstatus_to_exitcode(exit_status) in _CRASH_SIGNALS


def _describe_end(exit_status: int | None) -> str:
    """Describe how a process ended, from its status as `waitpid` gave it."""
    if exit_status is None:
        return "was lost"
    code = os.waitstatus_to_exitcode(exit_status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def pickle_for_process(value: object, receiver: str) -> bytes:
    """Pickle a value that is sent to `receiver`. Raises `RunError` that names the part which cannot be pickled."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # which one depends on the type of the part
        path, part = find_unpicklable(value)
        raise RunError(
            f"{type(value).__name__}{path} cannot be sent to {receiver}: {type(part).__name__} {part!r:.200}: "
            f"{type(error).__name__}: {error}. This is an error of mmtrain; please report it"
        ) from error


def find_unpicklable(value: object) -> tuple[str, object]:
    """Return the innermost part of `value` that cannot be pickled, and the way from `value` to it.

    >>> find_unpicklable({"readers": [len, lambda: 0]})[0]
    "['readers'][1]"
    """
    path = ""
    part = value
    visited = [value]
    while True:
        for step, inner in _parts(part):
            if not any(inner is known for known in visited) and not _can_be_pickled(inner):
                path += step
                part = inner
                visited.append(inner)
                break
        else:
            return path, part


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return False
    return True


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield what pickling a value pickles next, each with how an expression would reach it."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", entry) for key, entry in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", entry) for number, entry in enumerate(value))
    else:
        try:
            reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception:  # it is itself what cannot be pickled
            return
        if isinstance(reduced, str):  # pickled by its name
            return
        _, arguments, *rest = reduced
        yield from ((f"(argument {number})", argument) for number, argument in enumerate(arguments))
        state = rest[0] if rest else None
        # Of a class with slots the state is a tuple (attributes, slots), of some builtin classes any other tuple.
        for number, part in enumerate(state if isinstance(state, tuple) else (state,)):
            if isinstance(part, dict):
                yield from ((f".{name}", attribute) for name, attribute in part.items())
            else:
                yield f"(state {number})", part


def unpack_result(step: int, content: memoryview | StepFailure) -> StepData | Exception:
    """Turn what another process sent for a step into what a window accepts."""
    return content.error(step) if isinstance(content, StepFailure) else unpack(StepData, content)
