"""The vectorized recurrence against the same recurrence evaluated action by action."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance.batch_meta import FloatArray
from mmtrain.balance.ordering.pipeline_recurrence import (
    MAX_SEPARATE_COLUMNS,
    MIN_ACTIONS_OF_ARRAYS,
    NO_MESSAGE,
    NUM_LEVELS_TO_TRY,
    Dependencies,
    PipelineRecurrence,
    _levels,
)

NUM_MESSAGES = 3
NUM_COLUMNS = 4


@st.composite
def dependencies(draw: st.DrawFn) -> tuple[int, Dependencies]:
    """Draw randomly numbered actions that wait for earlier ones, some for more than are compared one by one."""
    num_actions = draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    number = rng.permutation(num_actions)
    consumers, producers = [], []
    for action in range(1, num_actions):
        wide = rng.random() < 0.2
        count = min(action, int(rng.integers(0, 4 * MAX_SEPARATE_COLUMNS if wide else 3)))
        consumers += [number[action]] * count
        producers += number[rng.choice(action, count, replace=False)].tolist()
    message = rng.integers(-1, NUM_MESSAGES, len(consumers))  # -1 is NO_MESSAGE
    return num_actions, Dependencies(np.array(consumers, np.int64), np.array(producers, np.int64), message)


def one_by_one(durations: FloatArray, waits: Dependencies, delays: FloatArray) -> FloatArray:
    """Evaluate the definition: `duration + max(end of producer + delay)`, as soon as all producers are known."""
    ends: dict[int, FloatArray] = {}
    while len(ends) < len(durations):
        for action in set(range(len(durations))) - set(ends):
            needed = np.flatnonzero(waits.consumer == action)
            if all(int(waits.producer[i]) in ends for i in needed):
                start = np.zeros(durations.shape[1])
                for i in needed:
                    delay = 0.0 if waits.message[i] == NO_MESSAGE else delays[waits.message[i]]
                    start = np.maximum(start, ends[int(waits.producer[i])] + delay)
                ends[action] = durations[action] + start
    return np.stack([ends[action] for action in range(len(durations))])


@given(dependencies(), st.integers(0, 10_000), st.booleans())
def test_ends_are_those_of_the_definition_to_the_last_bit(
    case: tuple[int, Dependencies], seed: int, delays_differ: bool
) -> None:
    num_actions, waits = case
    rng = np.random.default_rng(seed)
    durations = rng.random((num_actions, NUM_COLUMNS))
    delays = rng.random((NUM_MESSAGES, NUM_COLUMNS) if delays_differ else NUM_MESSAGES)
    recurrence = PipelineRecurrence(num_actions, waits)
    table = np.empty_like(durations)
    table[recurrence.row] = durations
    recurrence.replace_durations_by_ends(table, delays)
    assert np.array_equal(table[recurrence.row], one_by_one(durations, waits, delays))


@given(dependencies())
def test_without_delays_messages_take_no_time(case: tuple[int, Dependencies]) -> None:
    num_actions, waits = case
    recurrence = PipelineRecurrence(num_actions, waits)
    tables = np.ones((2, num_actions, 1))
    recurrence.replace_durations_by_ends(tables[0])
    recurrence.replace_durations_by_ends(tables[1], np.zeros(NUM_MESSAGES))
    assert np.array_equal(*tables)


@pytest.mark.parametrize("num_ranks", [2, 4 * MIN_ACTIONS_OF_ARRAYS])
def test_levels_are_the_same_as_lists_and_as_arrays(num_ranks: int) -> None:
    num_rounds = 3 * NUM_LEVELS_TO_TRY
    action = np.random.default_rng(0).permutation(num_ranks * num_rounds).reshape(num_rounds, num_ranks)
    neighbour = np.roll(action, 1, axis=1)
    consumer = np.concatenate([action[1:].ravel(), action[1:].ravel()])
    producer = np.concatenate([action[:-1].ravel(), neighbour[:-1].ravel()])
    level = _levels(action.size, Dependencies(consumer, producer, np.full(len(consumer), NO_MESSAGE)))
    assert np.array_equal(level[action], np.repeat(np.arange(num_rounds)[:, None], num_ranks, axis=1))


def test_actions_of_small_levels_that_wait_for_each_other_are_rejected() -> None:
    line = np.arange(2 * NUM_LEVELS_TO_TRY)
    waits = Dependencies(np.append(line[1:], 30), np.append(line[:-1], len(line) - 1), np.full(len(line), NO_MESSAGE))
    with pytest.raises(ValueError, match="wait for each other in a cycle"):
        PipelineRecurrence(len(line), waits)


def test_actions_that_wait_for_each_other_are_rejected() -> None:
    cycle = Dependencies(np.array([1, 2, 1]), np.array([0, 1, 2]), np.full(3, NO_MESSAGE))
    with pytest.raises(ValueError, match="wait for each other in a cycle"):
        PipelineRecurrence(3, cycle)
