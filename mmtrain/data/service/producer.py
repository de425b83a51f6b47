"""A producer: makes steps for trainers on other machines, which ask over ZeroMQ.

It knows nothing of the runs it serves. Every request says what to make, so any producer can make any step for anybody,
and one that is started anew goes on as if nothing had been.
"""

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from socket import socket

import zmq
from zmq.utils.monitor import recv_monitor_message

from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.index.data_index import build_index
from mmtrain.data.loading.batch_builder import StepBuilder, StepRequest
from mmtrain.data.loading.step_format import WireError
from mmtrain.data.loading.worker_pool import HANG_CHECK_INTERVAL_S, StepFailure, WorkerPool
from mmtrain.data.service.protocol import (
    MAX_REQUEST_BYTES,
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    PINGS_IN_TIMEOUT,
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
    step_facts,
)
from mmtrain.data.stream.group_stream import GroupStream
from mmtrain.errors import DataError
from mmtrain.recipe.schema import Recipe

_Job = tuple[bytes, int]  # trainer, step
# A connection is told to be broken a moment before sending to it fails.
PEER_CHECK_DELAYS_S = 0.0, 0.05, 0.2, 1.0, 3.0


@dataclass
class _Trainer:
    heard_s: float
    timeout_s: float
    wanted: dict[int, StepRequest] = field(default_factory=dict)  # not yet sent
    sent: set[int] = field(default_factory=set)  # not yet known to have arrived


