"""The pipeline recurrence: when actions end that wait for each other, for many sets of durations at once.

An action ends at `duration + max(end of producer + delay of its message)` over everything that it waits for, and an
action that waits for nothing ends after its duration. Which action waits for which does not depend on the durations,
so it is worked out once. Actions are then numbered level by level, where a level holds those that wait for actions of
earlier levels only. Numpy computes a whole level, for all sets of durations, in a few calls.

Messages neither wait for each other nor for their receivers here; `program.simulate` has the whole truth.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.balance.batch_meta import FloatArray, IntArray

NO_MESSAGE = -1  # number of the message, with delay 0, of a dependency inside a rank
TABLE_BYTES = 5 * 2**17  # of durations that are computed at a time, so that they stay in a core's cache
MAX_SEPARATE_COLUMNS = 4  # producers of an action that are compared one after another; more go into one call
# A level of fewer actions is worked out faster by lists: 4, 8 and 16 took 0.28, 0.46 and 0.8 of the time that arrays
# take, and 32 took 1.1 of it (`PipelineRecurrence` of ranks that wait for a neighbour, two cores, 2026-12-01).
MIN_ACTIONS_OF_ARRAYS = 24
NUM_LEVELS_TO_TRY = 20  # after which levels count as small or not
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Dependencies:
    """What waits for what: action `consumer[i]` for `producer[i]`, whose result message number `message[i]` carries."""

    consumer: IntArray  # (w,)
    producer: IntArray  # (w,)
    message: IntArray  # (w,) NO_MESSAGE where nothing is sent


class PipelineRecurrence:
    """The recurrence of some actions; `row[i]` is where action i stands in the table of durations and of ends."""

    def __init__(self, num_actions: int, dependencies: Dependencies) -> None:
        """Order the actions by level. Raises ValueError if actions wait for each other in a cycle."""
        num_producers = np.bincount(dependencies.consumer, minlength=num_actions)
        level = _levels(num_actions, dependencies)
        by_level = np.lexsort((-num_producers, level))
        self.num_actions = num_actions
        # Searches keep many recurrences, so that all tables are of 32 bits, and no object stands for a level.
        self.row: Int32Array = np.empty(num_actions, dtype=np.int32)
        self.row[by_level] = np.arange(num_actions)
        bounds = np.searchsorted(level[by_level], np.arange(level.max(initial=-1) + 2))
        self._producers, self._messages, self._columns = _columns(level, num_producers, dependencies, self.row, bounds)

    def runs_at_a_time(self) -> int:
        """Return for how many columns of a table it is fastest to compute the ends together."""
        return max(TABLE_BYTES // (8 * max(self.num_actions, 1)), 1)

    def replace_durations_by_ends(self, table: FloatArray, delays: FloatArray | None = None) -> None:
        """Turn durations into ends, in place, since tables are large.

        table: (num_actions, columns) seconds that the action of each row takes, in every one of many independent runs.
        delays: (messages,) or (messages, columns) seconds of each message; None if there are no messages.
        """
        message_delays = None
        if delays is not None:
            by_column = delays[:, None] if delays.ndim == 1 else delays
            message_delays = np.concatenate([by_column, np.zeros((1, by_column.shape[1]))])
        for first, last, starts_level, ends_level, lo, hi, width, is_sent in self._columns.tolist():
            arrivals: FloatArray = table.take(self._producers[lo:hi], axis=0)
            if is_sent and message_delays is not None:
                arrivals += message_delays.take(self._messages[lo:hi], axis=0)
            if width > 1:
                arrivals = arrivals.reshape(width, -1, arrivals.shape[1]).max(axis=0)
            if starts_level:
                ready = arrivals  # when all producers so far have ended, and their messages have arrived
            else:
                start = ready[: len(arrivals)]
                np.maximum(start, arrivals, out=start)
            if ends_level:
                ends = table[first:last]
                np.add(ends, ready, out=ends)


def _columns(
    level: IntArray, num_producers: IntArray, dependencies: Dependencies, row: Int32Array, bounds: IntArray
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Lay the producers of every level's actions out as columns: column j holds the j-th producer of each action.

    Actions with the most producers come first in a level, so that each column concerns the level's first few actions.
    Columns of one level that concern equally many actions are joined if they are many. bounds: (levels + 1,) the first
    row of each level.

    Returns the rows of producers, their messages, and a table of the columns, (columns, 8). A column has the first row
    of its level, the row behind the last, whether it is the first column of the level, and the last; its part [lo, hi)
    of the producers; the producers of each action in it; and whether any of them sends a message.
    """
    by_consumer = np.argsort(dependencies.consumer, kind="stable")
    first_dependency = np.repeat(np.cumsum(num_producers) - num_producers, num_producers)
    column = np.empty(len(by_consumer), dtype=np.int64)
    column[by_consumer] = np.arange(len(by_consumer)) - first_dependency
    level_of_consumer = level[dependencies.consumer]
    order = np.lexsort((row[dependencies.consumer], column, level_of_consumer))
    producers, messages = row[dependencies.producer[order]], dependencies.message[order].astype(np.int32)
    starts = _starts_of_runs(level_of_consumer[order], column[order])
    levels = level_of_consumer[order[starts]]
    alike = _starts_of_runs(levels, np.diff(np.append(starts, len(order))))
    num_alike = np.diff(np.append(alike, len(starts)))
    width = np.repeat(np.where(num_alike > MAX_SEPARATE_COLUMNS, num_alike, 1), num_alike)
    is_first = np.zeros(len(starts), dtype=np.bool_)
    is_first[alike] = True
    stays = is_first | (width == 1)
    lo, levels = starts[stays], levels[stays]
    starts_level = np.zeros(len(lo), dtype=np.bool_)
    starts_level[_starts_of_runs(levels)] = True
    is_sent = np.logical_or.reduceat(messages != NO_MESSAGE, lo) if len(lo) else np.zeros(0, dtype=np.bool_)
    last_of_level = np.append(starts_level[1:], np.ones(len(lo[:1]), dtype=np.bool_))
    hi = np.append(lo[1:], np.full(len(lo[:1]), len(order)))
    columns = (bounds[levels], bounds[levels + 1], starts_level, last_of_level, lo, hi, width[stays], is_sent)
    return producers, messages, np.stack(columns, axis=1).astype(np.int32)


