"""Who computes which piece: moves of pieces between ranks, their inverse and their composition."""

from dataclasses import dataclass

import numpy as np

from mmtrain.balance.batch_meta import IntArray


@dataclass(frozen=True)
class Rearrangement:
    """Piece i (a sample, or an item) moves from `source_rank[i]` to place `dest_slot[i]` of `dest_rank[i]`.

    On its source rank a piece has the place of its row among the rows of that rank; destination places of a rank are
    0, 1, 2, ... without gaps.
    """

    source_rank: IntArray  # (n,)
    dest_rank: IntArray  # (n,)
    dest_slot: IntArray  # (n,)

    @property
    def source_slot(self) -> IntArray:
        """(n,) place of each piece on its source rank."""
        return slots(self.source_rank)

    def inverse(self) -> "Rearrangement":
        """The move back: rows are the pieces in the order in which they lie at their destination."""
        order = np.lexsort((self.dest_slot, self.dest_rank))
        return Rearrangement(self.dest_rank[order], self.source_rank[order], self.source_slot[order])

    def after(self, other: "Rearrangement") -> "Rearrangement":
        """First `other`, then this one, as one move; rows are those of `other`.

        An encoder's outputs lie where its rearrangement E put them and must go where the LLM's M wants them: that is
        `M.after(E.inverse())`, one all-to-all in place of two (OrchMLLM, rearrangement composition).
        Raises ValueError if `other` does not end where this one begins.
        """
        mine = np.lexsort((self.source_slot, self.source_rank))
        theirs = np.lexsort((other.dest_slot, other.dest_rank))
        begins = self.source_rank[mine], self.source_slot[mine]
        ends = other.dest_rank[theirs], other.dest_slot[theirs]
        if not all(np.array_equal(a, b) for a, b in zip(begins, ends, strict=True)):
            raise ValueError("the first rearrangement does not end where the second begins")
        row = np.empty(len(mine), dtype=np.int64)
        row[theirs] = mine
        return Rearrangement(other.source_rank, self.dest_rank[row], self.dest_slot[row])

    def lifted(self, num_items: IntArray) -> "Rearrangement":
        """The same move seen by the samples' items: sample i carries its `num_items[i]` items along, in order.

        Rows are items, sample by sample.
        """
        owner = np.repeat(np.arange(len(num_items)), num_items)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(num_items) - num_items, num_items)
        order = np.lexsort((self.dest_slot, self.dest_rank))
        begin = np.empty(len(num_items), dtype=np.int64)  # items that lie before sample i on its destination
        ahead = np.cumsum(num_items[order]) - num_items[order]
        ranks = self.dest_rank[order]
        begin[order] = ahead - ahead[np.searchsorted(ranks, ranks)] if len(order) else ahead
        return Rearrangement(self.source_rank[owner], self.dest_rank[owner], begin[owner] + within)


def slots(rank: IntArray) -> IntArray:
    """(n,) place of each row among the rows of equal rank."""
    order = stable_order(rank)
    sizes = np.bincount(rank)
    place = np.empty(len(rank), dtype=np.int64)
    place[order] = np.arange(len(rank)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return place


def stable_order(values: IntArray) -> IntArray:
    """Stable ascending argsort of non-negative integers, by radix (ten times faster) where 16 bits hold them."""
    small = len(values) > 0 and int(values.max()) < 2**16
    order: IntArray = np.argsort(values.astype(np.uint16) if small else values, kind="stable")
    return order
