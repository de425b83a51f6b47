"""How the methods of grouping would treat a recipe's data, side by side."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mmtrain.balance import Grouping, SampleLengths
from mmtrain.balance.methods import GROUPING_METHODS, token_targets, unit_tokens
from mmtrain.balance.summary import GroupingScore, score_grouping
from mmtrain.data.stream.group_stream import GroupStream


def compare_grouping_methods(
    lengths: SampleLengths,
    weights: npt.NDArray[np.float64],
    grouping: Grouping,
    seed: int,
    num_replicas: int,
    clock: Callable[[], float],
) -> list[GroupingScore]:
    """Group one epoch by every method as training would, and judge it for `num_replicas` replicas side by side.

    clock: seconds from any start; an epoch's grouping is timed by it.
    """
    units, tokens = unit_tokens(lengths)
    targets, scores = token_targets(lengths, grouping), []
    for method in GROUPING_METHODS:
        begin = clock()
        groups = GroupStream(lengths, replace(grouping, method=method), seed, weights).epoch(0, num_replicas, targets)
        scores.append(score_grouping(method, groups, units, tokens, grouping.seq_len, num_replicas, clock() - begin))
    return scores
