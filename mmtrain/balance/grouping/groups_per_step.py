"""How many groups make a step of so many samples or LLM tokens, and how large groups are that make it together.

The number of groups in a step is fixed, because every microbatch of a plan is one group. What groups hold on average is
counted on groups of the data itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mmtrain.balance.batch_meta import IntArray, SampleLengths, mean_tokens
from mmtrain.balance.columns import BLOCK_ROWS, block_slices
from mmtrain.balance.grouping.methods import Grouping, group_window, grouping_sizes

BatchUnit = Literal["samples", "tokens"]
MAX_ROUNDING_RATIO = 1 / 32  # by which a step may differ from what was asked for, so that more replicas divide it
MAX_SAMPLES_TO_GROUP = 16384  # the default of `data.grouping_window`; more change means by far less than the rounding
NUM_SIZES_TRIED = 3  # after which the size of groups changes by less than the rounding
MAX_SHUFFLED_SAMPLES = 1 << 24  # 128 MiB; of more, samples are drawn one by one
SEED = 0  # of the samples that are grouped: how many groups a step has depends on no seed of a run


@dataclass(frozen=True)
class MeanGroup:
    """What a group holds on average."""

    samples: float
    tokens: float  # of the LLM

    def groups_of(self, batch: Mapping[BatchUnit, int]) -> float:
        """Return how many such groups hold a batch of `{"samples": n}` or `{"tokens": n}`."""
        [(unit, number)] = batch.items()
        return number / (self.samples if unit == "samples" else self.tokens)


def mean_group(lengths: SampleLengths, grouping: Grouping) -> MeanGroup:
    """Group some of the samples as training does, as often as training uses them; return what a group holds.

    Samples that train in steps of their own are grouped with the others.
    """
    rng = np.random.default_rng(SEED)
    order = draw_samples(lengths, min(grouping.window, MAX_SAMPLES_TO_GROUP), rng)
    groups = group_window(grouping_sizes(lengths, grouping), order, grouping, rng)
    return MeanGroup(len(groups.samples) / len(groups), int(lengths.tokens[groups.samples].sum()) / len(groups))


def draw_samples(lengths: SampleLengths, num_samples: int, rng: np.random.Generator) -> IntArray:
    """Draw at most `num_samples` samples as often as training uses them: each once, or by the shares of sources."""
    if len(lengths) > MAX_SHUFFLED_SAMPLES:
        return _draw_few_of_many(lengths, num_samples, rng)
    if lengths.uses is None:
        return rng.permutation(len(lengths))[:num_samples].astype(np.int64)
    uses = np.asarray(lengths.uses)
    return rng.choice(len(lengths), num_samples, p=uses / uses.sum()).astype(np.int64)


def _draw_few_of_many(lengths: SampleLengths, num_samples: int, rng: np.random.Generator) -> IntArray:
    """Draw as `draw_samples` does, in memory that does not grow with the dataset; for data much larger than the draw.

    By shares: draw samples alike, and keep each as often as it is used in comparison with the one used most.
    """
    if lengths.uses is None:
        return rng.choice(len(lengths), num_samples, replace=False).astype(np.int64)
    most = max(float(lengths.uses[rows].max()) for rows in block_slices(len(lengths)))
    drawn = np.empty(0, dtype=np.int64)
    while len(drawn) < num_samples:
        candidates = rng.integers(0, len(lengths), BLOCK_ROWS)
        drawn = np.append(drawn, candidates[rng.random(BLOCK_ROWS) * most < lengths.uses[candidates]])
    return drawn[:num_samples]


def groups_in_step(mean_groups: float, multiple_of: int, num_ranks: int) -> int:
    """Return a number of groups near `mean_groups` that many data-parallel degrees divide; 0 if there is none.

    It is a multiple of `multiple_of`. Of those that differ by at most `MAX_ROUNDING_RATIO` it has most in common with
    the number of ranks times powers of two. If none is that near, it is the nearest.
    """
    lowest = math.ceil(mean_groups * (1 - MAX_ROUNDING_RATIO) / multiple_of)
    highest = math.floor(mean_groups * (1 + MAX_ROUNDING_RATIO) / multiple_of)
    if max(lowest, 1) > highest:
        return round(mean_groups / multiple_of) * multiple_of
    divided_by = num_ranks << highest.bit_length()
    near = (number * multiple_of for number in range(max(lowest, 1), highest + 1))
    return max(near, key=lambda number: (math.gcd(number, divided_by), -abs(number - mean_groups)))


def group_tokens_for(lengths: SampleLengths, grouping: Grouping, batch: Mapping[BatchUnit, int]) -> int:
    """Return the most tokens of a group with which the groups of a step hold the batch on average, or nearly so.

    grouping: its `seq_len` is not used. Groups are never full, so some sizes are tried, each corrected by how full
    groups were before. No size is below the longest sample.
    """
    [(unit, number)] = batch.items()
    tokens = number * float(mean_tokens(lengths)[0]) if unit == "samples" else number
    longest = int(lengths.tokens.max())
    size = math.ceil(tokens / grouping.global_batch)
    errors: dict[int, float] = {}
    for _ in range(NUM_SIZES_TRIED):
        size = max(size, longest)
        ratio = mean_group(lengths, replace(grouping, seq_len=size)).groups_of(batch) / grouping.global_batch
        errors[size] = abs(ratio - 1)
        size = math.ceil(size * ratio)
    return min(errors, key=lambda tried: errors[tried])
