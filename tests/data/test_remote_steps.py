"""Steps built by producers over the network are the same, whatever happens to the producers."""

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import zmq

from mmtrain.cli import app
from mmtrain.data import Loader
from mmtrain.data.loading.batch_builder import RequestOf, StepData, StepRequest
from mmtrain.data.loading.ipc import Waker
from mmtrain.data.loading.prefetch_window import PrefetchWindow
from mmtrain.data.loading.step_format import pack, unpack
from mmtrain.data.loading.worker_pool import StepFailure, WorkerPool
from mmtrain.data.service.keys import CurveKeys, is_local, load_keys
from mmtrain.data.service.producer import Producer
from mmtrain.data.service.protocol import (
    Failed,
    FromProducer,
    FromTrainer,
    Got,
    Hello,
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
from mmtrain.data.service.remote_steps import ProducerAccess, RemoteStepBuilder
from mmtrain.errors import DataError, RunError
from mmtrain.recipe import dump_recipe
from tests.data.fake_step_builders import FailingStepBuilder, FakeStepBuilder
from tests.data.producers import Served, asking
from tests.data.steps import DP, EVERYTHING, ONE, Dataset, same
from tests.waiting import MAX_WAIT_S, poll

FACTS = {"train.seed": "0"}


@pytest.mark.slow
def test_steps_are_the_same_while_producers_come_and_go(made: Dataset, tmp_path: Path) -> None:
    recipe, index, stream = made(prefetch=2)
    alone = made(prefetch=0)[0]
    notes: list[str] = []
    with ExitStack() as stack:
        first, second = (stack.enter_context(Served(recipe, tmp_path)) for _ in range(2))
        with_producers = asking(recipe, first.address, second.address)
        reference = stack.enter_context(Loader(index, stream, alone, StepRequest(3, DP, ONE, EVERYTHING)))
        loader = stack.enter_context(
            Loader(index, stream, with_producers, StepRequest(3, DP, ONE, EVERYTHING), notify=notes.append)
        )

        def steps(count: int) -> None:
            for _ in range(count):
                assert same(next(loader), next(reference))

        steps(8)
        assert notes == []
        first.process.kill()
        steps(16)
        assert [note for note in notes if f"{first.address} has closed the connection" in note]
        assert second.end()[0] == 0
        steps(16)
        assert [note for note in notes if f"{second.address} has left" in note]
        assert [note for note in notes if "no producer answers" in note and "prepared here" in note]
        restarted = stack.enter_context(Served(recipe, tmp_path, first.address))
        assert restarted.address == first.address
        while not [note for note in notes if f"{first.address} is there" in note]:
            steps(1)
        steps(8)


@pytest.mark.slow
def test_steps_are_the_same_through_random_kills(made: Dataset, tmp_path: Path) -> None:
    recipe, index, stream = made(prefetch=3, producer_timeout_s=1.0)
    alone = made(prefetch=0)[0]
    rng = random.Random(0)
    with ExitStack() as stack:
        producers = [stack.enter_context(Served(recipe, tmp_path)) for _ in range(2)]
        with_producers = asking(recipe, *(producer.address for producer in producers))
        reference = stack.enter_context(Loader(index, stream, alone, StepRequest(0, DP, ONE, EVERYTHING)))
        loader = stack.enter_context(Loader(index, stream, with_producers, StepRequest(0, DP, ONE, EVERYTHING)))
        for _ in range(14):
            for _ in range(rng.randrange(1, 100)):
                assert same(next(loader), next(reference))
            place = rng.randrange(2)
            victim = psutil.Process(producers[place].process.pid)
            match rng.choice(["kill", "end", "stop", "child"]):
                case "kill":
                    victim.kill()
                case "end":
                    producers[place].end()
                case "stop":
                    victim.suspend()
                    for _ in range(30):
                        assert same(next(loader), next(reference))
                    victim.resume()
                case "child":  # a worker, or the host of the workers
                    for process in rng.sample(victim.children(recursive=True), 1):
                        process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                producers[place].process.wait(0.1)
                restarted = stack.enter_context(Served(recipe, tmp_path, producers[place].address))
                assert restarted.address == producers[place].address
                producers[place] = restarted


def test_a_producer_with_other_settings_refuses_and_says_why(made: Dataset, tmp_path: Path) -> None:
    recipe, index, stream = made(prefetch=2)
    with Served(recipe, tmp_path, "tcp://127.0.0.1:*", "train.seed=7", "data.image.max_pixels=512") as producer:
        with_producers = asking(recipe, producer.address)
        with (
            Loader(index, stream, with_producers, StepRequest(0, DP, ONE, EVERYTHING), notify=print) as loader,
            pytest.raises(DataError, match=r"data.image.max_pixels is 1024 in the trainer and 512 here.*train.seed"),
        ):
            next(loader)
        code, stderr = producer.end()
        assert code == 0
        assert "refused: " in stderr


def test_an_unusable_bind_address_is_an_error(
    made: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, *_ = made()
    path = tmp_path / "served.yaml"
    path.write_text(dump_recipe(recipe))
    for address, message in (
        ("tcp://127.0.0.1:port", "--bind: tcp://127.0.0.1:port cannot be used"),
        ("tcp://0.0.0.0:5557", "--bind: tcp://0.0.0.0:5557 can be reached from other machines"),
    ):
        monkeypatch.setattr("sys.argv", ["mmtrain", "data", "serve", str(path), "--bind", address])
        with pytest.raises(SystemExit) as stop:
            app.main()
        assert stop.value.code == 2
        stderr = capsys.readouterr().err
        assert message in stderr
        assert "Traceback" not in stderr


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "tcp://127.0.0.1:port", "ipc://"])
def test_an_invalid_producer_address_is_a_data_error(made: Dataset, address: str) -> None:
    recipe, index, stream = made()
    with (
        Loader(
            index, stream, asking(recipe, "tcp://127.0.0.1:1", address), StepRequest(0, DP, ONE, EVERYTHING)
        ) as loader,
        pytest.raises(DataError, match=f"data.producers: {address} is not an address .* expected tcp://HOST:PORT"),
    ):
        next(loader)


