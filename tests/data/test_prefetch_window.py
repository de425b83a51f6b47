import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.data.loading.prefetch_window import PrefetchWindow
from mmtrain.errors import RunError


@given(
    st.integers(0, 5),
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["claim", "put", "lose", "take"]), st.integers(0, 3))),
)
def test_every_step_arrives_once_and_in_order(first: int, depth: int, moves: list[tuple[str, int]]) -> None:
    window = PrefetchWindow[int](first, depth)
    held: list[int] = []  # claimed, and not yet put or lost
    late: list[int] = []  # released, but their builder may still put them
    taken_steps: list[int] = []
    done: set[int] = set()
    for move, which in moves:
        if move == "claim" and (step := window.claim()) is not None:
            assert first + len(taken_steps) <= step < first + len(taken_steps) + depth
            assert step not in held
            assert step not in done
            held.append(step)
        elif move == "put" and held:
            step = held.pop(which % len(held))
            window.put(step, step)
            done.add(step)
        elif move == "lose" and held:
            step = held.pop(which % len(held))
            window.release([step])
            late.append(step)
        elif move == "take" and first + len(taken_steps) in done:
            taken_steps.append(window.take())
        if late and which == 3:  # a builder that was given up puts its result after all
            step = late.pop()
            window.put(step, step)
            done.add(step)
            held = [h for h in held if h != step]
    while len(taken_steps) < len(moves):  # from every state, all further steps can be taken
        for step in held:
            window.put(step, step)
        held = []
        while (claimed := window.claim()) is not None:
            window.put(claimed, claimed)
        taken_steps.append(window.take())
    assert taken_steps == list(range(first, first + len(taken_steps)))


def test_an_error_is_raised_for_its_step_every_time() -> None:
    window = PrefetchWindow[int](0, 3)
    assert [window.claim(), window.claim()] == [0, 1]
    window.put(1, ValueError("one"))
    window.put(0, 0)
    assert window.take() == 0
    for _ in range(2):
        with pytest.raises(ValueError, match="one"):
            window.take()


def test_finished_steps_can_be_taken_after_a_failure() -> None:
    window = PrefetchWindow[int](0, 3)
    window.claim()
    window.put(0, 0)
    window.fail(RunError("no builders"))
    assert window.take() == 0
    with pytest.raises(RunError, match="no builders"):
        window.take()


def test_closing_wakes_all_waiting_threads() -> None:
    window = PrefetchWindow[int](0, 1)
    assert window.claim() == 0
    woken = threading.Event()
    window.add_waker(woken.set)
    outcomes: list[object] = []
    waiting = [threading.Thread(target=lambda: outcomes.append(window.claim(wait=True)))]

    def take() -> None:
        with pytest.raises(RunError, match="closed"):
            window.take()
        outcomes.append("closed")

    waiting.append(threading.Thread(target=take))
    for thread in waiting:
        thread.start()
    window.close()
    for thread in waiting:
        thread.join()
    assert woken.is_set()
    assert sorted(map(str, outcomes)) == ["None", "closed"]
    assert window.claim() is None
