"""Summarize what training makes of a recipe's data: by grouping method, and by source."""

from collections.abc import Callable
from dataclasses import replace

from mmtrain.balance import Grouping
from mmtrain.balance.grouping.methods import GROUPING_METHODS, token_targets, unit_tokens
from mmtrain.balance.grouping.mixture import count_by_source
from mmtrain.balance.grouping.summary import GroupingScore, SourceSummary, score_grouping
from mmtrain.data.index.data_index import DataIndex
from mmtrain.data.stream.group_stream import GroupStream
from mmtrain.recipe.settings.schema import Recipe


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


def summarize_sources(recipe: Recipe, index: DataIndex) -> list[SourceSummary]:
    """Return a summary of each source that the recipe trains on, in its order."""
    assert index.sources is not None, "an index of a recipe's sources"
    numbers, names = index.sources.numbers, index.sources.names
    num_samples = index.sources.num_samples
    _, tokens = count_by_source(numbers, len(names), index.lengths.tokens)
    stream, num_steps = GroupStream.of(recipe, index), recipe.train.steps
    if index.mixture is not None:
        first_steps = (phase.first_step for phase in index.mixture.phases)
        shares = dict(zip(first_steps, index.mixture.token_shares(index.lengths.tokens), strict=True))
        passes = stream.source_passes(num_steps)
    else:
        used = tokens * [source.weight for source in recipe.data.sources]
        shares = {0: used / used.sum()}
        epochs = stream.epochs_done(num_steps * recipe.train.num_groups)
        passes = [epochs * source.weight for source in recipe.data.sources]
    return [
        SourceSummary(
            name=name,
            samples=num_samples[i],
            tokens=int(tokens[i]),
            token_shares={step: float(of_sources[i]) for step, of_sources in shares.items()},
            passes=passes[i],
        )
        for i, name in enumerate(names)
    ]