def test_missing_zeromq_is_an_error_that_says_what_to_install(made: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, index, stream = made()
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(DataError, match=r"data.producers needs ZeroMQ: pip install 'mmtrain\[serve\]'"):
        Loader(index, stream, asking(recipe, "tcp://127.0.0.1:1"), StepRequest(0, DP, ONE, EVERYTHING))


def test_settings_that_decide_the_content_of_steps_are_compared(made: Dataset) -> None:
    recipe, index, _ = made()
    ours = step_facts(recipe, index)
    assert describe_differences(ours, step_facts(asking(made(workers=3, prefetch=5)[0], "tcp://x:1"), index)) == ""
    fewer = replace(index, samples=index.samples[:-1], weights=index.weights[:-1])
    assert describe_differences(ours, step_facts(recipe, fewer)).startswith(
        "samples is 11 in the trainer and 12 here; fingerprint of"
    )
    other, other_index, _ = made(seq_len=48, grouping_window=7)
    differences = describe_differences(ours, step_facts(other, other_index))
    assert "data.seq_len is 48 in the trainer and 64 here" in differences
    assert "data.grouping_window is 7 in the trainer" in differences


# A producer whose messages the test sends.


class Sockets:
    """The sockets of a test, which are closed after it."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._open: list[zmq.Socket[bytes]] = []

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        self._open.append(self._context.socket(kind))
        return self._open[-1]

    def close(self) -> None:
        for socket in self._open:
            socket.close(linger=0)
        self._context.term()


class Puppet:
    """A producer for the trainer under test; the test sends its messages."""

    def __init__(self, context: Sockets) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.bind("tcp://127.0.0.1:*")
        self.address: str = self._socket.get_string(zmq.LAST_ENDPOINT)

    def hear(self) -> tuple[bytes, object]:
        """Return the next message that is not a ping, and its sender."""
        while True:
            trainer, *frames = self._socket.recv_multipart()
            if not isinstance(message := decode_message(frames), Ping):
                return trainer, message

    def say(self, trainer: bytes, message: FromProducer, *more: bytes) -> None:
        self._socket.send_multipart([trainer, *encode_message(message), *more])

    def raw(self, trainer: bytes, *frames: bytes) -> None:
        self._socket.send_multipart([trainer, *frames])

    def welcome(self, credit: int) -> bytes:
        """Accept a trainer."""
        trainer, message = self.hear()
        assert isinstance(message, Hello)
        assert message.facts == FACTS
        self.say(trainer, Welcome(credit))
        return trainer

    def hear_request(self, credit: int) -> tuple[bytes, object]:
        """Return the next request, and its sender; a trainer whose connection broke is accepted once more."""
        while isinstance((heard := self.hear())[1], Hello):  # a machine that pauses breaks the handshakes of ZeroMQ
            self.say(heard[0], Welcome(credit))
        return heard

    def quiet(self) -> bool:
        """Return whether no further message has arrived, except pings."""
        while self._socket.poll(0):
            _, *frames = self._socket.recv_multipart()
            if not isinstance(decode_message(frames), Ping):
                return False
        return True


def request_of(step: int) -> StepRequest:
    return StepRequest(step, {"llm": 1}, {"llm": 1}, ())


def step_bytes(step: int) -> bytes:
    return b"".join(pack(FakeStepBuilder().build(request_of(step))).chunks)


def made_step(step: int) -> Made:
    """Return the message in front of a step's bytes."""
    return Made(step, step_digest(request_of(step), FACTS, step_bytes(step)))


def made_frames(step: int, content: bytes) -> list[bytes]:
    """Return the frames of a step with these bytes, and the digest that belongs to them."""
    return [*encode_message(Made(step, step_digest(request_of(step), FACTS, content))), content]


@contextmanager
def consuming(
    window: PrefetchWindow[StepData],
    *puppets: Any,  # what has an address
    timeout_s: float = MAX_WAIT_S,
    step_timeout_s: float = MAX_WAIT_S,
    keys: CurveKeys | None = None,
    request: RequestOf = request_of,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[list[str]]:
    """Let puppets build the steps of a window; yields the notes."""
    notes: list[str] = []

    def start_local_pool() -> WorkerPool[int]:
        return WorkerPool(FakeStepBuilder(), 1, notes.append)  # type: ignore[arg-type]

    access = ProducerAccess([puppet.address for puppet in puppets], timeout_s, step_timeout_s, keys)
    remote = RemoteStepBuilder(window, access, request, FACTS, start_local_pool, notes.append, clock)

    def run() -> None:
        try:
            remote.run()
        except Exception as error:
            window.fail(error)

    thread = Thread(target=run)
    thread.start()
    try:
        yield notes
    finally:
        window.close()
        thread.join()


@pytest.fixture
def context() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.close()


def test_a_trainer_requests_within_its_credit_and_confirms_steps(context: Sockets) -> None:
    window = PrefetchWindow[StepData](0, 8)
    puppet = Puppet(context)
    with consuming(window, puppet):
        trainer = puppet.welcome(credit=2)
        assert [puppet.hear()[1] for _ in range(2)] == [Want(request_of(0)), Want(request_of(1))]
        assert puppet.quiet()
        puppet.say(trainer, made_step(1), step_bytes(1))
        assert puppet.hear()[1] == Got(1)
        assert puppet.hear()[1] == Want(request_of(2))
        puppet.say(trainer, made_step(0), step_bytes(0))
        assert [window.take().meta.step for _ in range(2)] == [0, 1]


def test_a_trainer_requests_no_more_than_its_window(context: Sockets) -> None:
    window = PrefetchWindow[StepData](0, 2)
    puppet = Puppet(context)
    with consuming(window, puppet):
        trainer = puppet.welcome(credit=100)
        assert [puppet.hear()[1] for _ in range(2)] == [Want(request_of(0)), Want(request_of(1))]
        for step in (1, 0):
            puppet.say(trainer, made_step(step), step_bytes(step))
            assert puppet.hear()[1] == Got(step)
        assert puppet.quiet()
        window.take()
        assert puppet.hear()[1] == Want(request_of(2))


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (made_frames(0, b"\x80\x04junk"), "less than the start"),
        (made_frames(5, step_bytes(5)), "not requested"),
        (made_frames(0, b"")[:2], "2 frames"),
        ([b"made", b'{"step":true,"digest":""}', b""], "expected int"),
        ([*encode_message(made_step(0)), step_bytes(1)], "step 0 is another one, or its bytes changed on the way"),
        ([*encode_message(Made(0, made_step(1).digest)), step_bytes(1)], "step 0 is another one"),
        (made_frames(0, step_bytes(1)), "step 0 is another one"),
        ([b"pickle", b"{}"], "is not a message"),
        ([b"pong"], "is not a message"),
    ],
)
def test_a_producer_that_sends_nonsense_loses_its_steps_to_another(
    context: Sockets, frames: list[bytes], why: str
) -> None:
    window = PrefetchWindow[StepData](0, 1)
    bad = Puppet(context)
    good = Puppet(context)
    clock_s = [0.0]
    with consuming(window, bad, good, step_timeout_s=10.0, clock=lambda: clock_s[0]) as notes:
        trainer = bad.welcome(credit=1)
        assert bad.hear() == (trainer, Want(request_of(0)))
        good.welcome(credit=1)
        for _ in range(100):
            bad.raw(trainer, *frames)
        other, message = good.hear_request(credit=1)
        assert message == Want(request_of(0))
        good.say(other, made_step(0), step_bytes(0))
        assert window.take().meta.step == 0
        assert bad.quiet(), "it is not asked again at once"
        clock_s[0] = 10.0
        new, message = bad.hear()  # it connects again
        assert new != trainer
        assert isinstance(message, Hello)
    [note] = [note for note in notes if "cannot be read" in note]
    assert why in note
    assert note.endswith("it is tried again in 10 s")