class Producer:
    """Serves the steps of one recipe from `workers` processes."""

    def __init__(
        self,
        builder: StepBuilder,
        known_facts: Mapping[str, str],
        bind: str,
        workers: int,
        notify: NotifyCallback,
    ) -> None:
        """Listen at `bind`; raises `DataError` if that is not possible.

        Each trainer may ask for twice as many steps at a time as there are workers, and so many steps in all are made
        or held at a time.
        """
        self._facts, self._notify = known_facts, notify
        self._credit = 2 * workers
        self._trainers: dict[bytes, _Trainer] = {}
        self._queue: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._looks: list[float] = []  # when to look around, ascending
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # a trainer that is gone is an error, not silence
        self._socket.set(zmq.SNDHWM, 0)  # credit bounds what is under way
        self._socket.set(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._socket.set(zmq.LINGER, 1000)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise DataError(
                f"--bind: {bind} cannot be used: {error.strerror}; expected an address of this machine and a free "
                "port, such as tcp://0.0.0.0:5557"
            ) from None
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.address: str = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._pool = WorkerPool[_Job](builder, workers, notify)

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
                pipes = self._pool.pipes  # workers that died have left, others have come
                for pipe in pipes:
                    poller.register(pipe, zmq.POLLIN)
                least_s = min((trainer.timeout_s for trainer in self._trainers.values()), default=60.0)
                wait_s = min(HANG_CHECK_INTERVAL_S, least_s / PINGS_IN_TIMEOUT)
                if self._looks:
                    wait_s = min(wait_s, max(0.0, self._looks[0] - time.monotonic()))
                ready = dict(poller.poll(math.ceil(1000 * wait_s)))
                now = time.monotonic()  # before reading, so that a pause of ours is not taken for one of theirs
                if stop in ready:
                    return
                self._hear(now)
                self._pool.kill_hung_workers()
                if self._monitor in ready:
                    recv_monitor_message(self._monitor)
                    self._looks = [now + later_s for later_s in PEER_CHECK_DELAYS_S]
                if self._looks and self._looks[0] <= now:
                    self._looks.pop(0)
                    self._look_around()
                for pipe in pipes:
                    if pipe.fileno() in ready and (received := self._pool.receive(pipe)) is not None:
                        self._finish(*received)
                for trainer, known in list(self._trainers.items()):
                    if now - known.heard_s > known.timeout_s:
                        self._forget(trainer, f"has been silent for {known.timeout_s:g} s")
                self._start()
        finally:
            self._close()

    def _look_around(self) -> None:
        """Find out whose connection has broken: it can hold no more room, and only sending to it tells."""
        for trainer in list(self._trainers):
            self._say(trainer, Pong())

    def _hear(self, now: float) -> None:
        """Read everything that trainers have sent."""
        while True:
            try:
                trainer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._answer(trainer, decode_message(frames), now)
            except WireError as error:
                self._say(trainer, Refused(f"a message could not be read: {error}"))
                self._forget(trainer, f"sent what cannot be read: {error}")

    def _answer(self, trainer: bytes, message: object, now: float) -> None:
        if isinstance(message, Hello):
            self._forget(trainer)
            if not MIN_TIMEOUT_S <= message.timeout_s <= MAX_TIMEOUT_S:
                raise WireError(f"a timeout of {message.timeout_s} s")
            if different := describe_differences(self._facts, message.facts):
                self._notify(f"trainer {trainer.hex()[:8]} refused: {different}")
                self._say(trainer, Refused(different))
            else:
                self._trainers[trainer] = _Trainer(now, message.timeout_s)
                self._notify(f"trainer {trainer.hex()[:8]} joined")
                self._say(trainer, Welcome(self._credit))
            return
        known = self._trainers.get(trainer)
        if known is None:
            if not isinstance(message, Bye):
                self._say(trainer, Unknown())
            return
        known.heard_s = now
        if isinstance(message, Want):
            step = message.request.step
            if len(known.wanted) + len(known.sent) >= self._credit or step in known.wanted or step in known.sent:
                raise WireError(f"step {step} is asked for twice or beyond the credit of {self._credit}")
            known.wanted[step] = message.request
            self._queue.append((trainer, step))
        elif isinstance(message, Got):
            known.sent.discard(message.step)
        elif isinstance(message, Ping):
            self._say(trainer, Pong())
        elif isinstance(message, Bye):
            self._forget(trainer, "left")

    def _start(self) -> None:
        """Give idle workers what was asked for, as long as there is room for what they will make."""
        held = sum(len(trainer.sent) for trainer in self._trainers.values())
        while self._queue and self._pool.num_idle and len(self._running) + held < self._credit:
            job = self._queue.popleft()
            request = self._trainers[job[0]].wanted.get(job[1])
            if request is not None:
                self._running.add(job)
                self._pool.submit(job, request)

    def _finish(self, job: _Job, made: memoryview | StepFailure) -> None:
        """Send what a worker made, if the trainer is still there to get it."""
        self._running.discard(job)
        trainer, step = job
        known = self._trainers.get(trainer)
        if known is None or known.wanted.pop(step, None) is None:
            return
        known.sent.add(step)
        if isinstance(made, StepFailure):
            self._say(trainer, Failed(step, made))
        else:
            self._say(trainer, Made(step), made)

    def _say(self, trainer: bytes, message: FromProducer, step: memoryview | None = None) -> None:
        frames: list[bytes | memoryview] = [trainer, *encode_message(message), *([] if step is None else [step])]
        try:
            self._socket.send_multipart(frames, copy=False)
        except zmq.ZMQError:  # its connection is gone
            self._forget(trainer, "is gone")

    def _forget(self, trainer: bytes, why: str = "") -> None:
        """Drop what a trainer asked for; workers finish what they have begun."""
        if self._trainers.pop(trainer, None) is not None:
            self._queue = deque(job for job in self._queue if job[0] != trainer)
            if why:
                self._notify(f"trainer {trainer.hex()[:8]} {why}")

    def _close(self) -> None:
        self._pool.close()
        for trainer in list(self._trainers):
            self._say(trainer, Leaving())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()


def open_producer(recipe: Recipe, bind: str, workers: int, notify: NotifyCallback) -> Producer:
    """A producer of the recipe's steps. Raises `DataError` if the data or the address cannot be used."""
    index = build_index(recipe, notify=notify)
    for remark in index.remarks():
        notify(remark)
    builder = StepBuilder(index, GroupStream.of(recipe, index), recipe)
    return Producer(builder, step_facts(recipe, index), bind, workers, notify)
