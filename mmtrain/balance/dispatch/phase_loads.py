"""Measure how evenly each phase of sharded units fills the ranks, before and after samples and items are balanced.

A phase is what all ranks compute of one unit. Sharded ranks wait for each other in every layer, so each mini-batch of a
phase takes as long as on its fullest rank (OrchMLLM, arXiv 2503.23830).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch_meta import BatchMeta, IntArray
from mmtrain.balance.step_targets import LLM


@dataclass(frozen=True)
class PhaseLoad:
    """The tokens of one unit in a step; those of the fullest ranks are summed over the mini-batches."""

    mean: float  # of a rank
    max_before: float  # of the fullest ranks, with each sample and its items where the stream has the sample
    max_after: float  # of the fullest ranks, as the step is run

    @property
    def over_mean(self) -> tuple[float, float]:
        """Return how much longer the fullest ranks compute than the mean rank, before and after; 1 without work."""
        if not self.mean:
            return 1.0, 1.0
        return self.max_before / self.mean, self.max_after / self.mean


def stream_groups_of(sample_id: IntArray, groups: Sequence[IntArray]) -> IntArray:
    """Return (S,) in which group of the stream each sample of a step is; groups: sample numbers, in stream order.

    A sample that a step uses twice is in the groups that use it, in any order.
    """
    in_stream = np.concatenate([np.zeros(0, dtype=np.int64), *groups])
    group = np.repeat(np.arange(len(groups), dtype=np.int64), [len(of_group) for of_group in groups])
    found = np.empty_like(group)
    found[np.argsort(sample_id, kind="stable")] = group[np.argsort(in_stream, kind="stable")]
    return found


def phase_loads(
    batch: BatchMeta, num_ranks: int, num_microbatches: Mapping[str, int], cp: int = 1
) -> dict[str, PhaseLoad]:
    """Return the load of each unit that every one of `num_ranks` ranks runs; `batch` names its stream groups.

    Without balancing, groups of the stream go to ranks in turns, and items stay with their samples. Padding counts
    neither before nor after. Where `cp` ranks share sequences, they count as one rank.
    """
    assert batch.stream_group is not None, "named by the stream"
    index, rank = np.divmod(batch.stream_group, num_ranks)
    loads = {}
    for unit, items in batch.items.items():
        of_block = index[items.sample] * num_microbatches[unit] // num_microbatches[LLM]
        before = of_block * num_ranks + rank[items.sample]
        loads[unit] = _phase_load(items.tokens, before, items.index * num_ranks + items.replica // cp, num_ranks)
    after = batch.index * num_ranks + batch.replica
    return loads | {LLM: _phase_load(batch.sample_tokens, batch.stream_group, after, num_ranks)}


def mean_phase_loads(steps: Sequence[Mapping[str, PhaseLoad]]) -> dict[str, PhaseLoad]:
    """Return the means over some steps, of which each has the same units."""
    means = {}
    for unit in steps[0]:
        of_steps = [(step[unit].mean, step[unit].max_before, step[unit].max_after) for step in steps]
        means[unit] = PhaseLoad(*np.mean(of_steps, axis=0).tolist())
    return means


@dataclass(frozen=True)
class OffNodeVolume:
    """The bytes of one unit's features that dispatches of a step send to other nodes; as many gradients come back."""

    total: float  # of all ranks
    fullest: float  # of the ranks that send or receive most, summed over the mini-batches


def off_node_volumes(
    batch: BatchMeta, ranks_per_node: int, row_bytes: Mapping[str, int], tp: int = 1
) -> dict[str, OffNodeVolume]:
    """Return by unit what an all-to-all moves between nodes (OrchMLLM, arXiv 2503.23830, figure 13).

    Replicas are TP groups of `tp` ranks, each of which moves all rows. row_bytes: of a feature, by unit.
    """
    volumes, replicas_per_node = {}, ranks_per_node // tp
    for unit, items in batch.items.items():
        home = batch.replica[items.sample]
        leaves = home // replicas_per_node != items.replica // replicas_per_node
        num_bytes = items.features[leaves] * row_bytes[unit]
        num_ranks = 1 + max(int(home.max(initial=0)), int(items.replica.max(initial=0)))
        num_mini_batches = 1 + int(items.index.max(initial=0))
        moved = []  # (mini-batches, ranks) sent, then received
        for rank in (items.replica, home):
            slot = (items.index * num_ranks + rank)[leaves]
            moved.append(np.bincount(slot, num_bytes, num_mini_batches * num_ranks).reshape(-1, num_ranks))
        fullest = np.maximum(*moved).max(axis=1).sum()
        volumes[unit] = OffNodeVolume(tp * float(num_bytes.sum()), float(fullest))
    return volumes


def mean_off_node_volumes(steps: Sequence[Mapping[str, OffNodeVolume]]) -> dict[str, OffNodeVolume]:
    """Return the means over some steps, of which each has the same units."""
    means = {}
    for unit in steps[0]:
        of_steps = [(step[unit].total, step[unit].fullest) for step in steps]
        means[unit] = OffNodeVolume(*np.mean(of_steps, axis=0).tolist())
    return means


def _phase_load(tokens: IntArray, before: IntArray, after: IntArray, num_ranks: int) -> PhaseLoad:
    """Sum tokens (n,) by slots, which count the ranks of one mini-batch after the other."""
    fullest = []
    for slot in (before, after):
        num_rows = int(slot.max(initial=-1)) // num_ranks + 1
        by_rank = np.bincount(slot, tokens, num_rows * num_ranks).reshape(num_rows, num_ranks)
        fullest.append(float(by_rank.max(axis=1).sum()))
    return PhaseLoad(float(tokens.sum()) / num_ranks, *fullest)
