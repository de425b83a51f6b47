"""How long plain 1F1B pipelines take, under many orders of their microbatches."""

from functools import lru_cache

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.pipeline_recurrence import NO_MESSAGE, Dependencies, PipelineRecurrence


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
    seconds = np.moveaxis(np.concatenate([forward, backward], axis=1), 0, 2).copy()  # (2 p, l, c)
    times = seconds[kind_and_stage[:, None], orders.T[place]].reshape(len(actions), -1)
    recurrence.replace_durations_by_ends(times)
    last = recurrence.row[num_stages * num + num - 1]  # the first stage's backward of the last microbatch
    spans: FloatArray = times[last].reshape(len(orders), num_pipelines).max(axis=1)
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
