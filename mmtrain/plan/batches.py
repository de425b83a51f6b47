"""A few global batches like those the run will see, so that plans are judged on real lengths, not on their mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmtrain.balance import BatchMeta, IntArray, SampleLengths, assign, pack
from mmtrain.errors import PlanError

NUM_BATCHES = 3
SPARE = 1.25  # samples drawn beyond those that fill the groups on average: packing leaves gaps, never fewer groups


@dataclass(frozen=True)
class BatchSample:
    """Groups of some global batches; independent of any plan, as the stream of groups is."""

    lengths: SampleLengths
    groups: tuple[Sequence[IntArray], ...]  # per batch

    @property
    def global_batch(self) -> int:
        """Groups in one batch."""
        return len(self.groups[0])

    def lay_out(self, dp: Mapping[str, int], num_microbatches: int) -> list[BatchMeta]:
        """The batches as a plan with these data-parallel sizes would run them."""
        return [assign(i, 0, groups, self.lengths, dp, num_microbatches) for i, groups in enumerate(self.groups)]


def draw_batches(
    lengths: SampleLengths, seq_len: int, window: int, global_batch: int, seed: int, num_batches: int = NUM_BATCHES
) -> BatchSample:
    """Draw samples at random and pack them as training does (sequences of at most `seq_len` LLM tokens).

    A dataset too small for that many groups is used over and over, as further epochs would.
    Raises PlanError if there are no samples.
    """
    if len(lengths) == 0:
        raise PlanError("data.sources: no usable sample, so there is nothing to plan for")
    wanted = num_batches * global_batch
    num_samples = int(np.ceil(SPARE * wanted * seq_len / max(float(lengths.tokens.mean()), 1.0)))
    order = np.random.default_rng(seed).permutation(len(lengths))[:num_samples]
    packed = pack(lengths.tokens[:, None], np.array([seq_len]), order.astype(np.int64), window)
    groups = [packed[i % len(packed)] for i in range(wanted)]
    return BatchSample(lengths, tuple(groups[i * global_batch : (i + 1) * global_batch] for i in range(num_batches)))
