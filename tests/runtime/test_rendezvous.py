import re
import socket
from collections.abc import Callable

import pytest

from mmtrain.errors import LaunchError
from mmtrain.runtime.rendezvous import MeetingPlace, Patience, await_all_ranks, ranks_text, reach_first_rank

ORIGIN = "RANK=0, WORLD_SIZE=3"


class _Clock:
    """Time that passes when somebody sleeps; `events` happen at their second."""

    def __init__(self, **events: Callable[[], None]) -> None:
        self.now_s = 0.0
        self.events = sorted((float(name.removeprefix("at_")), event) for name, event in events.items())
        self.notes: list[tuple[float, str]] = []

    def sleep(self, seconds: float) -> None:
        self.now_s = round(self.now_s + seconds, 3)
        while self.events and self.events[0][0] <= self.now_s:
            self.events.pop(0)[1]()

    def patience(self) -> Patience:
        return Patience(lambda text: self.notes.append((self.now_s, text)), lambda: self.now_s, self.sleep)


class _Store:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def add(self, key: str, number: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + number)
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


def _wait(store: _Store, clock: _Clock, rank: int = 0, size: int = 3) -> None:
    await_all_ranks(store, MeetingPlace(rank, size, "node1", 4321, ORIGIN), clock.patience())  # type: ignore[arg-type]


def test_who_is_missing_is_said_after_ten_seconds_and_each_minute_until_the_limit() -> None:
    store, clock = _Store(), _Clock()
    with pytest.raises(LaunchError) as error:
        _wait(store, clock)
    assert [seconds for seconds, _ in clock.notes] == pytest.approx([10, 70], abs=0.2)
    for _, text in clock.notes:
        assert "1 of 3 ranks have come to MASTER_ADDR:MASTER_PORT node1:4321; missing: ranks 1, 2" in text
        assert ORIGIN in text
    assert "giving up in 110 s" in clock.notes[0][1]
    assert clock.now_s == pytest.approx(121, abs=0.3)
    assert "ranks 1, 2 of 3 did not come to MASTER_ADDR:MASTER_PORT node1:4321 within 120 s" in str(error.value)
    assert ORIGIN in str(error.value)
    with pytest.raises(LaunchError, match="ranks 1, 2 of 3 did not come"):  # a rank that waits for rank 0 is told
        _wait(store, _Clock(), rank=1)


def test_the_limit_starts_again_with_each_rank_that_comes() -> None:
    store = _Store()
    clock = _Clock(at_100=lambda: store.set("arrived/1", "1"), at_200=lambda: store.set("arrived/2", "1"))
    _wait(store, clock)
    assert clock.now_s == pytest.approx(200, abs=0.3)
    assert "missing: rank 2" in clock.notes[2][1]
    assert clock.notes[-1][1] == "all ranks have come, after 200 s"


def test_ranks_that_come_at_once_say_nothing() -> None:
    store, clock = _Store(), _Clock()
    store.set("arrived/1", "1")
    _wait(store, clock, size=2)
    assert (clock.notes, clock.now_s) == ([], 0.0)


def test_two_processes_with_one_rank_are_refused() -> None:
    store = _Store()
    store.set("arrived/1", "1")
    with pytest.raises(LaunchError, match=r"two processes are rank 1 of 3 .*RANK=0, WORLD_SIZE=3"):
        _wait(store, _Clock(), rank=1)


def test_a_rank_whose_store_is_gone_says_that_rank_0_left() -> None:
    class Gone(_Store):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection was likely closed\nframe #0: ...")

    with pytest.raises(LaunchError, match=r"rank 1 of 3 lost rank 0.*likely closed\)$"):
        _wait(Gone(), _Clock(), rank=1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (socket.gaierror(-2, "Name or service not known"), "MASTER_ADDR 'node1' cannot be resolved"),
        (ConnectionRefusedError(111, "Connection refused"), "rank 0 does not answer at MASTER_ADDR:MASTER_PORT node1"),
        (OSError(101, "Network is unreachable"), r"node1:4321 \(Network is unreachable\)"),
        (TimeoutError("timed out"), r"node1:4321 \(timed out\)"),
    ],
)
def test_a_first_rank_that_cannot_be_reached_is_said_with_the_reason(error: OSError, reason: str) -> None:
    def connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
        raise error

    clock = _Clock()
    place = MeetingPlace(1, 2, "node1", 4321, "RANK=1, WORLD_SIZE=2")
    with pytest.raises(LaunchError, match=reason) as ended:
        reach_first_rank(place, clock.patience(), connect)
    assert clock.now_s == pytest.approx(120, abs=0.3)
    assert [seconds for seconds, _ in clock.notes] == pytest.approx([10, 70], abs=0.2)
    assert all(re.search(reason, text) for _, text in clock.notes)
    assert "RANK=1, WORLD_SIZE=2" in str(ended.value)


def test_a_first_rank_that_comes_later_is_reached() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    answers: list[OSError | None] = [ConnectionRefusedError(), socket.gaierror(), None]

    def connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
        error = answers.pop(0)
        if error:
            raise error
        return socket.create_connection(address, timeout_s)

    with listener:
        reach_first_rank(MeetingPlace(1, 2, *listener.getsockname()), _Clock().patience(), connect)
    assert not answers


def test_many_ranks_are_named_by_the_first() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(1, 20)) == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more"
