"""A producer: builds steps for trainers on other machines, which request them over ZeroMQ.

It knows nothing of the runs that it serves: every request says what to build. So any producer can build any step for
any trainer, and a restarted one can continue at once.
"""

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from socket import socket

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.index.data_index import build_index
from mmtrain.data.loading.batch_builder import StepBuilder, StepRequest
from mmtrain.data.loading.step_format import WireError
from mmtrain.data.loading.worker_pool import HANG_CHECK_INTERVAL_S, StepFailure, WorkerPool
from mmtrain.data.service.keys import CurveKeys, load_keys, require_keys_beyond_loopback
from mmtrain.data.service.protocol import (
    MAX_REQUEST_BYTES,
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    PINGS_PER_TIMEOUT,
    Bye,
    Failed,
    FromProducer,
    Got,
    Hello,
    Leaving,
    Made,
    Ping,
    Pong,
    Refused,
    Unknown,
    Want,
    Welcome,
    decode_message,
    describe_differences,
    encode_message,
    step_digest,
    step_facts,
)
from mmtrain.data.stream.count_groups import count_groups
from mmtrain.data.stream.group_stream import GroupStream
from mmtrain.errors import DataError
from mmtrain.recipe.settings.schema import Recipe

_Job = tuple[bytes, int]  # trainer, step
# When to probe the trainers after ZeroMQ has reported a broken connection: sending to it fails only a little later.
PROBE_DELAYS_S = 0.0, 0.05, 0.2, 1.0, 3.0
_MAX_POLL_S = 60.0  # without any trainer
_LINGER_MS = 1000  # for the last messages of a producer to leave this machine


@dataclass
class _Trainer:
    last_heard_s: float
    timeout_s: float
    requested: dict[int, StepRequest] = field(default_factory=dict)  # step -> request; not yet sent
    sent: set[int] = field(default_factory=set)  # steps, not yet confirmed by the trainer


