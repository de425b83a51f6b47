"""Fill a prefetch window with steps that producers on other machines build, whichever of them are alive."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.loading.batch_builder import RequestOf, StepData, StepRequest
from mmtrain.data.loading.ipc import Waker
from mmtrain.data.loading.prefetch_window import PrefetchWindow
from mmtrain.data.loading.step_format import WireError
from mmtrain.data.loading.worker_pool import HANG_CHECK_INTERVAL_S, WorkerPool, unpack_result
from mmtrain.data.service.keys import CurveKeys
from mmtrain.data.service.protocol import (
    MAX_STEP_BYTES,
    PINGS_PER_TIMEOUT,
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
    step_digest,
)
from mmtrain.errors import DataError, StorageAwayError

CLOSE_LINGER_MS = 200  # for the last message of a trainer to leave this machine
_MAX_RECONNECT_INTERVAL_MS = 5000
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
HANDSHAKE_RETRY_S = 5.0  # ZeroMQ does not try again by itself after some failures
MAX_RETRY_PAUSE_S = 1800.0  # before a producer that made no step is tried again


@dataclass(frozen=True)
class ProducerAccess:
    """Where producers listen, and how long to wait for them."""

    addresses: Sequence[str]
    timeout_s: float  # without a message
    step_timeout_s: float  # without a step, while it owes some
    keys: CurveKeys | None = None  # by which trainers and producers know each other


@dataclass
class _Stalls:
    """How often in a row a producer has answered and made nothing, and when to try it again."""

    count: int = 0
    retry_s: float = 0.0

    def add(self, now_s: float, pause_s: float) -> float:
        """Count a stall; return the pause until the next try, which doubles each time."""
        pause_s = min(pause_s * 2**self.count, MAX_RETRY_PAUSE_S)
        self.count += 1
        self.retry_s = now_s + pause_s
        return pause_s


@dataclass
class _Connection:
    """The connection to one producer."""

    address: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    state: Literal["greeted", "up", "refused", "silenced"] = "greeted"  # of "silenced" the sockets are closed
    was_up: bool = False  # at any time before, also over an earlier connection
    reason: str = ""  # why the producer refused
    is_handshake_reported: bool = False
    handshake_retry_s: float | None = None  # when to try a handshake again that failed
    credit: int = 0
    steps: set[int] = field(default_factory=set)  # requested and not yet received
    tried_step: int | None = None  # requested to try the producer again; others build it too
    stalls: _Stalls = field(default_factory=_Stalls)
    last_progress_s: float = 0.0  # when it sent a step, or was asked for one when it owed none
    last_heard_s: float = 0.0
    last_sent_s: float = 0.0

    @property
    def owes_steps(self) -> bool:
        """Whether requested steps have not arrived."""
        return bool(self.steps) or self.tried_step is not None

    @property
    def is_trusted(self) -> bool:
        """Whether it gets steps that nobody else builds."""
        return self.state == "up" and not self.stalls.count

    def request(self, request: StepRequest, now_s: float) -> None:
        """Request a step."""
        if not self.owes_steps:
            self.last_progress_s = now_s
        self.send(Want(request), now_s)

    def send(self, message: FromTrainer, now_s: float) -> None:
        """Send a message; it is lost if the connection breaks before it is delivered."""
        self.last_sent_s = now_s
        with suppress(zmq.Again):  # the connection is broken now, which the monitor tells next
            self.socket.send_multipart(encode_message(message), zmq.NOBLOCK)


class RemoteStepBuilder:
    """Lets producers build the steps of a window, or this machine while there is no producer.

    A producer is lost when its connection breaks or it is silent for `timeout_s`. Its steps are released at once for
    other producers, and it gets requests again as soon as it answers. A producer that answers and makes no step for
    `step_timeout_s` loses its steps too. It is tried again with a step that others build as well, and gets requests as
    before once it makes one. So is one that sends what cannot be read, and its connection is closed until then. While
    there is no other producer, steps are built by worker processes of this machine: at the start only after
    `timeout_s`, later immediately.
    """

    def __init__(
        self,
        window: PrefetchWindow[StepData],
        access: ProducerAccess,
        request_of: RequestOf,
        facts: Mapping[str, str],
        start_local_pool: Callable[[], WorkerPool[int]],
        notify: NotifyCallback,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to run; `start_local_pool` is called when workers of this machine are first needed."""
        self._clock = clock
        self._window = window
        self._access = access
        self._request_of = request_of
        self._facts = dict(facts)
        self._timeout_s = access.timeout_s
        self._start_local_pool = start_local_pool
        self._notify = notify
        self._context = zmq.Context()
        self._connections: dict[str, _Connection] = {}
        self._start_s = self._clock()
        self._pool: WorkerPool[int] | None = None
        self._num_monitors = 0  # so far
        self._has_warned = False  # that no producer answers

    def run(self) -> None:
        """Build steps until the window closes. Raises `DataError` when all producers refuse."""
        with ExitStack() as stack:
            waker = stack.enter_context(Waker())
            stack.callback(self._close)
            self._window.add_waker(waker.wake)
            for address in self._access.addresses:
                self._connections[address] = self._connect(address)
            while not self._window.closed:
                self._assign_steps()
                self._wait_and_handle(waker)

    def _connect(self, address: str) -> _Connection:
        """Open a connection; its greeting is delivered as soon as a producer listens at the other end."""
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_STEP_BYTES)
        socket.set(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_INTERVAL_MS)
        socket.set(zmq.SNDHWM, 0)  # no limits: credit bounds what is sent
        socket.set(zmq.RCVHWM, 0)
        if self._access.keys is not None:
            self._access.keys.authenticate_trainer(socket)
        # Before connecting, so that no event is missed, and under a name that is never used again: by default it holds
        # the socket's file descriptor, which a new socket may get while the address of the old one is still taken.
        self._num_monitors += 1
        events = zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED
        monitor = socket.get_monitor_socket(events, f"inproc://monitor-{self._num_monitors}")
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise DataError(
                f"data.producers: {address} is not an address to connect to ({error.strerror}); "
                "expected tcp://HOST:PORT"
            ) from None
        connection = _Connection(address, socket, monitor)
        connection.send(Hello(self._facts, self._timeout_s), self._clock())
        return connection

    def _assign_steps(self) -> None:
        """Request steps as far as credit permits, each from the producer with the fewest open requests."""
        self._try_stalled_producers()
        trusted = [connection for connection in self._connections.values() if connection.is_trusted]
        while free := [connection for connection in trusted if len(connection.steps) < connection.credit]:
            step = self._window.claim()
            if step is None:
                return
            connection = min(free, key=lambda candidate: len(candidate.steps))
            connection.request(self._request_of(step), self._clock())
            connection.steps.add(step)
        if not trusted and self._builds_locally():
            if self._pool is None:
                self._pool = self._start_local_pool()
            while self._pool.num_idle and (step := self._window.claim()) is not None:
                self._pool.submit(step, self._request_of(step))

    def _try_stalled_producers(self) -> None:
        """Request one step of each producer that made none before, when its pause is over; others build it too."""
        now_s = self._clock()
        for connection in self._connections.values():
            is_stalled = connection.state == "up" and connection.stalls.count > 0
            if not is_stalled or connection.tried_step is not None or now_s < connection.stalls.retry_s:
                continue
            step = self._window.claim()
            if step is None:
                return
            connection.request(self._request_of(step), self._clock())
            connection.tried_step = step
            self._window.release([step])

    def _builds_locally(self) -> bool:
        """Return whether to continue without producers; only at the start it is worth waiting for them."""
        connections = self._connections.values()
        if all(connection.state == "refused" for connection in connections):
            reasons = "; ".join(f"{c.address} refuses: {c.reason}" for c in connections)
            raise DataError(
                f"data.producers: {reasons}. Start `mmtrain data serve` with the recipe and the data of the run"
            )
        is_late = self._clock() - self._start_s > self._timeout_s
        builds_locally = is_late or any(connection.was_up for connection in connections)
        if builds_locally and not self._has_warned:
            self._has_warned = True
            addresses = ", ".join(self._connections)
            is_stalled = any(connection.stalls.count for connection in connections)
            what = "makes steps" if is_stalled else "answers"
            self._notify(f"no producer {what} ({addresses}); steps are prepared here until one does")
        return builds_locally

    def _wait_and_handle(self, waker: Waker) -> None:
        """Wait for messages, for workers and for the window, and handle everything that is there."""
        poller = zmq.Poller()
        poller.register(waker.fileno(), zmq.POLLIN)
        pipes = self._pool.pipes if self._pool is not None else []
        for pipe in pipes:
            poller.register(pipe, zmq.POLLIN)
        for connection in self._connections.values():
            if connection.state != "silenced":
                poller.register(connection.socket, zmq.POLLIN)
                poller.register(connection.monitor, zmq.POLLIN)
        shortest_s = min(self._timeout_s, self._access.step_timeout_s)
        timeout_s = min(HANG_CHECK_INTERVAL_S, shortest_s / PINGS_PER_TIMEOUT)
        ready = dict(poller.poll(round(1000 * timeout_s)))
        now_s = self._clock()  # before reading: a pause of ours must not count as a producer's silence
        waker.drain()
        if self._pool is not None:
            self._pool.kill_hung_workers()
        for pipe in pipes:
            assert self._pool is not None
            received = self._pool.receive(pipe) if pipe.fileno() in ready else None
            if received is not None:
                step, content = received
                self._window.put(step, unpack_result(step, content))
        for connection in list(self._connections.values()):
            if connection.state == "silenced":
                if now_s >= connection.stalls.retry_s:
                    self._connect_again(connection)
                continue
            self._read_messages(connection, now_s)
            if self._connections[connection.address] is connection:
                self._check_alive(connection, now_s, disconnected=connection.monitor in ready)

    def _read_messages(self, connection: _Connection, now_s: float) -> None:
        """Read everything that a producer has sent, unless that makes us drop the connection."""
        while self._connections[connection.address] is connection:
            try:
                frames = connection.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            connection.last_heard_s = now_s
            try:
                self._handle(connection, [frame.buffer for frame in frames], now_s)
            except WireError as error:
                self._silence(connection, now_s, f"sent a message that cannot be read ({error})")
                return

    def _handle(self, connection: _Connection, frames: list[memoryview], now_s: float) -> None:
        message = decode_message(frames)
        if isinstance(message, Made | Failed):
            self._handle_result(connection, message, frames, now_s)
        elif isinstance(message, Welcome):
            is_expected = connection.stalls.count > 0  # it never went away
            if connection.state != "up" and (self._has_warned or connection.was_up) and not is_expected:
                self._notify(f"producer {connection.address} is there")
            connection.state = "up"
            connection.credit = max(1, message.credit)
            connection.was_up = True
            connection.is_handshake_reported = False
            connection.handshake_retry_s = None
            if not is_expected:
                self._has_warned = False
        elif isinstance(message, Refused):
            connection.state = "refused"
            connection.reason = message.reason
            self._notify(f"producer {connection.address} refuses: {message.reason}")
            self._window.release(connection.steps)
            connection.steps.clear()
            connection.tried_step = None
        elif isinstance(message, Leaving):
            self._reconnect(connection, "has left")
        elif isinstance(message, Unknown):
            self._reconnect(connection, "does not know this trainer any more")

    def _handle_result(
        self, connection: _Connection, message: Made | Failed, frames: list[memoryview], now_s: float
    ) -> None:
        if message.step not in connection.steps and message.step != connection.tried_step:
            raise WireError(f"step {message.step} was not requested")
        if isinstance(message, Failed) and message.failure.kind == StorageAwayError.__name__:
            self._suspend(connection, now_s, f"cannot read its data ({message.failure.message})")
            return
        if isinstance(message, Failed):
            result = unpack_result(message.step, message.failure)
        elif len(frames) == 3:
            request = self._request_of(message.step)
            if message.digest != step_digest(request, self._facts, frames[2]):
                raise WireError(f"step {message.step} is another one, or its bytes changed on the way")
            result = unpack_result(message.step, frames[2])
            if isinstance(result, StepData) and result.meta.step != message.step:
                raise WireError(f"step {message.step} is another one")
        else:
            raise WireError(f"step {message.step} came in {len(frames)} frames")
        connection.steps.discard(message.step)
        connection.last_progress_s = now_s
        if connection.stalls.count:
            connection.tried_step = None
            connection.stalls = _Stalls()
            self._has_warned = False
            self._notify(f"producer {connection.address} makes steps again")
        connection.send(Got(message.step), now_s)
        self._window.put(message.step, result)

    def _check_alive(self, connection: _Connection, now_s: float, disconnected: bool) -> None:
        """Notice that a producer is gone, and show the producer that this trainer is alive."""
        if disconnected:
            event = recv_monitor_message(connection.monitor)["event"]
            if event & _HANDSHAKE_FAILED:
                self._report_handshake(connection, now_s)
            elif connection.handshake_retry_s is not None:
                pass  # the connection that ends is that of the handshake
            elif connection.state == "up":
                self._reconnect(connection, "has closed the connection")
            else:  # ZeroMQ reconnects by itself, at growing intervals
                connection.state = "greeted"
                connection.send(Hello(self._facts, self._timeout_s), now_s)
        elif connection.handshake_retry_s is not None:
            if now_s >= connection.handshake_retry_s:
                self._reconnect(connection, "")
        elif connection.state == "up" and now_s - connection.last_heard_s > self._timeout_s:
            self._reconnect(connection, f"has been silent for {self._timeout_s:g} s")
        elif connection.owes_steps and now_s - connection.last_progress_s > self._access.step_timeout_s:
            timeout_s = self._access.step_timeout_s
            why = f"answers, but has made no step for {timeout_s:g} s (data.producer_step_timeout_s)"
            self._suspend(connection, now_s, why)
        elif connection.state == "up" and now_s - connection.last_sent_s > self._timeout_s / PINGS_PER_TIMEOUT:
            connection.send(Ping(), now_s)

    def _report_handshake(self, connection: _Connection, now_s: float) -> None:
        """Say once that producer and trainer did not recognize each other; try again later, over a new connection."""
        connection.handshake_retry_s = now_s + HANDSHAKE_RETRY_S
        if connection.is_handshake_reported:
            return
        connection.is_handshake_reported = True
        self._notify(
            f"producer {connection.address} and this trainer do not recognize each other: data.producer_secret is not "
            "the same in both, or set in one of them only"
        )

    def _suspend(self, connection: _Connection, now_s: float, why: str) -> None:
        """Take the steps of a producer that answers and makes nothing; over a new connection it owes none."""
        stalls = connection.stalls
        pause_s = stalls.add(now_s, self._access.step_timeout_s)
        self._reconnect(connection, f"{why}; it is tried again in {pause_s:g} s")
        self._connections[connection.address].stalls = stalls

    def _silence(self, connection: _Connection, now_s: float, why: str) -> None:
        """Take the steps of a producer that sends nonsense, and hear nothing of it for a while."""
        pause_s = connection.stalls.add(now_s, self._access.step_timeout_s)
        self._notify(f"producer {connection.address} {why}; it is tried again in {pause_s:g} s")
        self._disconnect(connection)
        connection.state = "silenced"
        self._window.release(connection.steps)
        connection.steps.clear()
        connection.tried_step = None

    def _connect_again(self, connection: _Connection) -> None:
        """Open a new connection to the producer of one that is closed."""
        new = self._connect(connection.address)
        new.was_up = connection.was_up
        new.is_handshake_reported = connection.is_handshake_reported
        new.stalls = connection.stalls
        self._connections[connection.address] = new

    def _reconnect(self, connection: _Connection, why: str) -> None:
        """Release a producer's steps, and start over with a new connection to it."""
        if connection.state == "up":
            released = f"; {len(connection.steps)} steps go to others" if connection.steps else ""
            self._notify(f"producer {connection.address} {why}{released}")
        self._disconnect(connection)
        connection.stalls = _Stalls()
        self._connect_again(connection)
        self._window.release(connection.steps)

    def _disconnect(self, connection: _Connection, linger_ms: int = 0) -> None:
        connection.socket.disable_monitor()
        connection.monitor.close(linger=0)
        connection.socket.close(linger=linger_ms)

    def _close(self) -> None:
        """Tell the producers, and end the workers of this machine, if there are any."""
        for connection in self._connections.values():
            if connection.state == "silenced":
                continue
            linger_ms = 0
            if connection.state == "up":
                connection.send(Bye(), self._clock())
                linger_ms = CLOSE_LINGER_MS
            self._disconnect(connection, linger_ms)
        self._context.destroy(linger=0)  # of sockets that an error left open; the others are closed
        if self._pool is not None:
            self._pool.close()
