"""A few global batches like those of the run, so that candidates are compared on real lengths and not on their mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmtrain.balance import BatchMeta, Grouping, IntArray, SampleLengths, assign
from mmtrain.balance.methods import arrange_window, group_window, grouping_sizes, unit_tokens
from mmtrain.errors import PlanError
from mmtrain.plan.budget import DEFAULT_BUDGET, SamplingBudget


@dataclass(frozen=True)
class SampledBatches:
    """Groups of some global batches. They depend on no plan, as the stream of groups in training does not."""

    lengths: SampleLengths
    groups: tuple[Sequence[IntArray], ...]  # per batch

    @property
    def global_batch(self) -> int:
        """Groups in one batch."""
        return len(self.groups[0])

    def lay_out(self, dp: Mapping[str, int], num_microbatches: Mapping[str, int]) -> list[BatchMeta]:
        """Assign every batch to replicas and microbatches as a plan with these data-parallel degrees would."""
        return [assign(step, 0, groups, self.lengths, dp, num_microbatches) for step, groups in enumerate(self.groups)]


def sample_batches(
    lengths: SampleLengths, grouping: Grouping, seed: int, budget: SamplingBudget = DEFAULT_BUDGET.sampling
) -> SampledBatches:
    """Draw samples at random, group them as training does, and take steps that stand for all.

    Grouping makes the groups of one step alike, so steps differ. Ordered by their work, the steps in the middle of
    `num_batches` equal parts are taken. A dataset too small for so many groups is repeated, as further epochs would.
    Long samples that train in steps of their own are drawn among the others, so the mean cost of a step is right.

    Raises:
        PlanError: there are no samples.
    """
    if len(lengths) == 0:
        raise PlanError("data.sources: no usable sample, so there is nothing to plan for")
    num_batches, global_batch = budget.num_batches, grouping.global_batch
    samples_per_group = grouping.seq_len / max(float(lengths.tokens.mean()), 1.0)
    num_needed = int(np.ceil(budget.sample_surplus_ratio * num_batches * global_batch * samples_per_group))
    num_samples = max(num_needed, min(budget.min_samples_to_group, grouping.window))
    rng = np.random.default_rng(seed)
    sizes = grouping_sizes(lengths, grouping)
    order = rng.permutation(len(lengths))[:num_samples].astype(np.int64)
    groups = arrange_window(sizes, group_window(sizes, order, grouping, rng), grouping, 0, rng)
    num_steps = max(num_batches, len(groups) // global_batch)
    steps = [
        [groups[i % len(groups)] for i in range(step * global_batch, (step + 1) * global_batch)]
        for step in range(num_steps)
    ]
    work = unit_tokens(lengths)[1].sum(axis=1)
    steps.sort(key=lambda step: int(work[np.concatenate(step)].sum()))
    middles = [(2 * part + 1) * num_steps // (2 * num_batches) for part in range(num_batches)]
    return SampledBatches(lengths, tuple(steps[middle] for middle in middles))
