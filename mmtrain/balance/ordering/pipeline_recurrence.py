"""The pipeline recurrence: when actions end that wait for each other, for many sets of durations at once.

An action ends at `duration + max(end of producer + delay of its message)` over everything that it waits for, and an
action that waits for nothing ends after its duration. Which action waits for which does not depend on the durations,
so it is worked out once. Actions are then numbered level by level, where a level holds those that wait for actions of
earlier levels only. Numpy computes a whole level, for all sets of durations, in a few calls.

Messages neither wait for each other nor for their receivers here; `program.simulate` has the whole truth.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray

NO_MESSAGE = -1  # number of the message, with delay 0, of a dependency inside a rank
TABLE_BYTES = 5 * 2**17  # of durations that are computed at a time, so that they stay in a core's cache
MAX_SEPARATE_COLUMNS = 4  # producers of an action that are compared one after another; more go into one call


@dataclass(frozen=True)
class Dependencies:
    """What waits for what: action `consumer[i]` for `producer[i]`, whose result message number `message[i]` carries."""

    consumer: IntArray  # (w,)
    producer: IntArray  # (w,)
    message: IntArray  # (w,) NO_MESSAGE where nothing is sent


class _ProducerColumn(NamedTuple):
    """The next producer, or several of them, of the first k actions of a level."""

    rows: IntArray  # (k,) or (width, k) where the producers stand in the table
    messages: IntArray | None  # of the same shape; None if no message is needed


class _Level(NamedTuple):
    """Actions [first, last), those with the most producers first, that wait for earlier levels only."""

    first: int
    last: int
    columns: list[_ProducerColumn]


class PipelineRecurrence:
    """The recurrence of some actions; `row[i]` is where action i stands in the table of durations and of ends."""

    def __init__(self, num_actions: int, dependencies: Dependencies) -> None:
        """Order the actions by level. Raises ValueError if actions wait for each other in a cycle."""
        num_producers = np.bincount(dependencies.consumer, minlength=num_actions)
        level = _levels(num_actions, dependencies)
        by_level = np.lexsort((-num_producers, level))
        self.num_actions = num_actions
        self.row: IntArray = np.empty(num_actions, dtype=np.int64)
        self.row[by_level] = np.arange(num_actions)
        bounds = np.searchsorted(level[by_level], np.arange(level.max(initial=-1) + 2)).tolist()
        columns = _columns(level, num_producers, dependencies, self.row)
        self._levels = [
            _Level(first, last, columns[number])
            for number, (first, last) in enumerate(pairwise(bounds))
            if number > 0  # the first level waits for nothing
        ]

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
        for level in self._levels:
            ready = _ready(table, level.columns[0], message_delays)
            for column in level.columns[1:]:
                num_consumers = column.rows.shape[-1]
                start = ready[:num_consumers]
                np.maximum(start, _ready(table, column, message_delays), out=start)
            ends = table[level.first : level.last]
            np.add(ends, ready, out=ends)


def _ready(table: FloatArray, column: _ProducerColumn, message_delays: FloatArray | None) -> FloatArray:
    """(k, columns) when the producers of each action have ended, and their messages have arrived."""
    arrivals: FloatArray = table.take(column.rows, axis=0)
    if column.messages is not None and message_delays is not None:
        arrivals += message_delays.take(column.messages, axis=0)
    if column.rows.ndim == 1:
        return arrivals
    last: FloatArray = arrivals.max(axis=0)
    return last


def _columns(
    level: IntArray, num_producers: IntArray, dependencies: Dependencies, row: IntArray
) -> dict[int, list[_ProducerColumn]]:
    """Lay the producers of every level's actions out as columns: column j holds the j-th producer of each action.

    Actions with the most producers come first in a level, so that each column concerns the level's first few actions.
    """
    by_consumer = np.argsort(dependencies.consumer, kind="stable")
    first_dependency = np.repeat(np.cumsum(num_producers) - num_producers, num_producers)
    column = np.empty(len(by_consumer), dtype=np.int64)
    column[by_consumer] = np.arange(len(by_consumer)) - first_dependency
    level_of_consumer = level[dependencies.consumer]
    order = np.lexsort((row[dependencies.consumer], column, level_of_consumer))
    rows, messages = row[dependencies.producer[order]], dependencies.message[order]
    starts = _starts_of_runs(level_of_consumer[order], column[order])
    levels = level_of_consumer[order[starts]]
    runs = [*_starts_of_runs(levels, np.diff(np.append(starts, len(order)))).tolist(), len(starts)]
    has_messages = np.logical_or.reduceat(messages != NO_MESSAGE, starts).tolist() if len(starts) else []
    bounds, level_numbers = [*starts.tolist(), len(order)], levels.tolist()
    columns: dict[int, list[_ProducerColumn]] = {}
    for lo, hi in pairwise(runs):
        # These columns of one level concern equally many actions, so that they fit into one table.
        of_level = columns.setdefault(level_numbers[lo], [])
        if hi - lo <= MAX_SEPARATE_COLUMNS:
            for k in range(lo, hi):
                part = slice(bounds[k], bounds[k + 1])
                of_level.append(_ProducerColumn(rows[part], messages[part] if has_messages[k] else None))
            continue
        table = slice(bounds[lo], bounds[hi])
        table_messages = messages[table].reshape(hi - lo, -1) if any(has_messages[lo:hi]) else None
        of_level.append(_ProducerColumn(rows[table].reshape(hi - lo, -1), table_messages))
    return columns


def _starts_of_runs(*keys: IntArray) -> IntArray:
    """Where runs of equal keys start."""
    changes = np.zeros(len(keys[0]), dtype=np.bool_)
    changes[:1] = True
    for key in keys:
        changes[1:] |= key[1:] != key[:-1]
    starts: IntArray = np.flatnonzero(changes)
    return starts


def _levels(num_actions: int, dependencies: Dependencies) -> IntArray:
    """(n,) how many actions must end before each, at least, one after another; the first have 0."""
    by_producer = np.argsort(dependencies.producer, kind="stable")
    consumer = dependencies.consumer[by_producer]
    first = np.searchsorted(dependencies.producer[by_producer], np.arange(num_actions + 1))
    num_missing = np.bincount(dependencies.consumer, minlength=num_actions)
    level = np.full(num_actions, -1, dtype=np.int64)
    position = np.empty(num_actions, dtype=np.int64)
    ready = np.flatnonzero(num_missing == 0)
    depth = 0
    while len(ready):
        level[ready] = depth
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
