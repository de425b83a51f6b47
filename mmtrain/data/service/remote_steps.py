"""Consuming steps that producers on other machines make, whichever of them live."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.loading.batch_builder import StepData
from mmtrain.data.loading.ipc import Waker
from mmtrain.data.loading.prefetch_window import PrefetchWindow
from mmtrain.data.loading.step_builders import RequestOf, unpack_result
from mmtrain.data.loading.step_format import WireError
from mmtrain.data.loading.worker_pool import HANG_CHECK_INTERVAL_S, WorkerPool
from mmtrain.data.service.protocol import (
    MAX_STEP_BYTES,
    PINGS_IN_TIMEOUT,
    Bye,
    Failed,
    FromTrainer,
    Got,
    Hello,
    Leaving,
    Made,
    Ping,
    Refused,
    Unknown,
    Want,
    Welcome,
    decode_message,
    encode_message,
)
from mmtrain.errors import DataError

CLOSE_LINGER_MS = 200  # for the last words of a trainer to leave this machine


@dataclass
class _Producer:
    """The connection to one producer."""

    address: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    state: Literal["asked", "up", "refused"] = "asked"
    was_up: bool = False
    refusal: str = ""
    credit: int = 0
    steps: set[int] = field(default_factory=set)  # asked for, not yet got
    heard_s: float = 0.0
    said_s: float = 0.0

    def say(self, message: FromTrainer, now: float) -> None:
        """Send; what the connection cannot take now is lost with the connection."""
        self.said_s = now
        self.socket.send_multipart(encode_message(message), zmq.NOBLOCK)


class RemoteStepBuilder:
    """Has the steps of a window made by producers, or here while there is none.

    A producer is lost when its connection breaks or it is silent for `timeout_s`; what it owed goes to others at once,
    and it is asked again as soon as it answers. Steps are made here, in worker processes, while no producer is up: at
    the start after `timeout_s`, later immediately.
    """

    def __init__(
        self,
        window: PrefetchWindow[StepData],
        addresses: Sequence[str],
        request_of: RequestOf,
        facts: Mapping[str, str],
        timeout_s: float,
        local_pool: Callable[[], WorkerPool[int]],
        notify: NotifyCallback,
    ) -> None:
        """`local_pool` starts workers of this machine, when they are first needed."""
        self._window, self._request_of, self._facts = window, request_of, dict(facts)
        self._timeout_s, self._local_pool, self._notify = timeout_s, local_pool, notify
        self._context = zmq.Context()
        self._addresses = addresses
        self._producers: dict[str, _Producer] = {}
        self._started_s = time.monotonic()
        self._pool: WorkerPool[int] | None = None
        self._warned = False

    def run(self) -> None:
        """Make steps until the window closes. Raises `DataError` when all producers refuse."""
        with ExitStack() as stack:
            waker = stack.enter_context(Waker())
            stack.callback(self._close)
            self._window.add_waker(waker.wake)
            for address in self._addresses:
                self._producers[address] = self._connect(address)
            while not self._window.closed:
                self._assign()
                self._wait(waker)

    def _connect(self, address: str) -> _Producer:
        """Open a connection; the greeting waits in it until somebody listens at the other end."""
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_STEP_BYTES)
        socket.set(zmq.RECONNECT_IVL_MAX, 5000)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)  # credit bounds what is under way
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise DataError(
                f"data.producers: {address} is no address to connect to ({error.strerror}); expected tcp://HOST:PORT"
            ) from None
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        producer = _Producer(address, socket, monitor)
        producer.say(Hello(self._facts, self._timeout_s), time.monotonic())
        return producer

    def _assign(self) -> None:
        """Ask for steps as far as credit goes, of the producer that owes least."""
        up = [producer for producer in self._producers.values() if producer.state == "up"]
        while free := [producer for producer in up if len(producer.steps) < producer.credit]:
            step = self._window.claim()
            if step is None:
                return
            chosen = min(free, key=lambda producer: len(producer.steps))
            chosen.steps.add(step)
            chosen.say(Want(self._request_of(step)), time.monotonic())
        if not up and self._alone():
            if self._pool is None:
                self._pool = self._local_pool()
            while self._pool.num_idle and (step := self._window.claim()) is not None:
                self._pool.submit(step, self._request_of(step))

    def _alone(self) -> bool:
        """Whether to go on without producers; only at the start there is time to wait for them."""
        producers = self._producers.values()
        if all(p.state == "refused" for p in producers):
            reasons = "; ".join(f"{p.address} refuses: {p.refusal}" for p in producers)
            raise DataError(
                f"data.producers: {reasons}. Start `mmtrain data serve` with the recipe and the data of the run"
            )
        waited = any(p.was_up for p in producers) or time.monotonic() - self._started_s > self._timeout_s
        if waited and not self._warned:
            self._warned = True
            self._notify(f"no producer answers ({', '.join(self._producers)}); steps are prepared here until one does")
        return waited

    def _wait(self, waker: Waker) -> None:
        """Take in whatever comes next."""
        poller = zmq.Poller()
        poller.register(waker.fileno(), zmq.POLLIN)
        pipes = self._pool.pipes if self._pool is not None else []
        for source in (*pipes, *(s for p in self._producers.values() for s in (p.socket, p.monitor))):
            poller.register(source, zmq.POLLIN)
        ready = dict(poller.poll(round(1000 * min(HANG_CHECK_INTERVAL_S, self._timeout_s / PINGS_IN_TIMEOUT))))
        now = time.monotonic()  # before reading, so that a pause of ours is not taken for one of theirs
        waker.drain()
        if self._pool is not None:
            self._pool.kill_hung_workers()
        for pipe in pipes:
            assert self._pool is not None
            if pipe.fileno() in ready and (received := self._pool.receive(pipe)) is not None:
                self._window.put(received[0], unpack_result(*received))
        for producer in list(self._producers.values()):
            self._hear(producer, now)
            if self._producers[producer.address] is producer:
                self._tend(producer, now, disconnected=producer.monitor in ready)

    def _hear(self, producer: _Producer, now: float) -> None:
        """Read everything that a producer has sent."""
        while self._producers[producer.address] is producer:
            try:
                frames = producer.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            producer.heard_s = now
            try:
                self._take(producer, [frame.buffer for frame in frames], now)
            except WireError as error:
                self._lose(producer, f"sent what cannot be read ({error})")

    def _take(self, producer: _Producer, frames: list[memoryview], now: float) -> None:
        message = decode_message(frames)
        if isinstance(message, Made | Failed):
            if message.step not in producer.steps:
                raise WireError(f"step {message.step} was not asked for")
            if isinstance(message, Failed):
                result = unpack_result(message.step, message.failure)
            elif len(frames) == 3:
                result = unpack_result(message.step, frames[2])
            else:
                raise WireError(f"step {message.step} came in {len(frames)} frames")
            producer.steps.discard(message.step)
            producer.say(Got(message.step), now)
            self._window.put(message.step, result)
        elif isinstance(message, Welcome):
            if producer.state != "up" and (self._warned or producer.was_up):
                self._notify(f"producer {producer.address} is there")
            producer.state, producer.credit, producer.was_up = "up", max(1, message.credit), True
            self._warned = False
        elif isinstance(message, Refused):
            producer.state, producer.refusal = "refused", message.reason
            self._notify(f"producer {producer.address} refuses: {message.reason}")
            self._window.release(producer.steps)
            producer.steps.clear()
        elif isinstance(message, Unknown | Leaving):
            self._lose(producer, "has left" if isinstance(message, Leaving) else "has forgotten this trainer")

    def _tend(self, producer: _Producer, now: float, disconnected: bool) -> None:
        """Notice that a producer is gone, and let it notice that we are here."""
        if disconnected:
            recv_monitor_message(producer.monitor)
            if producer.state == "up":
                self._lose(producer, "has closed the connection")
            else:  # the same connection tries again, ever more rarely
                producer.state = "asked"
                producer.say(Hello(self._facts, self._timeout_s), now)
        elif producer.state == "up" and now - producer.heard_s > self._timeout_s:
            self._lose(producer, f"has been silent for {self._timeout_s:g} s")
        elif producer.state == "up" and now - producer.said_s > self._timeout_s / PINGS_IN_TIMEOUT:
            producer.say(Ping(), now)

    def _lose(self, producer: _Producer, why: str) -> None:
        """Give a producer's steps back, and start over with it."""
        if producer.state == "up":
            owed = f"; {len(producer.steps)} steps go to others" if producer.steps else ""
            self._notify(f"producer {producer.address} {why}{owed}")
        self._disconnect(producer)
        self._producers[producer.address] = self._connect(producer.address)
        self._producers[producer.address].was_up = producer.was_up
        self._window.release(producer.steps)

    def _disconnect(self, producer: _Producer, linger_ms: int = 0) -> None:
        producer.socket.disable_monitor()
        producer.monitor.close(linger=0)
        producer.socket.close(linger=linger_ms)

    def _close(self) -> None:
        """Take leave of the producers, and end the workers that there may be."""
        for producer in self._producers.values():
            if producer.state == "up":
                producer.say(Bye(), time.monotonic())
            self._disconnect(producer, CLOSE_LINGER_MS if producer.state == "up" else 0)
        self._context.term()
        if self._pool is not None:
            self._pool.close()
