"""From the samples or tokens of a step, which a recipe may state, to its number of groups."""

import math

from mmtrain.balance import Grouping, SampleLengths
from mmtrain.balance.batch_meta import mean_tokens
from mmtrain.balance.grouping.groups_per_step import MAX_ROUNDING_RATIO, groups_in_step, mean_group
from mmtrain.errors import RecipeError
from mmtrain.recipe.settings.schema import Recipe


def count_groups(recipe: Recipe, lengths: SampleLengths) -> Recipe:
    """Return the recipe with the number of groups that hold its samples or tokens of a step on average.

    The number depends on the recipe and the data alone. A recipe that states groups is returned as it is.

    Raises:
        RecipeError: a step would be less than one group, or the planner is to choose the size of groups.
    """
    batch, seq_len = recipe.train.global_batch, recipe.data.seq_len
    if isinstance(batch, int):
        return recipe
    if seq_len == "auto":
        raise RecipeError(
            "data.seq_len: auto is for `mmtrain plan` and `mmtrain train`, and nothing here plans; set the groups that "
            "the plan states, like --set data.seq_len=8192 --set train.global_batch=64"
        )
    tokens = float(mean_tokens(lengths)[0])
    estimate = batch.get("tokens", batch.get("samples", 0) * tokens) / seq_len
    grouping = Grouping.of(recipe.data, max(1, round(estimate)))
    mean = mean_group(lengths, grouping)
    mean_groups, multiple = mean.groups_of(batch), recipe.required_multiple
    num_groups = groups_in_step(mean_groups, multiple, recipe.cluster.ranks or 1)
    if num_groups == 0 or mean_groups < 1 - MAX_ROUNDING_RATIO:
        [(unit, number)] = batch.items()
        least = math.ceil(multiple * (mean.samples if unit == "samples" else mean.tokens))
        fixed = f", and parallel fixes replicas of which a step has a multiple of {multiple} groups" * (multiple > 1)
        raise RecipeError(
            f"train.global_batch: {number} {unit} are {mean_groups:.2g} groups: a group of at most {seq_len} tokens "
            f"(data.seq_len) holds {mean.samples:.3g} samples and {mean.tokens:.0f} tokens on average{fixed}; allowed: "
            f"at least about {least} {unit}, or a smaller data.seq_len"
        )
    return recipe.with_groups(num_groups, seq_len)


def keep_groups(kept: Recipe, recipe: Recipe, lengths: SampleLengths) -> Recipe:
    """Return `kept`, the recipe with the groups that a run has had until now, whatever other plan it gets.

    Raises:
        RecipeError: the recipe states another step now.
    """
    batch, num_groups = recipe.train.global_batch, kept.train.num_groups
    if isinstance(batch, int):
        return kept
    mean = mean_group(lengths, Grouping.of(kept.data, num_groups))
    if abs(mean.groups_of(batch) - num_groups) > max(0.5, 2 * MAX_ROUNDING_RATIO * num_groups):
        raise RecipeError(
            f"--resume: train.global_batch is {batch} now, and the run has steps of {num_groups} groups of at most "
            f"{kept.data.group_tokens} tokens, which hold {mean.samples * num_groups:.0f} samples and "
            f"{mean.tokens * num_groups:.0f} tokens on average; state what it was before, or start anew with another "
            "--run-dir"
        )
    return kept
