"""Describe how the data has changed since a plan was made for it."""

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from mmtrain.balance import SampleLengths
from mmtrain.balance.grouping.methods import unit_tokens
from mmtrain.costs import TokenLoad
from mmtrain.planning.artifact.plan import LargestMicrobatch, Plan, PlannedData

MAX_TOKENS_RATIO = 1.1  # of a unit's mean tokens per sample, then and now; predictions are off by about as much


def summarize_data(lengths: SampleLengths, largest_load: Mapping[str, TokenLoad]) -> PlannedData:
    """Return what a plan records of the data it is made for, and of the largest microbatches, by unit."""
    largest = {unit: LargestMicrobatch(**asdict(load)) for unit, load in largest_load.items()}
    return PlannedData(samples=len(lengths), tokens=_mean_tokens(lengths), largest_microbatch=largest)


def _mean_tokens(lengths: SampleLengths) -> dict[str, float]:
    """Return the mean tokens of a sample, by unit that processes them."""
    units, tokens = unit_tokens(lengths)
    means = np.average(tokens, axis=0, weights=lengths.uses).round(2).tolist()
    return dict(zip(units, means, strict=True))


def describe_data_drift(plan: Plan, lengths: SampleLengths) -> str:
    """Return in words how the data differs from that for which a plan was made; empty if little.

    The plan stays valid: it computes the same whatever the data. But its layer partition, its predicted step time and
    its memory were meant for other lengths.
    """
    planned, current = plan.data.tokens, _mean_tokens(lengths)
    changes = [
        f"{unit}: {tokens:,.0f} tokens per sample instead of {planned.get(unit, 0.0):,.0f}"
        for unit, tokens in current.items()
        if not _is_close(tokens, planned.get(unit, 0.0))
    ]
    return "; ".join(changes)


def _is_close(tokens: float, other: float) -> bool:
    return max(tokens, other) <= MAX_TOKENS_RATIO * min(tokens, other)