def _starts_of_runs(*keys: IntArray) -> IntArray:
    """Where runs of equal keys start."""
    changes = np.zeros(len(keys[0]), dtype=np.bool_)
    changes[:1] = True
    for key in keys:
        changes[1:] |= key[1:] != key[:-1]
    starts: IntArray = np.flatnonzero(changes)
    return starts


def _levels(num_actions: int, dependencies: Dependencies) -> IntArray:
    """(n,) how many actions must end before each, at least, one after another; the first have 0.

    Levels of many actions are worked out as arrays. Where the first ones turn out to be small, the others are lists.
    """
    by_producer = np.argsort(dependencies.producer, kind="stable")
    consumer = dependencies.consumer[by_producer]
    first = np.searchsorted(dependencies.producer[by_producer], np.arange(num_actions + 1))
    num_missing = np.bincount(dependencies.consumer, minlength=num_actions)
    level = np.full(num_actions, -1, dtype=np.int64)
    position = np.empty(num_actions, dtype=np.int64)
    ready = np.flatnonzero(num_missing == 0)
    depth = num_done = 0
    while len(ready):
        if depth == NUM_LEVELS_TO_TRY and num_done < NUM_LEVELS_TO_TRY * MIN_ACTIONS_OF_ARRAYS:
            _set_small_levels(level, depth, ready.tolist(), consumer.tolist(), first.tolist(), num_missing.tolist())
            break
        level[ready] = depth
        num_done += len(ready)
        sizes = first[ready + 1] - first[ready]
        ends = np.cumsum(sizes)
        freed = consumer[np.repeat(first[ready] - ends + sizes, sizes) + np.arange(ends[-1])]
        np.subtract.at(num_missing, freed, 1)
        freed = freed[num_missing[freed] == 0]
        position[freed] = np.arange(len(freed))  # an action that several have freed is counted once
        ready = freed[position[freed] == np.arange(len(freed))]
        depth += 1
    if (level < 0).any():
        raise ValueError("actions wait for each other in a cycle")
    return level


def _set_small_levels(
    level: IntArray, depth: int, ready: list[int], consumer: list[int], first: list[int], num_missing: list[int]
) -> None:
    """Set the levels of actions from `depth` on, where those `ready` are at; arguments as in `_levels`."""
    level_of = level.tolist()
    while ready:
        freed = []
        for action in ready:
            level_of[action] = depth
            for waiting in consumer[first[action] : first[action + 1]]:
                num_missing[waiting] -= 1
                if num_missing[waiting] == 0:
                    freed.append(waiting)
        ready = freed
        depth += 1
    level[:] = level_of
