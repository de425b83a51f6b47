"""What the shares of sources demand of each other, and of other settings."""

from collections.abc import Iterator
from math import isclose

from mmtrain.recipe.raw_tree import KeyPath, Problem
from mmtrain.recipe.settings.data_settings import share_schedule
from mmtrain.recipe.settings.schema import Recipe

MAX_SUM_ERROR = 1e-3  # of shares: 0.333 three times adds up to 1


def check_shares(recipe: Recipe) -> Iterator[Problem]:
    """All sources have shares or none has; at every step they add up to 1."""
    data = recipe.data
    for i, source in enumerate(data.validation):
        if source.share is not None:
            text = "validation uses every sample once; remove the share"
            yield Problem(("data", "validation", i, "share"), text)
    # In a recipe with other problems, shares are as they were written.
    schedules = [share_schedule(source.share) for source in data.sources]
    if all(schedule is None for schedule in schedules):
        return
    problems = list(_check_each(recipe, schedules))
    yield from problems
    if not problems:
        yield from _check_sums([schedule or {} for schedule in schedules])
    if data.long_sample_tokens is not None:
        text = f"found {data.long_sample_tokens}; long samples have no steps of their own where sources have shares"
        yield Problem(("data", "long_sample_tokens"), f"{text}: remove it, or use weights instead of shares")


def _check_each(recipe: Recipe, schedules: list[dict[int, float] | None]) -> Iterator[Problem]:
    """Yield what is wrong with the share of a single source."""
    for i, (source, schedule) in enumerate(zip(recipe.data.sources, schedules, strict=True)):
        path: KeyPath = ("data", "sources", i)
        if schedule is None:
            text = "missing, while other sources have shares; allowed: a share for every source, or for none"
            yield Problem((*path, "share"), text)
            continue
        if source.weight != 1:
            text = (
                f"found {source.weight:g} beside a share; allowed: a share or a weight. Remove one of them everywhere"
            )
            yield Problem((*path, "weight"), text)
        if 0 not in schedule:
            steps = ", ".join(map(str, sorted(schedule))) or "none"
            text = f"the schedule has the steps {steps}; allowed: one that starts at step 0 (`0: ...`)"
            yield Problem((*path, "share"), text)


def _check_sums(schedules: list[dict[int, float]]) -> Iterator[Problem]:
    """Yield the first step from which the shares do not add up to 1."""
    for step in sorted({step for schedule in schedules for step in schedule}):
        shares = [schedule[max(first for first in schedule if first <= step)] for schedule in schedules]
        if not isclose(sum(shares), 1, abs_tol=MAX_SUM_ERROR):
            terms = " + ".join(f"{share:g}" for share in shares)
            text = f"shares of step {step} add up to {terms} = {sum(shares):g}; allowed: 1"
            yield Problem(("data", "sources"), text)
            return
