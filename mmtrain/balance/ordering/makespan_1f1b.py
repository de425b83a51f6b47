"""How long plain 1F1B pipelines take, under many orders of their microbatches."""

from functools import lru_cache

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.ordering.pipeline_recurrence import NO_MESSAGE, Dependencies, PipelineRecurrence


def makespans_1f1b(forward: FloatArray, backward: FloatArray, orders: IntArray) -> FloatArray:
    """Return (k,) seconds that the longest of c 1F1B pipelines takes under each of `orders` (k, l).

    forward, backward: (c, p, l) seconds of each microbatch on each of p stages. A stage starts an action when it has
    ended the one before and its neighbor has ended the same microbatch's; messages take no time.
    """
    num_pipelines, num_stages, num = forward.shape
    recurrence = _recurrence_1f1b(num_stages, num)
    actions = np.empty(recurrence.num_actions, dtype=np.int64)
    actions[recurrence.row] = np.arange(recurrence.num_actions)  # by row
    kind_and_stage, place = np.divmod(actions, num)
    seconds = np.concatenate([forward, backward], axis=1).reshape(num_pipelines, -1).T.copy()  # (2 p l, c)
    first_index = (kind_and_stage * num)[:, None]
    last = recurrence.row[num_stages * num + num - 1]  # the first stage's backward of the last microbatch
    spans = np.empty(len(orders))
    width = max(min(recurrence.runs_at_a_time() // num_pipelines, len(orders)), 1)
    index = np.empty((len(actions), width), dtype=np.int64)
    times = np.empty((len(actions), width, num_pipelines))
    table = times.reshape(len(actions), -1)
    for first in range(0, len(orders), width):
        part = slice(min(first, len(orders) - width), first + width)  # the last part may overlap the one before
        orders[part].T.take(place, axis=0, out=index, mode="clip")  # "raise" would copy
        np.add(index, first_index, out=index)
        seconds.take(index, axis=0, out=times, mode="clip")
        recurrence.replace_durations_by_ends(table)
        spans[part] = times[last].max(axis=1)
    return spans


@lru_cache(maxsize=16)  # the searches of a run share one
def _recurrence_1f1b(num_stages: int, num: int) -> PipelineRecurrence:
    """The recurrence of 1F1B: stage s warms up with p - s forwards, then backwards and forwards alternate."""
    numbers = np.arange(2 * num_stages * num).reshape(2, num_stages, num)
    pairs = []  # (consumer, producer) by stage
    for stage, (forward, backward) in enumerate(numbers.swapaxes(0, 1)):
        num_warmup = min(num_stages - stage, num)
        steady = np.stack([backward[: num - num_warmup], forward[num_warmup:]], axis=1).ravel()
        sequence = np.concatenate([forward[:num_warmup], steady, backward[num - num_warmup :]])
        pairs.append(np.stack([sequence[1:], sequence[:-1]]))
        if stage > 0:
            pairs.append(np.stack([forward, numbers[0, stage - 1]]))
            pairs.append(np.stack([numbers[1, stage - 1], backward]))
    consumer, producer = np.concatenate(pairs, axis=1)
    return PipelineRecurrence(numbers.size, Dependencies(consumer, producer, np.full(len(consumer), NO_MESSAGE)))
