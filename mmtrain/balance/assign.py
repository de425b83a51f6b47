"""Assign groups to replicas and microbatches: from the groups of a step to the layout of one global batch."""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mmtrain.balance.batch_meta import BatchMeta, IntArray, ItemLengths, ItemTable, SampleLengths, item_rows
from mmtrain.balance.dispatch.dispatch_items import DispatchSizes, dispatch_items, replicas_per_node
from mmtrain.balance.dispatch.node_placement import place_items
from mmtrain.balance.ordering.microbatch_order import order_microbatches
from mmtrain.balance.row_assignment import assign_rows
from mmtrain.balance.step_targets import LLM, SampleWork, SequenceCost, StepTargets

NO_TARGETS = StepTargets()
COST_PER_TOKEN = SequenceCost(1)


def assign(
    step: int,
    epoch: int,
    groups: Sequence[IntArray],
    lengths: SampleLengths,
    dp: Mapping[str, int],
    num_microbatches: Mapping[str, int],
    targets: StepTargets = NO_TARGETS,
) -> BatchMeta:
    """Lay out one global batch of as many groups as the LLM's replicas have microbatches.

    groups: sample numbers of each group, in stream order. dp, num_microbatches: replicas of every unit, "llm" included,
    and the microbatches of each replica.

    Each run of as many groups as there are LLM replicas becomes one microbatch of all replicas, which `assign_rows`
    spreads over them such that they have equal loads in the whole step. Grouping puts groups that are alike in every
    modality next to each other, so replicas wait for each other neither at the end of a step nor inside it. Where
    `targets` describe a pipeline, `order_microbatches` then orders the microbatches in time. With `targets.reorder`
    off, groups go to replicas and microbatches in stream order.

    Items follow in blocks. The n microbatches of an encoder and the m of the LLM form gcd(n, m) blocks. In a replica
    group, the encoder's microbatches of a block take exactly the items of the LLM's microbatches of that block. Where
    `targets` name several nodes, `place_items` then moves encoder batches between replicas of a group. With
    `targets.dispatch` all replicas of an encoder share the items of a block, see `dispatch_items`, which takes account
    of nodes too.
    """
    groups_of_samples = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    samples = np.concatenate(groups).astype(np.int64)  # groups of an evaluation may be empty
    work = SampleWork(lengths, samples)
    loads = work.loads(targets) if targets.loads else lengths.tokens[samples][:, None]
    group_loads = np.zeros((len(groups), loads.shape[1]), dtype=np.int64)
    np.add.at(group_loads, groups_of_samples, loads)
    if targets.reorder:
        weights = np.array([load.weight for load in targets.loads]) if targets.loads else np.ones(1)
        replica_of_group, index_of_group = assign_rows(group_loads, weights, dp[LLM], num_microbatches[LLM])
        order = order_microbatches(
            work, replica_of_group[groups_of_samples], index_of_group[groups_of_samples], targets, dp, num_microbatches
        )
        index_of_group = np.argsort(order)[index_of_group]
    else:
        index_of_group, replica_of_group = np.divmod(np.arange(len(groups)), dp[LLM])
    in_batch_order = np.lexsort((index_of_group, replica_of_group))
    num_samples = np.array([len(groups[g]) for g in in_batch_order], dtype=np.int64)
    sample_id = np.concatenate([groups[g] for g in in_batch_order]).astype(np.int64)
    replica = np.repeat(replica_of_group[in_batch_order], num_samples)
    index = np.repeat(index_of_group[in_batch_order], num_samples)
    sequences = _SampleLayout(sample_id, replica, index, dp, num_microbatches)
    return BatchMeta(
        step=step,
        epoch=epoch,
        sample_id=sample_id,
        tokens=lengths.tokens[sample_id],
        targets=lengths.targets[sample_id],
        replica=replica,
        index=index,
        items={unit: _assign_items(unit, items, sequences, targets) for unit, items in lengths.items.items()},
    )


