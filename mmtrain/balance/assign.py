"""From groups to a global batch: which replica computes which group, and which encoder replica which item."""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch import BatchMeta, IntArray, ItemLengths, ItemTable, SampleLengths


def assign(
    step: int,
    epoch: int,
    groups: Sequence[IntArray],
    lengths: SampleLengths,
    dp: Mapping[str, int],
    num_microbatches: Mapping[str, int],
) -> BatchMeta:
    """Lay out one global batch of as many groups as the LLM's replicas have microbatches.

    groups: sample numbers of each group, in stream order. dp, num_microbatches: replicas of every unit, "llm"
    included, and the microbatches of each.
    Each run of as many groups as there are LLM replicas becomes microbatch i of all of them, the longest on the least
    loaded (MMScale's reordering across replicas, one microbatch after the other): grouping puts groups alike in every
    modality next to each other, so replicas wait for each other neither at the end of a step nor inside it. Items then
    follow in blocks: n microbatches of an encoder and m of the LLM are gcd(n, m) blocks, and the encoder's microbatches
    of block i carry exactly the items of the LLM's of block i in their replica group, longest first onto the one with
    the fewest tokens.
    """
    group_tokens = np.array([int(lengths.tokens[g].sum()) for g in groups], dtype=np.int64)
    replica_of_group, index_of_group = _place(group_tokens, dp["llm"], num_microbatches["llm"])
    by_place = np.lexsort((index_of_group, replica_of_group))
    sizes = np.array([len(groups[g]) for g in by_place], dtype=np.int64)
    sample_id = np.concatenate([groups[g] for g in by_place]).astype(np.int64)
    replica = np.repeat(replica_of_group[by_place], sizes)
    index = np.repeat(index_of_group[by_place], sizes)
    num_groups = math.gcd(*dp.values())
    group = replica // (dp["llm"] // num_groups)
    items = {}
    for unit, unit_items in lengths.items.items():
        num_blocks = math.gcd(num_microbatches["llm"], num_microbatches[unit])
        shares = _Shares(dp[unit] // num_groups, num_blocks, num_microbatches[unit] // num_blocks)
        block = index // (num_microbatches["llm"] // num_blocks)
        items[unit] = _items(sample_id, group * num_blocks + block, unit_items, shares)
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


def longest_first(sizes: IntArray, bins: int, capacity: int | None = None) -> IntArray:
    """Put each size into one of `bins`, longest first onto the least loaded; returns (n,) bins.

    The largest load is at most 4/3 - 1/(3 * bins) of the best possible one (Graham 1969). With `capacity` no bin takes
    more than that many.
    """
    placed = np.empty(len(sizes), dtype=np.int64)
    heap = [(0, 0, b) for b in range(bins)]  # load, count, bin: among equal loads the emptier one
    for i in np.argsort(-sizes, kind="stable"):
        load, count, b = heapq.heappop(heap)
        placed[i] = b
        if capacity is None or count + 1 < capacity:
            heapq.heappush(heap, (load + int(sizes[i]), count + 1, b))
    return placed


def _place(group_tokens: IntArray, dp: int, num_microbatches: int) -> tuple[IntArray, IntArray]:
    """Replica and microbatch index of each group."""
    if len(group_tokens) != dp * num_microbatches:
        raise ValueError(f"{len(group_tokens)} groups for {dp} replicas of {num_microbatches} microbatches")
    replica, index = np.empty_like(group_tokens), np.repeat(np.arange(num_microbatches, dtype=np.int64), dp)
    loads = np.zeros(dp, dtype=np.int64)
    for i in range(num_microbatches):
        here = slice(i * dp, (i + 1) * dp)
        least_loaded = np.argsort(loads, kind="stable")
        replica[here][np.argsort(-group_tokens[here], kind="stable")] = least_loaded
        loads[replica[here]] += group_tokens[here]
    return replica, index


@dataclass(frozen=True)
class _Shares:
    """Over what the items of a block are spread, in each replica group."""

    replicas: int
    blocks: int  # in a step
    microbatches: int  # of a replica in a block


def _items(sample_id: IntArray, block: IntArray, items: ItemLengths, shares: _Shares) -> ItemTable:
    """Spread the items of each block, counted through all replica groups, over its encoder microbatches."""
    counts = items.first[sample_id + 1] - items.first[sample_id]
    sample = np.repeat(np.arange(len(sample_id), dtype=np.int64), counts)
    position = np.arange(len(sample), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    row = items.first[sample_id[sample]] + position
    tokens, item_block = items.tokens[row], block[sample]
    slot = np.empty(len(sample), dtype=np.int64)
    for b in np.unique(item_block):
        here = item_block == b
        slot[here] = longest_first(tokens[here], shares.replicas * shares.microbatches)
    replica = item_block // shares.blocks * shares.replicas + slot % shares.replicas
    index = item_block % shares.blocks * shares.microbatches + slot // shares.replicas
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
