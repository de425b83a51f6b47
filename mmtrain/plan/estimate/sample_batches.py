"""A few global batches like those the run will see, so that plans are judged on real lengths, not on their mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmtrain.balance import BatchMeta, Grouping, IntArray, SampleLengths, assign
from mmtrain.balance.methods import arrange_window, group_window, grouping_sizes, unit_tokens
from mmtrain.errors import PlanError

NUM_SAMPLED_BATCHES = 3
SAMPLE_SURPLUS_RATIO = (
    1.25  # samples drawn beyond those that fill the groups on average: packing leaves gaps, never fewer groups
)
MIN_SAMPLES_TO_GROUP = 4096  # samples; with fewer to choose from, batches would be less even than training's


@dataclass(frozen=True)
class SampledBatches:
    """Groups of some global batches; independent of any plan, as the stream of groups is."""

    lengths: SampleLengths
    groups: tuple[Sequence[IntArray], ...]  # per batch

    @property
    def global_batch(self) -> int:
        """Groups in one batch."""
        return len(self.groups[0])

    def lay_out(self, dp: Mapping[str, int], num_microbatches: Mapping[str, int]) -> list[BatchMeta]:
        """The batches as a plan with these data-parallel sizes would run them."""
        return [assign(i, 0, groups, self.lengths, dp, num_microbatches) for i, groups in enumerate(self.groups)]


def sample_batches(
    lengths: SampleLengths, grouping: Grouping, seed: int, num_batches: int = NUM_SAMPLED_BATCHES
) -> SampledBatches:
    """Draw samples at random, group them as training does, and take steps that stand for all.

    Grouping makes the groups of a step alike, so steps differ: from a light one to a heavy one, the steps in the middle
    of as many equal parts are taken. A dataset too small for so many groups is used over and over, as further epochs
    would. Long samples that train in steps of their own are drawn among the others: on average a step costs what it
    will. Raises PlanError if there are no samples.
    """
    if len(lengths) == 0:
        raise PlanError("data.sources: no usable sample, so there is nothing to plan for")
    size = grouping.global_batch
    per_group = grouping.seq_len / max(float(lengths.tokens.mean()), 1.0)
    num_samples = max(
        int(np.ceil(SAMPLE_SURPLUS_RATIO * num_batches * size * per_group)), min(MIN_SAMPLES_TO_GROUP, grouping.window)
    )
    rng, sizes = np.random.default_rng(seed), grouping_sizes(lengths, grouping)
    order = rng.permutation(len(lengths))[:num_samples].astype(np.int64)
    packed = arrange_window(sizes, group_window(sizes, order, grouping, rng), grouping, 0, rng)
    num_steps = max(num_batches, len(packed) // size)
    steps = [[packed[i % len(packed)] for i in range(s * size, (s + 1) * size)] for s in range(num_steps)]
    work = unit_tokens(lengths)[1].sum(axis=1)
    steps.sort(key=lambda groups: int(work[np.concatenate(groups)].sum()))
    middles = [(2 * i + 1) * num_steps // (2 * num_batches) for i in range(num_batches)]
    return SampledBatches(lengths, tuple(steps[middle] for middle in middles))
