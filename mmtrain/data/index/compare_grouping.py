"""How the methods of grouping would treat a recipe's data, side by side."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mmtrain.balance import Grouping, SampleLengths
from mmtrain.balance.methods import METHODS, token_aims, unit_tokens
from mmtrain.balance.summary import Score, score
from mmtrain.data.stream.group_stream import GroupStream


def compare_methods(
    lengths: SampleLengths,
    weights: npt.NDArray[np.float64],
    grouping: Grouping,
    seed: int,
    num_replicas: int,
    clock: Callable[[], float],
) -> list[Score]:
    """Group one epoch by every method as training would, and judge it for `num_replicas` replicas side by side.

    clock: seconds from any start; an epoch's grouping is timed by it.
    """
    units, tokens = unit_tokens(lengths)
    aims, scores = token_aims(lengths, grouping), []
    for method in METHODS:
        begin = clock()
        groups = GroupStream(lengths, replace(grouping, method=method), seed, weights).epoch(0, num_replicas, aims)
        scores.append(score(method, groups, units, tokens, grouping.seq_len, num_replicas, clock() - begin))
    return scores