@dataclass(frozen=True)
class _SampleLayout:
    """Where the LLM computes which sample, and how many replicas and microbatches every unit has."""

    sample_id: IntArray  # (S,)
    replica: IntArray  # (S,)
    index: IntArray  # (S,)
    dp: Mapping[str, int]
    num_microbatches: Mapping[str, int]

    @property
    def num_groups(self) -> int:
        """Replica groups."""
        return math.gcd(*self.dp.values())

    def blocks(self, unit: str) -> "_Blocks":
        """The blocks in which the LLM meets an encoder."""
        per_step = math.gcd(self.num_microbatches[LLM], self.num_microbatches[unit])
        return _Blocks(self.dp[unit] // self.num_groups, per_step, self.num_microbatches[unit] // per_step)

    def block_of_samples(self, unit: str) -> IntArray:
        """(S,) the block of each sample, counted through all replica groups."""
        per_step = self.blocks(unit).per_step
        group = self.replica // (self.dp[LLM] // self.num_groups)
        return group * per_step + self.index // (self.num_microbatches[LLM] // per_step)


@dataclass(frozen=True)
class _Blocks:
    """The encoder replicas and microbatches that share the items of a block."""

    num_replicas: int  # in a replica group
    per_step: int  # blocks of a replica group in a step
    num_microbatches: int  # of a replica in a block


def _assign_items(unit: str, items: ItemLengths, sequences: _SampleLayout, targets: StepTargets) -> ItemTable:
    """Spread the items of each block over the encoder's microbatches."""
    sample, row = item_rows(items, sequences.sample_id)
    position = row - items.first[sequences.sample_id[sample]]
    cost = targets.item_costs.get(unit, COST_PER_TOKEN)
    blocks, block = sequences.blocks(unit), sequences.block_of_samples(unit)[sample]
    # Where ranks share sequences, each is a replica of the encoder; which of them reads an item is not known here.
    num_sharing = max(sequences.dp[unit] // sequences.dp[LLM], 1)
    if targets.dispatch:
        home = sequences.replica[sample] * num_sharing + position % num_sharing
        per_node = replicas_per_node(targets.replica_nodes.get(unit, ()))
        sizes = DispatchSizes(sequences.dp[unit], blocks.num_microbatches, per_node)
        tokens, features = items.tokens[row], items.features[row]
        as_padded = targets.balance_as_padded.get(unit, False)
        replica, index = dispatch_items(tokens, features, home, block % blocks.per_step, cost, sizes, as_padded)
    else:
        replica, index = _assign_to_microbatches(cost.of(items.tokens[row]), block, blocks)
        nodes = targets.replica_nodes.get(unit, ())
        if len(set(nodes)) > 1:
            of_llm = targets.replica_nodes[LLM]
            to_node = np.array(of_llm)[sequences.replica[sample] * (len(of_llm) // sequences.dp[LLM])]
            replica = place_items(replica, items.features[row], to_node, nodes, len(nodes) // blocks.num_replicas)
    order = np.lexsort((position, sample, index, replica))
    row = row[order]
    return ItemTable(
        sample=sample[order],
        position=position[order],
        rows=items.rows[row],
        cols=items.cols[row],
        tokens=items.tokens[row],
        features=items.features[row],
        replica=replica[order],
        index=index[order],
    )


def _assign_to_microbatches(costs: IntArray, block: IntArray, blocks: _Blocks) -> tuple[IntArray, IntArray]:
    """Encoder replica and microbatch of each item, from its cost and its block, counted through all replica groups.

    Inside a block the longest item goes to the least loaded microbatch. The heaviest share of a block goes to the
    replica of the group that has had the least so far, so that a block makes up for the imbalance of those before it.
    """
    num_slots = blocks.num_replicas * blocks.num_microbatches
    if num_slots == 1:
        return block // blocks.per_step, block % blocks.per_step
    order = np.lexsort((-costs, block))  # block by block, the longest first
    bounds = np.searchsorted(block[order], np.arange(block.max(initial=-1) + 2)).tolist()
    costs_in_order = costs[order].tolist()
    replicas = range(blocks.num_replicas)
    replica_of_item: list[int] = []
    index_of_item: list[int] = []
    replica_loads = [0] * blocks.num_replicas
    for b, (lo, hi) in enumerate(pairwise(bounds)):  # blocks are many and small: lists are faster than arrays
        group, in_step = divmod(b, blocks.per_step)
        if in_step == 0:
            replica_loads = [0] * blocks.num_replicas
        slots = longest_first(costs_in_order[lo:hi], num_slots)
        if blocks.num_replicas == 1:
            replica_of_item += [group] * len(slots)
            index_of_item += [in_step * blocks.num_microbatches + slot for slot in slots]
            continue
        share_loads = [0] * blocks.num_replicas
        for slot, cost in zip(slots, costs_in_order[lo:hi], strict=True):
            share_loads[slot % blocks.num_replicas] += cost
        heaviest_shares = sorted(replicas, key=share_loads.__getitem__, reverse=True)
        least_loaded = sorted(replicas, key=replica_loads.__getitem__)
        replica_of_share = dict(zip(heaviest_shares, least_loaded, strict=True))
        for share, load in enumerate(share_loads):
            replica_loads[replica_of_share[share]] += load
        first_replica, first_index = group * blocks.num_replicas, in_step * blocks.num_microbatches
        replica_of_item += [first_replica + replica_of_share[slot % blocks.num_replicas] for slot in slots]
        index_of_item += [first_index + slot // blocks.num_replicas for slot in slots]
    replica, index = np.empty_like(block), np.empty_like(block)
    replica[order], index[order] = replica_of_item, index_of_item
    return replica, index


def longest_first(sizes: Sequence[int], num_bins: int) -> list[int]:
    """Put `sizes`, which come longest first, each into the least loaded of `num_bins`; return the bin of each.

    The largest load is at most 4/3 - 1/(3 * num_bins) of the best possible one (longest processing time first, Graham
    1969). Among equally loaded bins the one with fewer sizes comes first.
    """
    if len(sizes) <= num_bins:
        return list(range(len(sizes)))
    heap = [(0, 0, number) for number in range(num_bins)]  # load, count, bin
    bins = []
    for size in sizes:
        load, count, number = heap[0]
        bins.append(number)
        heapq.heapreplace(heap, (load + size, count + 1, number))
    return bins