def test_a_silent_producer_is_given_up(context: Sockets) -> None:
    window = PrefetchWindow[StepData](0, 1)
    puppet = Puppet(context)
    clock_s = [0.0]
    with consuming(window, puppet, timeout_s=0.2, clock=lambda: clock_s[0]) as notes:
        puppet.welcome(credit=1)
        assert puppet.hear()[1] == Want(request_of(0))
        clock_s[0] = 0.3
        assert window.take().meta.step == 0
    assert [note for note in notes if "has been silent for 0.2 s; 1 steps go to others" in note]


def test_a_producer_that_answers_and_makes_nothing_loses_its_steps_and_is_tried_again(context: Sockets) -> None:
    window = PrefetchWindow[StepData](0, 2)
    lazy = Puppet(context)
    good = Puppet(context)
    clock_s = [0.0]
    with consuming(window, lazy, good, step_timeout_s=0.2, clock=lambda: clock_s[0]) as notes:
        first = lazy.welcome(credit=1)
        assert lazy.hear() == (first, Want(request_of(0)))
        other = good.welcome(credit=9)
        assert good.hear() == (other, Want(request_of(1)))
        good.say(other, made_step(1), step_bytes(1))
        assert good.hear() == (other, Got(1))
        clock_s[0] = 0.3  # its step goes to the other one, and it is greeted anew
        assert good.hear() == (other, Want(request_of(0)))
        good.say(other, made_step(0), step_bytes(0))
        assert good.hear() == (other, Got(0))
        again = lazy.welcome(credit=1)
        assert again != first
        assert [window.take().meta.step for _ in range(2)] == [0, 1]
        assert [good.hear()[1] for _ in range(2)] == [Want(request_of(2)), Want(request_of(3))]
        for step in (2, 3):
            good.say(other, made_step(step), step_bytes(step))
            assert good.hear() == (other, Got(step))
        clock_s[0] = 0.6  # it gets one step to show that it works, and the other one builds that too
        assert window.take().meta.step == 2
        assert lazy.hear() == (again, Want(request_of(4)))
        assert good.hear() == (other, Want(request_of(4)))
        lazy.say(again, made_step(4), step_bytes(4))
        assert lazy.hear() == (again, Got(4))
        assert [window.take().meta.step for _ in range(2)] == [3, 4]
    assert notes == [
        f"producer {lazy.address} answers, but has made no step for 0.2 s (data.producer_step_timeout_s); it is tried "
        "again in 0.2 s; 1 steps go to others",
        f"producer {lazy.address} makes steps again",
    ]


