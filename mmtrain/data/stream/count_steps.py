"""From the epochs that a recipe may state to steps, and what an epoch is in steps and samples."""

import math
from dataclasses import dataclass

from mmtrain.balance import Grouping, SampleLengths
from mmtrain.balance.grouping.groups_per_step import mean_group
from mmtrain.data.index.data_index import DataIndex
from mmtrain.data.stream.group_stream import GroupStream
from mmtrain.recipe.settings.schema import Recipe


@dataclass(frozen=True)
class EpochSize:
    """What one pass over the data is."""

    steps: float
    samples: float  # with their weights

    @property
    def samples_per_step(self) -> float:
        """The samples of a step on average."""
        return self.samples / self.steps


def with_counted_steps(recipe: Recipe, index: DataIndex) -> Recipe:
    """Return the recipe, its groups known, with the steps of its epochs; one that states steps as it is.

    Counts the groups of the whole epoch, which takes as long as to group all samples once where that is not cached.
    """
    if recipe.train.epochs is None:
        return recipe
    stream = GroupStream.of(recipe, index)
    return _with_steps(recipe, stream.steps_per_epoch)


def with_estimated_steps(recipe: Recipe, lengths: SampleLengths) -> Recipe:
    """Return the recipe, its groups known, with about the steps of its epochs; one that states steps as it is.

    As near as a mean group of `MAX_SAMPLES_TO_GROUP` samples is to one of all, without grouping all of them.
    """
    if recipe.train.steps is not None:
        return recipe
    return _with_steps(recipe, estimate_epoch(recipe, lengths).steps)


def _with_steps(recipe: Recipe, steps_per_epoch: float) -> Recipe:
    """Set the steps of the recipe's epochs: the nearest whole number where epochs end inside of steps, at least 1."""
    assert recipe.train.epochs is not None, "a recipe states steps or epochs"
    return recipe.with_steps(max(1, round(recipe.train.epochs * steps_per_epoch)))


def estimate_epoch(recipe: Recipe, lengths: SampleLengths) -> EpochSize:
    """Return about the size of an epoch of a recipe whose groups are known; of one with shares, by its tokens."""
    num_groups = recipe.train.num_groups
    mean = mean_group(lengths, Grouping.of(recipe.data, num_groups))
    sources = recipe.data.sources
    if sources[0].share is not None:
        groups = float(lengths.tokens.sum()) / mean.tokens
    else:
        # Without uses of their own, samples have one weight, which is that of all sources.
        uses = len(lengths) * sources[0].weight if lengths.uses is None else float(lengths.uses[:].sum())
        groups = uses / mean.samples
    steps = groups / num_groups
    if recipe.train.epochs is not None and sources[0].share is None and steps > 1:
        steps = float(math.ceil(steps))  # epochs end with steps
    return EpochSize(steps, groups * mean.samples)
