"""The watch over ranks that have come and whose run has no folder yet, and the wait for them at the end."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch._C._distributed_c10d import HashStore

from mmtrain.runtime.heartbeats import Heartbeats, StartWatch
from mmtrain.runtime.rendezvous import MeetingPlace, Patience
from mmtrain.runtime.resilience import run_end
from tests.waiting import MAX_WAIT_S

PLACE = MeetingPlace(0, 3, "node1", 29500)


def test_silent_ranks_are_named_to_rank_0_which_the_others_watch() -> None:
    store, clock_s = HashStore(), [0.0]
    ranks = [Heartbeats(store, rank, 4, clock=lambda: clock_s[0]) for rank in range(4)]
    for rank in ranks[:3]:
        rank.beat()
    ranks[0].beat()
    clock_s[0] = 5.0
    ranks[1].beat()
    ranks[0].beat()
    assert ranks[0].silent_ranks(5.0) == [2], "rank 3 has not come"
    ranks[1].beat()
    assert ranks[1].silent_ranks(1.0) == []
    assert ranks[2].silent_ranks(5.0) == [0]


def _first_words(place: MeetingPlace, connect: Callable[[], HashStore]) -> str:
    """Return what a watch says in the end."""
    ended, said = threading.Event(), list[str]()

    def end(text: str) -> None:
        said.append(text)
        ended.set()

    with StartWatch(connect, place, 0.2, end):
        assert ended.wait(MAX_WAIT_S)
    return said[0]


def test_a_rank_that_came_and_does_not_run_ends_the_start() -> None:
    store = HashStore()
    Heartbeats(store, 2, 3, key=" at the start").beat()
    text = _first_words(PLACE, lambda: store)
    assert text.startswith("rank 0 of 3: rank 2 came to MASTER_ADDR:MASTER_PORT node1:29500, and gave no sign of life ")


def test_a_store_that_does_not_answer_is_that_of_a_first_rank_that_does_not_run() -> None:
    is_over = threading.Event()

    def connect() -> HashStore:
        is_over.wait()
        return HashStore()

    text = _first_words(replace(PLACE, rank=1), connect)
    is_over.set()
    assert text.startswith("rank 1 of 3: rank 0 came to ")


def test_a_watch_without_limit_watches_nothing_and_one_that_is_closed_says_nothing() -> None:
    num_threads = threading.active_count()
    StartWatch(HashStore, PLACE, 0.0, pytest.fail).close()
    assert threading.active_count() == num_threads
    closed = StartWatch(HashStore, PLACE, MAX_WAIT_S, pytest.fail)
    closed.close()
    for thread in closed._threads:
        thread.join()


def _patience(clock_s: list[float], act: Callable[[], None]) -> Patience:
    def sleep(seconds: float) -> None:
        clock_s[0] += seconds
        act()

    return Patience(clock=lambda: clock_s[0], sleep=sleep, limit_s=2.0)


def test_who_does_not_come_to_the_end_is_named_after_the_limit(capfd: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    store.set("at the end: rank 1", "")
    run_end._await_end(store, 3, _patience([0.0], lambda: None))
    assert "the run is finished, but rank 2 did not come to its end within 2 s" in capfd.readouterr().err
    run_end._await_end(store, 3, _patience([0.0], lambda: store.set("at the end: rank 2", "")))
    assert capfd.readouterr().err == ""