def test_a_producer_that_cannot_read_its_data_hands_the_step_back(context: Sockets) -> None:
    window = PrefetchWindow[StepData](0, 1)
    away, good = Puppet(context), Puppet(context)
    failure = StepFailure("StorageAwayError", "4 of 4 files cannot be read", "")
    clock_s = [0.0]
    with consuming(window, away, good, step_timeout_s=5.0, clock=lambda: clock_s[0]) as notes:
        first = away.welcome(credit=1)
        assert away.hear() == (first, Want(request_of(0)))
        other = good.welcome(credit=9)
        away.say(first, Failed(0, failure))
        assert good.hear() == (other, Want(request_of(0)))
        good.say(other, made_step(0), step_bytes(0))
        assert window.take().meta.step == 0
    why = "cannot read its data (4 of 4 files cannot be read)"
    assert notes == [f"producer {away.address} {why}; it is tried again in 5 s; 1 steps go to others"]


def test_while_the_only_producer_makes_nothing_steps_are_built_locally(context: Sockets) -> None:
    window = PrefetchWindow[StepData](0, 2)
    puppet = Puppet(context)
    clock_s = [0.0]
    with consuming(window, puppet, step_timeout_s=0.2, clock=lambda: clock_s[0]) as notes:
        puppet.welcome(credit=1)
        assert puppet.hear()[1] == Want(request_of(0))
        clock_s[0] = 0.3
        puppet.welcome(credit=1)
        assert [window.take().meta.step for _ in range(8)] == list(range(8))
    assert "answers, but has made no step for 0.2 s" in notes[0]
    assert notes[1] == f"no producer makes steps ({puppet.address}); steps are prepared here until one does"


