"""Whether data still looks like that for which a plan was made."""

from mmtrain.balance import SampleLengths
from mmtrain.balance.methods import unit_tokens
from mmtrain.plan.artifact.plan import Plan, PlannedData

MAX_TOKENS_RATIO = 1.1  # of a unit's tokens a sample, more or fewer: predictions are off by as much


def summarize_data(lengths: SampleLengths) -> PlannedData:
    """What a plan remembers of the data it is made for."""
    units, tokens = unit_tokens(lengths)
    means = tokens.mean(axis=0).round(2).tolist()
    return PlannedData(samples=len(lengths), tokens=dict(zip(units, means, strict=True)))


def describe_data_drift(plan: Plan, lengths: SampleLengths) -> str:
    """What has changed of the data since the plan was made, in words; empty where little has, or nobody knows.

    A plan is not void for it: whatever the data, it computes the same. But where samples have become longer, or media
    more, its cuts, its prediction and its memory were meant for something else.
    """
    if plan.data is None:  # made before plans remembered
        return ""
    then, now = plan.data, summarize_data(lengths)
    changed = [
        f"{now.tokens[unit]:,.0f} tokens of a sample in {unit}, {then.tokens.get(unit, 0.0):,.0f} then"
        for unit in now.tokens
        if not _alike(now.tokens[unit], then.tokens.get(unit, 0.0))
    ]
    return "; ".join(changed)


def _alike(one: float, other: float) -> bool:
    return max(one, other) <= MAX_TOKENS_RATIO * min(one, other)
