"""Summarize what training makes of a recipe's data: by grouping method, and by source."""

from collections.abc import Callable
from dataclasses import replace

from mmtrain.balance import Grouping
from mmtrain.balance.grouping.imbalance import pad_ratio
from mmtrain.balance.grouping.methods import (
    GROUPING_METHODS,
    grouping_sizes,
    token_targets,
    unit_items,
    unit_tokens,
)
from mmtrain.balance.grouping.mixture import count_by_source
from mmtrain.balance.grouping.summary import GroupingScore, IsfScore, SourceSummary, score_grouping
from mmtrain.data.index.data_index import DataIndex
from mmtrain.data.stream.group_stream import GroupStream
from mmtrain.recipe.settings.schema import Recipe

PUBLISHED_SLACKS = (1 / 64, 1 / 32, 1 / 16)  # of OmniBal's table 6: 64, 128 and 256 of 4,096 tokens
MAX_ITEM_SHARE = 0.99  # of an encoder's budget: larger items leave a threshold above 0


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
    return [_score(index, replace(grouping, method=method), seed, num_replicas, clock) for method in GROUPING_METHODS]


def _score(
    index: DataIndex,
    grouping: Grouping,
    seed: int,
    num_replicas: int,
    clock: Callable[[], float],
    *,
    pads: bool = False,
) -> GroupingScore:
    """Group one epoch and score it; `pads`: as mini-batches that are padded, also for methods that pack."""
    lengths = index.lengths
    units, tokens = unit_tokens(lengths)
    targets = token_targets(lengths, grouping)
    start_s = clock()
    stream = GroupStream(lengths, grouping, seed, index.weights, index.mixture)
    groups = stream.epoch(0, num_replicas, targets)
    seconds = clock() - start_s
    score = score_grouping(grouping.method, groups, units, tokens, grouping.seq_len, num_replicas, seconds)
    return replace(score, pad_ratio=pad_ratio(tokens[:, 0], groups)) if pads else score


def score_isf_rounds(
    index: DataIndex, grouping: Grouping, seed: int, num_replicas: int, clock: Callable[[], float]
) -> list[IsfScore]:
    """Score ISF after each of its rounds, and before the first (OmniBal, arXiv 2407.20761, figure 4)."""
    rules = grouping.isf
    return [
        _score_isf(index, replace(grouping, isf=replace(rules, rounds=rounds)), seed, num_replicas, clock)
        for rounds in range(rules.rounds + 1)
    ]


def score_isf_thresholds(
    index: DataIndex, grouping: Grouping, seed: int, num_replicas: int, clock: Callable[[], float]
) -> list[IsfScore]:
    """Score ISF with the thresholds Q_t and Q_v of OmniBal's table 6, from which a group is full.

    Q_t may lack 1/64, 1/32 or 1/16, as published of 4,096 tokens, and Q_v nothing; in the last row Q_v may lack one
    item of mean size of the encoder with most tokens.
    """
    slacks = [(slack, 0.0) for slack in PUBLISHED_SLACKS]
    item_share = _share_of_one_item(index, grouping)
    if item_share is not None:
        slacks.append((PUBLISHED_SLACKS[1], item_share))
    rules = [replace(grouping.isf, slack=slack, encoder_slack=encoder_slack) for slack, encoder_slack in slacks]
    return [_score_isf(index, replace(grouping, isf=isf), seed, num_replicas, clock) for isf in rules]


def _score_isf(
    index: DataIndex, grouping: Grouping, seed: int, num_replicas: int, clock: Callable[[], float]
) -> IsfScore:
    rules = grouping.isf
    score = _score(index, replace(grouping, method="isf"), seed, num_replicas, clock, pads=True)
    encoder_slack = rules.slack if rules.encoder_slack is None else rules.encoder_slack
    return IsfScore(rules.rounds, rules.slack, encoder_slack, score)


def _share_of_one_item(index: DataIndex, grouping: Grouping) -> float | None:
    """Return which share of its budget a mean item of the encoder with most tokens has; None without items."""
    _, tokens = unit_tokens(index.lengths)
    num_items = unit_items(index.lengths).sum(axis=0)
    if not num_items.any():
        return None
    largest = int(tokens[:, 1:].sum(axis=0).argmax())
    budget = int(grouping_sizes(index.lengths, replace(grouping, method="isf")).budgets[1 + largest])
    counts_items = grouping.isf.encoder_budget == "items"
    size = 1.0 if counts_items else float(tokens[:, 1 + largest].sum() / num_items[largest])
    return min(size / budget, MAX_ITEM_SHARE)


def summarize_sources(recipe: Recipe, index: DataIndex) -> list[SourceSummary]:
    """Return a summary of each source that the recipe trains on, in its order."""
    assert index.sources is not None, "an index of a recipe's sources"
    numbers, names = index.sources.numbers, index.sources.names
    num_samples = index.sources.num_samples
    _, tokens = count_by_source(numbers, len(names), index.lengths.tokens)
    stream, num_steps = GroupStream.of(recipe, index), recipe.train.num_steps
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