def test_without_a_producer_at_the_start_steps_are_built_locally(context: Sockets) -> None:
    window = PrefetchWindow[StepData](0, 2)
    puppet = Puppet(context)
    with consuming(window, puppet, timeout_s=0.2) as notes:
        assert window.take().meta.step == 0
    assert "no producer answers" in notes[0]


def test_a_restarted_producer_is_greeted_again(context: Sockets) -> None:
    window = PrefetchWindow[StepData](0, 1)
    puppet = Puppet(context)
    with consuming(window, puppet) as notes:
        trainer = puppet.welcome(credit=1)
        assert puppet.hear()[1] == Want(request_of(0))
        puppet.say(trainer, Unknown())
        restarted = puppet.welcome(credit=1)
        assert restarted != trainer
        assert window.take().meta.step == 0  # built locally or by the producer, whichever is first
    assert [note for note in notes if "does not know this trainer any more; 1 steps go to others" in note]


def test_errors_travel_with_their_traceback(context: Sockets) -> None:
    window = PrefetchWindow[StepData](0, 1)
    puppet = Puppet(context)
    with consuming(window, puppet):
        trainer = puppet.welcome(credit=1)
        puppet.hear()
        puppet.say(trainer, Failed(0, StepFailure("", "KeyError: 'lost'", "Traceback: there")))
        with pytest.raises(RunError, match=r"preparing step 0 failed: KeyError: 'lost'\nTraceback: there"):
            window.take()


# A trainer whose messages the test sends.


@contextmanager
def producing(builder: Any, keys: CurveKeys | None = None) -> Iterator[tuple[Producer, SimpleQueue[str]]]:
    """Serve the steps of `builder` with one worker; yields the producer, and its notes."""
    notes: SimpleQueue[str] = SimpleQueue()
    producer = Producer(builder, FACTS, "tcp://127.0.0.1:*", 1, notes.put, keys)
    with Waker() as stop:
        thread = Thread(target=producer.serve, args=(stop.fileno(),))
        thread.start()
        try:
            yield producer, notes
        finally:
            stop.wake()
            thread.join()


