"""Compare what the grouping methods make of a recipe's data."""

from collections.abc import Callable
from dataclasses import replace

from mmtrain.balance import Grouping
from mmtrain.balance.grouping.methods import GROUPING_METHODS, token_targets, unit_tokens
from mmtrain.balance.grouping.summary import GroupingScore, score_grouping
from mmtrain.data.index.data_index import DataIndex
from mmtrain.data.stream.group_stream import GroupStream


def compare_grouping_methods(
    index: DataIndex,
    grouping: Grouping,
    seed: int,
    num_replicas: int,
    clock: Callable[[], float],
) -> list[GroupingScore]:
    """Group one epoch by every method as training would, and score it for `num_replicas` replicas side by side.

    clock: returns seconds; the score holds the time that grouping an epoch takes.
    """
    lengths = index.lengths
    units, tokens = unit_tokens(lengths)
    targets = token_targets(lengths, grouping)
    scores = []
    for method in GROUPING_METHODS:
        start_s = clock()
        stream = GroupStream(lengths, replace(grouping, method=method), seed, index.weights, index.mixture)
        groups = stream.epoch(0, num_replicas, targets)
        seconds = clock() - start_s
        scores.append(score_grouping(method, groups, units, tokens, grouping.seq_len, num_replicas, seconds))
    return scores
