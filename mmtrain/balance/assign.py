"""From groups to a global batch: which replica computes which group when, and which encoder replica which item."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch_meta import BatchMeta, FloatArray, IntArray, ItemLengths, ItemTable, SampleLengths, item_rows
from mmtrain.balance.lpt import longest_first
from mmtrain.balance.microbatch_order import order_microbatches
from mmtrain.balance.node_placement import place_items
from mmtrain.balance.step_targets import LLM, SampleWork, SequenceCost, StepTargets

NO_TARGETS = StepTargets()
ONE_PER_TOKEN = SequenceCost(1)


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

    groups: sample numbers of each group, in stream order. dp, num_microbatches: replicas of every unit, "llm"
    included, and the microbatches of each.
    Each run of as many groups as there are LLM replicas becomes one microbatch of all of them, the longest on the least
    loaded (MMScale's reordering across replicas, one microbatch after the other): grouping puts groups alike in every
    modality next to each other, so replicas wait for each other neither at the end of a step nor inside it. Where
    `targets` know a pipeline, `order_microbatches` then orders the microbatches in time. Items follow in blocks: n
    microbatches of an encoder and m of the LLM are gcd(n, m) blocks, and the encoder's microbatches of block i carry
    exactly the items of the LLM's of block i in their replica group, longest first onto the one with the least to do.
    Where `targets` know of several nodes, encoder replicas of a group then change places by `place_items`.
    """
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])  # groups of an evaluation may be empty
    samples = np.concatenate(groups).astype(np.int64)
    work = SampleWork(lengths, samples)
    loads = work.loads(targets) if targets.loads else lengths.tokens[samples, None]
    of_groups = np.zeros((len(groups), loads.shape[1]), dtype=np.int64)
    np.add.at(of_groups, owner, loads)
    shares = _shares_of_mean(of_groups, targets) if targets.loads else of_groups[:, 0].astype(np.float64)
    replica_of_group, index_of_group = _place(shares, dp[LLM], num_microbatches[LLM])
    turns = order_microbatches(work, replica_of_group[owner], index_of_group[owner], targets, dp, num_microbatches)
    index_of_group = np.argsort(turns)[index_of_group]
    by_place = np.lexsort((index_of_group, replica_of_group))
    sizes = np.array([len(groups[g]) for g in by_place], dtype=np.int64)
    sample_id = np.concatenate([groups[g] for g in by_place]).astype(np.int64)
    replica = np.repeat(replica_of_group[by_place], sizes)
    index = np.repeat(index_of_group[by_place], sizes)
    num_groups = math.gcd(*dp.values())
    group = replica // (dp[LLM] // num_groups)
    items = {}
    for unit, unit_items in lengths.items.items():
        num_blocks = math.gcd(num_microbatches[LLM], num_microbatches[unit])
        spread = _Spread(dp[unit] // num_groups, num_blocks, num_microbatches[unit] // num_blocks)
        block = index // (num_microbatches[LLM] // num_blocks)
        items[unit] = _items(unit, sample_id, replica, group * num_blocks + block, unit_items, spread, targets)
    return BatchMeta(
        step=step,
        epoch=epoch,
        sample_id=sample_id,
        tokens=lengths.tokens[sample_id],
        targets=lengths.targets[sample_id],
        replica=replica,
        index=index,
        items=items,
    )


def _shares_of_mean(loads: IntArray, targets: StepTargets) -> FloatArray:
    """(G,) the groups' loads (G, q) as one number: their shares of the mean, weighted."""
    mean = np.maximum(loads.mean(axis=0), 1.0)
    total = np.zeros(len(loads))
    for column, load in zip((loads / mean).T, targets.loads, strict=True):
        total += load.weight * column
    return total


def _place(size: FloatArray, dp: int, num_microbatches: int) -> tuple[IntArray, IntArray]:
    """Replica and microbatch index of each group, by what they weigh."""
    if len(size) != dp * num_microbatches:
        raise ValueError(f"{len(size)} groups for {dp} replicas of {num_microbatches} microbatches")
    replica = np.empty(len(size), dtype=np.int64)
    index = np.repeat(np.arange(num_microbatches, dtype=np.int64), dp)
    loads = np.zeros(dp)
    for i in range(num_microbatches):
        here = slice(i * dp, (i + 1) * dp)
        least_loaded = np.argsort(loads, kind="stable")
        replica[here][np.argsort(-size[here], kind="stable")] = least_loaded
        loads[replica[here]] += size[here]
    return replica, index


@dataclass(frozen=True)
class _Spread:
    """Over what the items of a block are spread, in each replica group."""

    replicas: int
    blocks: int  # in a step
    microbatches: int  # of a replica in a block


def _items(
    unit: str,
    sample_id: IntArray,
    llm_replica: IntArray,
    block: IntArray,
    items: ItemLengths,
    spread: _Spread,
    targets: StepTargets,
) -> ItemTable:
    """Spread the items of each block, counted through all replica groups, over its encoder microbatches."""
    sample, row = item_rows(items, sample_id)
    position = row - items.first[sample_id[sample]]
    replica, index = _deal(targets.item_costs.get(unit, ONE_PER_TOKEN).of(items.tokens[row]), block[sample], spread)
    if len(set(targets.replica_nodes.get(unit, ()))) > 1:
        nodes, to_node = targets.replica_nodes[unit], np.array(targets.replica_nodes[LLM])[llm_replica[sample]]
        replica = place_items(replica, items.features[row], to_node, nodes, len(nodes) // spread.replicas)
    order = np.lexsort((position, sample, index, replica))
    sample, position, row = sample[order], position[order], row[order]
    return ItemTable(
        sample=sample,
        position=position,
        rows=items.rows[row],
        cols=items.cols[row],
        tokens=items.tokens[row],
        features=items.features[row],
        replica=replica[order],
        index=index[order],
    )


def _deal(costs: IntArray, block: IntArray, spread: _Spread) -> tuple[IntArray, IntArray]:
    """Encoder replica and microbatch of each item, from its block, counted through all replica groups.

    Inside a block longest first onto the least. What that makes heaviest goes to the replica of the group that has had
    the least, so that what one block leaves uneven the next makes good.
    """
    replica, index = np.empty_like(block), np.empty_like(block)
    num = spread.replicas * spread.microbatches
    so_far = np.zeros(spread.replicas, dtype=np.int64)
    by_block = np.argsort(block, kind="stable")
    cuts = np.searchsorted(block[by_block], np.arange(block.max(initial=-1) + 2))
    for b in range(len(cuts) - 1):
        here = by_block[cuts[b] : cuts[b + 1]]
        group, in_step = divmod(b, spread.blocks)
        if in_step == 0:
            so_far = np.zeros(spread.replicas, dtype=np.int64)
        slot = longest_first(costs[here], num)
        taken = np.zeros(num, dtype=np.int64)
        np.add.at(taken, slot, costs[here])
        of_replica = taken.reshape(spread.microbatches, spread.replicas).sum(axis=0)
        to = np.empty(spread.replicas, dtype=np.int64)
        to[np.argsort(-of_replica, kind="stable")] = np.argsort(so_far, kind="stable")
        so_far[to] += of_replica
        replica[here] = group * spread.replicas + to[slot % spread.replicas]
        index[here] = in_step * spread.microbatches + slot // spread.replicas
    return replica, index