class Dealer:
    """A trainer for the producer under test; the test sends its messages."""

    def __init__(self, context: Sockets, address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(address)

    def ask(self, message: FromTrainer) -> FromProducer:
        """Send a message, and return the next answer."""
        self.socket.send_multipart(encode_message(message))
        return self.hear()

    def hear(self) -> FromProducer:
        self.frames = self.socket.recv_multipart()
        return cast(FromProducer, decode_message(self.frames))


def test_a_producer_builds_requested_steps(context: Sockets) -> None:
    with producing(FakeStepBuilder()) as (producer, _):
        trainer = Dealer(context, producer.address)
        assert trainer.ask(Want(request_of(0))) == Unknown()
        assert trainer.ask(Hello({"train.seed": "1"}, 60.0)) == Refused("train.seed is 1 in the trainer and 0 here")
        assert trainer.ask(Hello(FACTS, 60.0)) == Welcome(2)
        assert trainer.ask(Ping()) == Pong()
        assert trainer.ask(Want(request_of(10**6))) == made_step(10**6)
        assert unpack(StepData, trainer.frames[2]).meta.step == 10**6


def test_a_producer_holds_no_more_steps_than_its_credit(context: Sockets) -> None:
    with producing(FakeStepBuilder()) as (producer, _):
        first, second = (Dealer(context, producer.address) for _ in range(2))
        assert [trainer.ask(Hello(FACTS, 60.0)) for trainer in (first, second)] == [Welcome(2), Welcome(2)]
        assert [first.ask(Want(request_of(step))) for step in range(2)] == [made_step(0), made_step(1)]
        second.socket.send_multipart(encode_message(Want(request_of(7))))
        assert [second.ask(Ping()) for _ in range(2)] == [Pong(), Pong()]  # the second one in a later turn of the loop
        assert producer._running == set(), "unconfirmed steps of the first trainer use up the credit"
        assert sum(len(trainer.sent) for trainer in producer._trainers.values()) == 2
        first.socket.send_multipart(encode_message(Got(0)))
        assert second.hear() == made_step(7)
        first.socket.send_multipart(encode_message(Want(request_of(2))))
        assert first.ask(Want(request_of(3))) == Refused(
            "a message could not be read: step 3 is requested twice or beyond the credit of 2"
        )


def test_a_killed_trainer_holds_no_credit(context: Sockets) -> None:
    with producing(FakeStepBuilder()) as (producer, notes):
        first, second = (Dealer(context, producer.address) for _ in range(2))
        assert [trainer.ask(Hello(FACTS, 60.0)) for trainer in (first, second)] == [Welcome(2), Welcome(2)]
        assert [first.ask(Want(request_of(step))) for step in range(2)] == [made_step(0), made_step(1)]
        second.socket.send_multipart(encode_message(Want(request_of(7))))
        first.socket.close(linger=0)
        while (answer_to_second := second.hear()) == Pong():
            pass
        assert answer_to_second == made_step(7)
        while "is gone" not in notes.get(timeout=MAX_WAIT_S):
            pass


def test_a_producer_survives_nonsense_errors_and_silence(context: Sockets) -> None:
    with producing(FailingStepBuilder()) as (producer, notes):
        for frames in (
            [b"junk"],
            [b"hello", b"{"],
            [b"want", b'{"request":{}}'],
            [b"", b"", b""],
            encode_message(Hello(FACTS, 0.0)),
            encode_message(Hello(FACTS, 1e300)),
        ):
            stranger = Dealer(context, producer.address)
            stranger.socket.send_multipart(frames)
            assert isinstance(stranger.hear(), Refused)
        trainer = Dealer(context, producer.address)
        assert trainer.ask(Hello(FACTS, MAX_WAIT_S)) == Welcome(2)
        answer = trainer.ask(Want(request_of(1)))
        assert isinstance(answer, Failed)
        assert answer.failure.message == "KeyError: 'lost'"
        silent = Dealer(context, producer.address)
        assert silent.ask(Hello(FACTS, 0.2)) == Welcome(2)
        while "has been silent for 0.2 s" not in notes.get(timeout=MAX_WAIT_S):
            pass
        assert silent.ask(Ping()) == Unknown()
        assert trainer.ask(Ping()) == Pong()


# Trainers and producers that must prove that they belong together.

ONE_SECRET, OTHER_SECRET = (CurveKeys.derive(letter * 32) for letter in (b"a", b"b"))


def test_a_trainer_and_a_producer_with_one_secret_work_together() -> None:
    window = PrefetchWindow[StepData](0, 2)
    with (
        producing(FakeStepBuilder(), ONE_SECRET) as (producer, notes),
        consuming(window, producer, keys=ONE_SECRET) as trainer_notes,
    ):
        assert [window.take().meta.step for _ in range(5)] == list(range(5))
        assert "joined" in notes.get(timeout=MAX_WAIT_S)
    assert trainer_notes == []


def test_a_run_reads_the_secret_that_its_recipe_names(made: Dataset, tmp_path: Path) -> None:
    recipe, index, stream = made(prefetch=2)
    alone = made(prefetch=0)[0]
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    request = StepRequest(0, DP, ONE, EVERYTHING)
    with Served(recipe, tmp_path, "tcp://0.0.0.0:*", f"data.producer_secret={secret}") as producer:
        asking_for_steps = asking(recipe, producer.address.replace("0.0.0.0", "127.0.0.1"))
        data = asking_for_steps.data.model_copy(update={"producer_secret": secret})
        with_secret = asking_for_steps.model_copy(update={"data": data})
        notes: list[str] = []
        with (
            Loader(index, stream, alone, request) as reference,
            Loader(index, stream, with_secret, request, notify=notes.append) as loader,
        ):
            for _ in range(4):
                assert same(next(loader), next(reference))
        assert notes == []
        assert "joined" in producer.end()[1]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param(None, ONE_SECRET, marks=pytest.mark.slow),
        pytest.param(ONE_SECRET, None, marks=pytest.mark.slow),
        (OTHER_SECRET, ONE_SECRET),
    ],
    ids=["trainer without", "producer without", "different"],
)
def test_a_stranger_gets_no_step_and_is_told_why(ours: CurveKeys | None, theirs: CurveKeys | None) -> None:
    window = PrefetchWindow[StepData](0, 2)
    clock_s = [0.0]
    with (
        producing(FakeStepBuilder(), theirs) as (producer, notes),
        consuming(window, producer, timeout_s=0.5, keys=ours, clock=lambda: clock_s[0]) as trainer_notes,
    ):
        poll(lambda: bool(trainer_notes))
        clock_s[0] = 0.6
        assert window.take().meta.step == 0, "built locally"
        assert notes.empty(), "the producer has heard of no trainer"
    assert trainer_notes[0] == (
        f"producer {producer.address} and this trainer do not recognize each other: data.producer_secret is not the "
        "same in both, or set in one of them only"
    )


