"""What the parts of a microbatch are that replicas of the LLM share by context parallelism: loads, and features.

Encoders know items and lengths, not where a feature stands in its sequence. So the features of a cut sequence are dealt
out evenly, in order; the ranks that embed them know the positions, and exchange what lies elsewhere.
"""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from mmtrain.balance.batch_meta import BatchMeta, IntArray, ItemTable
from mmtrain.balance.context_split import ContextSplit, split_sequences
from mmtrain.costs.cost_model import TokenLoad
from mmtrain.program.ir.graph import ContextMethod, CutSequences, Microbatch, UnitMesh

CUT = -1  # instead of the rank of a whole sequence

Splits = Mapping[tuple[int, int], ContextSplit]  # (data-parallel replica, index of the microbatch) -> its split


def split_microbatches(mesh: UnitMesh, meta: BatchMeta) -> Splits:
    """Split every microbatch of a step among the replicas that share it."""
    return {(d, i): split_microbatch(mesh, meta, d, i) for d in range(mesh.dp) for i in range(mesh.num_microbatches)}


def split_microbatch(mesh: UnitMesh, meta: BatchMeta, replica: int, index: int) -> ContextSplit:
    """Split microbatch `index` of data-parallel replica number `replica`."""
    lengths = tuple(meta.tokens[meta.microbatch(replica, index)].tolist())
    return _split(lengths, mesh.cp, mesh.cp_method, mesh.cp_split)


@lru_cache(maxsize=1 << 10)  # the planner lays out the same groups for many meshes
def _split(lengths: tuple[int, ...], cp: int, method: ContextMethod, split: CutSequences) -> ContextSplit:
    return split_sequences(lengths, cp, method, split)


def part_loads(mesh: UnitMesh, meta: BatchMeta, splits: Splits) -> dict[Microbatch, TokenLoad]:
    """Return the load of every replica's part of every microbatch.

    `sum_sq` is its attention work, so that costs per squared length hold for it. Targets count as if they were spread
    evenly over a sequence, since lengths do not say where they stand.
    """
    loads = {}
    for (d, i), split in splits.items():
        samples = meta.microbatch(d, i)
        targets_per_token = meta.targets[samples] / np.maximum(meta.tokens[samples], 1)
        for rank in range(mesh.cp):
            pieces = split.pieces(rank)
            num_targets = sum(piece.num_tokens * float(targets_per_token[piece.sequence]) for piece in pieces)
            loads[Microbatch(mesh.unit, d * mesh.cp + rank, i)] = TokenLoad(
                split.num_tokens[rank],
                round(split.work[rank]),
                max((piece.stop for piece in pieces if piece.num_tokens), default=0),
                sum(piece.num_tokens > 0 for piece in pieces),
                min(round(num_targets), split.num_tokens[rank]),
                split.num_cut_tokens[rank],
            )
    return loads


def ranks_of_whole(split: ContextSplit) -> IntArray:
    """Return (S,) the rank on which each sequence is whole, `CUT` for the others."""
    ranks = np.full(len(split.lengths), CUT, dtype=np.int64)
    for rank, pieces in enumerate(split.whole_pieces):
        ranks[[piece.sequence for piece in pieces]] = rank
    return ranks


def owners_of_features(num_features: IntArray, ranks: IntArray, cp: int) -> IntArray:
    """Return (F,) the rank to which an encoder sends each feature of some sequences, in order.

    Args:
        num_features: (S,) of each sequence.
        ranks: (S,) see `ranks_of_whole`.
        cp: ranks that share the sequences.
    """
    total = np.repeat(num_features, num_features)
    within = np.arange(len(total)) - np.repeat(np.cumsum(num_features) - num_features, num_features)
    even_share = ((within + 1) * cp - 1) // np.maximum(total, 1)
    of_whole = np.repeat(ranks, num_features)
    owners: IntArray = np.where(of_whole == CUT, even_share, of_whole)
    return owners


def num_features_of_samples(items: ItemTable, num_samples: int) -> IntArray:
    """Return (S,) the features of each sample of a batch."""
    counts = np.zeros(num_samples, dtype=np.int64)
    np.add.at(counts, items.sample, items.features)
    return counts


def feature_runs(
    mesh: UnitMesh, meta: BatchMeta, items: ItemTable, splits: Splits
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the runs of features of one item that go to one replica of the LLM, item after item.

    Returns (P,) each: the item's row in `items`, the slot of the replica's microbatch, and the features of the run.

    It deals out features as `owners_of_features`, by the bounds of each rank's share: a long video has millions.
    """
    ranks = np.full(len(meta.tokens), CUT, dtype=np.int64)
    for (d, i), split in splits.items():
        ranks[meta.microbatch(d, i)] = ranks_of_whole(split)
    num_features, edges = num_features_of_samples(items, len(ranks))[:, None], np.arange(mesh.cp + 1)
    # (S, cp + 1) the features of a sample before each rank's share.
    bounds = np.where(ranks[:, None] == CUT, num_features * edges // mesh.cp, num_features * (edges > ranks[:, None]))
    by_sample = np.lexsort((items.position, items.sample))
    before = np.empty(len(by_sample), dtype=np.int64)  # features of all samples, in order, before each item
    before[by_sample] = np.cumsum(items.features[by_sample]) - items.features[by_sample]
    offset = (before - (np.cumsum(num_features) - num_features[:, 0])[items.sample])[:, None]
    of_item = bounds[items.sample]
    lengths = np.minimum(offset + items.features[:, None], of_item[:, 1:]) - np.maximum(offset, of_item[:, :-1])
    item, rank = np.nonzero(lengths > 0)
    sample = items.sample[item]
    slot = (meta.replica[sample] * mesh.cp + rank) * mesh.num_microbatches + meta.index[sample]
    return item, slot, lengths[item, rank]