class Producer:
    """Serves the steps of one recipe from `num_workers` processes."""

    def __init__(
        self,
        builder: StepBuilder,
        facts: Mapping[str, str],
        bind: str,
        num_workers: int,
        notify: NotifyCallback,
        keys: CurveKeys | None = None,
    ) -> None:
        """Listen at `bind`; raises `DataError` if that is not possible, or needs `keys` that are missing.

        facts: what a trainer must agree with, from `step_facts`. Each trainer may request twice as many steps at a time
        as there are workers, and in all as many are being built or wait for confirmation.
        """
        require_keys_beyond_loopback(bind, keys)
        self._facts = facts
        self._notify = notify
        self._credit = 2 * num_workers
        self._trainers: dict[bytes, _Trainer] = {}
        self._queue: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._probe_times_s: list[float] = []  # ascending
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # sending to a trainer that is gone raises an error
        self._socket.set(zmq.SNDHWM, 0)  # no limit: credit bounds what is sent
        self._socket.set(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._socket.set(zmq.LINGER, _LINGER_MS)
        self._authenticator: ThreadAuthenticator | None = None
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(credentials_provider=keys)
            keys.authenticate_producer(self._socket)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._stop_authenticator()
            self._context.destroy(linger=0)
            raise DataError(
                f"--bind: {bind} cannot be used: {error.strerror}; expected an address of this machine and a free "
                "port, such as tcp://0.0.0.0:5557"
            ) from None
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.address: str = self._socket.get_string(zmq.LAST_ENDPOINT)
        try:
            self._pool = WorkerPool[_Job](builder, num_workers, notify)
        except BaseException:
            self._close_socket()
            raise

    def serve(self, stop: int) -> None:
        """Serve until the descriptor `stop` becomes readable; then tell the trainers, and close."""
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, stop):
            poller.register(source, zmq.POLLIN)
        pipes: list[socket] = []
        try:
            while True:
                for pipe in pipes:
                    poller.unregister(pipe)
                pipes = self._pool.pipes  # those of workers that died are gone, and there are new ones
                for pipe in pipes:
                    poller.register(pipe, zmq.POLLIN)
                ready = dict(poller.poll(math.ceil(1000 * self._poll_timeout_s())))
                now_s = time.monotonic()  # before reading: a pause of ours must not count as a trainer's silence
                if stop in ready:
                    return
                self._read_messages(now_s)
                self._pool.kill_hung_workers()
                if self._monitor in ready:
                    recv_monitor_message(self._monitor)
                    self._probe_times_s = [now_s + delay_s for delay_s in PROBE_DELAYS_S]
                if self._probe_times_s and self._probe_times_s[0] <= now_s:
                    self._probe_times_s.pop(0)
                    self._probe_trainers()
                for pipe in pipes:
                    received = self._pool.receive(pipe) if pipe.fileno() in ready else None
                    if received is not None:
                        self._finish(*received)
                self._drop_silent_trainers(now_s)
                self._start_jobs()
        finally:
            self._close()

    def _poll_timeout_s(self) -> float:
        shortest_s = min((trainer.timeout_s for trainer in self._trainers.values()), default=_MAX_POLL_S)
        timeout_s = min(HANG_CHECK_INTERVAL_S, shortest_s / PINGS_PER_TIMEOUT)
        if self._probe_times_s:
            timeout_s = min(timeout_s, max(0.0, self._probe_times_s[0] - time.monotonic()))
        return timeout_s

    def _probe_trainers(self) -> None:
        """Find trainers whose connection is broken, which only sending shows: they must not hold any credit."""
        for trainer in list(self._trainers):
            self._send(trainer, Pong())

    def _drop_silent_trainers(self, now_s: float) -> None:
        for trainer, state in list(self._trainers.items()):
            if now_s - state.last_heard_s > state.timeout_s:
                self._drop_trainer(trainer, f"has been silent for {state.timeout_s:g} s")

    def _read_messages(self, now_s: float) -> None:
        """Read everything that trainers have sent."""
        while True:
            try:
                trainer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(trainer, decode_message(frames), now_s)
            except WireError as error:
                self._send(trainer, Refused(f"a message could not be read: {error}"))
                self._drop_trainer(trainer, f"sent a message that cannot be read: {error}")

    def _handle(self, trainer: bytes, message: object, now_s: float) -> None:
        if isinstance(message, Hello):
            self._handle_hello(trainer, message, now_s)
            return
        state = self._trainers.get(trainer)
        if state is None:
            if not isinstance(message, Bye):
                self._send(trainer, Unknown())
            return
        state.last_heard_s = now_s
        if isinstance(message, Want):
            step = message.request.step
            is_duplicate = step in state.requested or step in state.sent
            if is_duplicate or len(state.requested) + len(state.sent) >= self._credit:
                raise WireError(f"step {step} is requested twice or beyond the credit of {self._credit}")
            state.requested[step] = message.request
            self._queue.append((trainer, step))
        elif isinstance(message, Got):
            state.sent.discard(message.step)
        elif isinstance(message, Ping):
            self._send(trainer, Pong())
        elif isinstance(message, Bye):
            self._drop_trainer(trainer, "left")

    def _handle_hello(self, trainer: bytes, hello: Hello, now_s: float) -> None:
        self._drop_trainer(trainer)
        if not MIN_TIMEOUT_S <= hello.timeout_s <= MAX_TIMEOUT_S:
            raise WireError(f"a timeout of {hello.timeout_s} s")
        differences = describe_differences(self._facts, hello.facts)
        if differences:
            self._notify(f"trainer {_short_name(trainer)} refused: {differences}")
            self._send(trainer, Refused(differences))
            return
        self._trainers[trainer] = _Trainer(now_s, hello.timeout_s)
        self._notify(f"trainer {_short_name(trainer)} joined")
        self._send(trainer, Welcome(self._credit))

    def _start_jobs(self) -> None:
        """Give requests to idle workers, as long as there is room for their results."""
        num_unconfirmed = sum(len(trainer.sent) for trainer in self._trainers.values())
        while self._queue and self._pool.num_idle and len(self._running) + num_unconfirmed < self._credit:
            job = self._queue.popleft()
            trainer, step = job
            request = self._trainers[trainer].requested.get(step)
            if request is not None:
                self._running.add(job)
                self._pool.submit(job, request)

    def _finish(self, job: _Job, result: memoryview | StepFailure) -> None:
        """Send a worker's result, if the trainer still waits for it."""
        self._running.discard(job)
        trainer, step = job
        state = self._trainers.get(trainer)
        request = None if state is None else state.requested.pop(step, None)
        if state is None or request is None:
            return
        state.sent.add(step)
        if isinstance(result, StepFailure):
            self._send(trainer, Failed(step, result))
        else:
            self._send(trainer, Made(step, step_digest(request, self._facts, result)), result)

    def _send(self, trainer: bytes, message: FromProducer, step_bytes: memoryview | None = None) -> None:
        frames: list[bytes | memoryview] = [trainer, *encode_message(message)]
        if step_bytes is not None:
            frames.append(step_bytes)
        try:
            self._socket.send_multipart(frames, copy=False)
        except zmq.ZMQError:  # its connection is gone
            self._drop_trainer(trainer, "is gone")

    def _drop_trainer(self, trainer: bytes, why: str = "") -> None:
        """Forget a trainer and its requests; workers finish what they have started."""
        if self._trainers.pop(trainer, None) is not None:
            self._queue = deque(job for job in self._queue if job[0] != trainer)
            if why:
                self._notify(f"trainer {_short_name(trainer)} {why}")

    def _close(self) -> None:
        self._pool.close()
        for trainer in list(self._trainers):
            self._send(trainer, Leaving())
        self._close_socket()

    def _close_socket(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._stop_authenticator()
        self._context.term()

    def _stop_authenticator(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()


def _short_name(trainer: bytes) -> str:
    return trainer.hex()[:8]


def open_producer(recipe: Recipe, bind: str, num_workers: int, notify: NotifyCallback) -> Producer:
    """Open a producer of the recipe's steps. Raises `DataError` if the data or the address cannot be used."""
    keys = load_keys(recipe.data.producer_secret)
    require_keys_beyond_loopback(bind, keys)  # before reading the data, which may take long
    index = build_index(recipe, notify=notify)
    for remark in index.remarks():
        notify(remark)
    recipe = count_groups(recipe, index.lengths)
    # Trainers have others make what this machine cannot read.
    impatient = recipe.model_copy(update={"data": recipe.data.model_copy(update={"storage_patience_s": 0.0})})
    builder = StepBuilder(index, GroupStream.of(recipe, index), impatient)
    return Producer(builder, step_facts(recipe, index), bind, num_workers, notify, keys)