def test_a_connection_that_cannot_be_made_ends_the_run_and_does_not_hang_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise zmq.ZMQError(zmq.EADDRINUSE)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", fail)
    window = PrefetchWindow[StepData](0, 2)
    with consuming(window, SimpleNamespace(address="tcp://127.0.0.1:1")), pytest.raises(zmq.ZMQError):
        window.take()


def test_a_secret_is_refused_unless_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(DataError, match=r"secret: No such file or directory; make one with"):
        load_keys(path)
    path.write_bytes(b"0123456789abcdef" * 4 + b"\n")
    path.chmod(0o640)
    with pytest.raises(DataError, match=r"has mode 640, .* allowed: 600 \(chmod 600 "):
        load_keys(path)
    path.chmod(0o600)
    assert load_keys(path) == CurveKeys.derive(b"0123456789abcdef" * 4)
    path.write_bytes(b"short")
    with pytest.raises(DataError, match="holds 5 bytes, at least 32 are needed"):
        load_keys(path)
    assert load_keys(None) is None


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("tcp://127.0.0.1:5557", True),
        ("tcp://127.8.9.1:*", True),
        ("tcp://localhost:5557", True),
        ("tcp://[::1]:5557", True),
        ("ipc:///tmp/steps", True),
        ("tcp://*:5557", False),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://[::]:5557", False),
        ("tcp://10.0.0.7:5557", False),
        ("tcp://eth0:5557", False),
        ("tcp://127.0.0.1.example.com:5557", False),
    ],
)
def test_only_loopback_addresses_need_no_secret(address: str, local: bool) -> None:
    assert is_local(address) is local
