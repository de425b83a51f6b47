"""Rearrangements: who computes which piece after a move between ranks, the move back, and two moves as one."""

from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch_meta import IntArray


@dataclass(frozen=True)
class Rearrangement:
    """A move of pieces (samples, or items) between ranks: piece i goes to slot `dest_slot[i]` of `dest_rank[i]`.

    On its source rank a piece has the slot of its row among the rows of that rank. The destination slots of a rank are
    0, 1, 2, ... without gaps. The loader needs neither inverse nor composition: each rank reads what it computes.
    """

    source_rank: IntArray  # (n,)
    dest_rank: IntArray  # (n,)
    dest_slot: IntArray  # (n,)

    @property
    def source_slot(self) -> IntArray:
        """Return (n,) the slot of each piece on its source rank."""
        return slots(self.source_rank)

    def inverse(self) -> "Rearrangement":
        """Return the move back; its rows are the pieces in the order in which they lie at their destination."""
        order = np.lexsort((self.dest_slot, self.dest_rank))
        return Rearrangement(self.dest_rank[order], self.source_rank[order], self.source_slot[order])

    def after(self, other: "Rearrangement") -> "Rearrangement":
        """Return one move that does `other` and then this one; its rows are those of `other`.

        An encoder's outputs lie where its rearrangement E put them and must go where the LLM's M wants them: that is
        `M.after(E.inverse())`, one all-to-all in place of two (rearrangement composition of OrchMLLM, arXiv
        2503.23830). Raises ValueError if `other` does not end where this one starts.
        """
        mine = np.lexsort((self.source_slot, self.source_rank))
        theirs = np.lexsort((other.dest_slot, other.dest_rank))
        starts = self.source_rank[mine], self.source_slot[mine]
        ends = other.dest_rank[theirs], other.dest_slot[theirs]
        if not all(np.array_equal(a, b) for a, b in zip(starts, ends, strict=True)):
            raise ValueError("the first rearrangement does not end where the second starts")
        row = np.empty(len(mine), dtype=np.int64)
        row[theirs] = mine
        return Rearrangement(other.source_rank, self.dest_rank[row], self.dest_slot[row])

    def lifted(self, num_items: IntArray) -> "Rearrangement":
        """Return the same move for the samples' items: sample i takes its `num_items[i]` items along, in order.

        Rows are items, sample by sample.
        """
        owner = np.repeat(np.arange(len(num_items)), num_items)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(num_items) - num_items, num_items)
        order = np.lexsort((self.dest_slot, self.dest_rank))
        num_before = np.cumsum(num_items[order]) - num_items[order]  # items before each sample, over all ranks
        ranks = self.dest_rank[order]
        first_slot = np.empty(len(num_items), dtype=np.int64)  # items before sample i on its destination
        first_slot[order] = num_before - num_before[np.searchsorted(ranks, ranks)] if len(order) else num_before
        return Rearrangement(self.source_rank[owner], self.dest_rank[owner], first_slot[owner] + within)


def slots(rank: IntArray) -> IntArray:
    """Return (n,) the slot of each row: how many rows before it have the same rank."""
    order = stable_order(rank)
    sizes = np.bincount(rank)
    slot = np.empty(len(rank), dtype=np.int64)
    slot[order] = np.arange(len(rank)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return slot


def stable_order(values: IntArray) -> IntArray:
    """Sort non-negative integers; return the stable ascending order.

    Where 16 bits hold the values numpy sorts by radix, which is ten times faster.
    """
    fits_16_bits = len(values) > 0 and int(values.max()) < 2**16
    order: IntArray = np.argsort(values.astype(np.uint16) if fits_16_bits else values, kind="stable")
    return order
