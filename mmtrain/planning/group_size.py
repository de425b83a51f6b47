"""Choose the size of groups, the tokens of a microbatch, where the recipe states a step in samples or tokens."""

import numpy as np

from mmtrain.balance import Grouping, SampleLengths
from mmtrain.balance.batch_meta import mean_tokens
from mmtrain.balance.grouping.groups_per_step import group_tokens_for
from mmtrain.errors import RecipeError
from mmtrain.planning.artifact.plan import AS_FAST_RATIO
from mmtrain.planning.whatif import quick_tokens_per_s
from mmtrain.recipe.settings.schema import Recipe

MAX_WORSE_SIZES = 3  # in a row, after which no larger groups are tried; one of two sizes may suit no mesh


def choose_group_size(
    recipe: Recipe,
    lengths: SampleLengths,
    *,
    num_ranks: int,
    hardware: str,
    recipe_sha256: str,
    baseline: str | None = None,
) -> Recipe:
    """Return the recipe with the size of groups that makes the fastest plan, and as many groups as make its step.

    Sizes are tried from the smallest one on, each by a quick search that ends where no plan is faster than the best of
    smaller groups. All ends after three in a row that are not faster, or do not fit. The smallest size that is as fast
    as the best within 1% is chosen.

    Args:
        recipe: states its step in samples or tokens.
        lengths: of its samples.
        num_ranks: to plan for.
        hardware: name of a preset.
        recipe_sha256: fingerprint of the recipe.
        baseline: a rule of thumb to choose the size for; None: what is searched.

    Raises:
        RecipeError: no size makes such a step.
    """
    numbers = numbers_of_groups(recipe, lengths, num_ranks)
    faster: list[tuple[float, Recipe]] = []  # tokens/s of the sizes that were faster than all smaller ones
    num_worse = 0
    for num_groups in numbers:
        candidate = with_size_for(recipe, lengths, num_groups)
        limit = faster[-1][0] if faster else 0.0
        tokens_per_s = quick_tokens_per_s(candidate, lengths, num_ranks, hardware, recipe_sha256, limit, baseline)
        if tokens_per_s > limit:
            faster.append((tokens_per_s, candidate))
            num_worse = 0
        else:
            num_worse += 1
        if num_worse == MAX_WORSE_SIZES:
            break
    if not faster:  # the full search of the smallest groups says why nothing fits
        return with_size_for(recipe, lengths, numbers[0])
    return next(sized for tokens_per_s, sized in faster if tokens_per_s >= faster[-1][0] / AS_FAST_RATIO)


def with_size_for(recipe: Recipe, lengths: SampleLengths, num_groups: int) -> Recipe:
    """Return the recipe with `num_groups` groups in a step, of the size with which they make it on average."""
    batch = recipe.train.global_batch
    assert not isinstance(batch, int), "with data.seq_len: auto a step is stated in samples or tokens"
    grouping = Grouping.of(recipe.with_groups(num_groups, int(lengths.tokens.max())).data, num_groups)
    return recipe.with_groups(num_groups, group_tokens_for(lengths, grouping, batch))


def numbers_of_groups(recipe: Recipe, lengths: SampleLengths, num_ranks: int) -> list[int]:
    """Return numbers of groups to try, the largest first, in all of which the longest sample has room.

    They are multiples of what the recipe fixes and of the odd part of the number of ranks, times powers of two and
    three times these, so that many data-parallel degrees divide them.

    Raises:
        RecipeError: the step is smaller than the longest sample, or than what the recipe fixes.
    """
    batch = recipe.train.global_batch
    assert not isinstance(batch, int), "with data.seq_len: auto a step is stated in samples or tokens"
    [(unit, number)] = batch.items()
    tokens = number * float(mean_tokens(lengths)[0]) if unit == "samples" else number
    longest, multiple = int(lengths.tokens.max()), recipe.required_multiple
    most = int(tokens // longest)
    odd_part = num_ranks // (num_ranks & -num_ranks)
    for base in (np.lcm(odd_part, multiple), multiple):
        numbers = {int(base) * factor << power for factor in (1, 3) for power in range(most.bit_length())}
        numbers = {number for number in numbers if number <= most}
        if numbers:
            return sorted(numbers, reverse=True)
    fixed = f" in each of {multiple} groups, of which parallel fixes a multiple" * (multiple > 1)
    raise RecipeError(
        f"train.global_batch: a step of {number} {unit} has no room for the longest sample, of {longest} LLM tokens"
        f"{fixed}; allowed: at least {longest * multiple} tokens, or a smaller data.max_sample_tokens"
    )
