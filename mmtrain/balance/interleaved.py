"""How long pipelines of several chunks a rank (vpp) take under many orders of their microbatches at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmtrain.balance.batch import FloatArray, IntArray


class Slot(NamedTuple):
    """One action of a stage: the forward or the backward of a chunk for the microbatch at a place of the order."""

    is_forward: bool
    chunk: int
    place: int


@dataclass(frozen=True)
class Interleaved:
    """The recurrence of a pipeline whose p stages take their turns as written down.

    slots: for each stage its actions in order, as `program`'s positions give them. Chunk c of stage s is part
    c * p + s of the path that every microbatch takes; a forward waits for the part before it, a backward for the part
    behind it, and the last part's backward for its forward. Messages cost nothing.
    """

    slots: Sequence[Sequence[Slot]]

    def makespans(self, forward: FloatArray, backward: FloatArray, orders: IntArray) -> FloatArray:
        """(k,) seconds of the longest of c pipelines under each of `orders` (k, l).

        forward, backward: (c, p, v, l) seconds of v chunks. Raises ValueError if the turns wait for each other.
        """
        longest = np.zeros(len(orders))
        for f, b in zip(forward, backward, strict=True):
            longest = np.maximum(longest, self._one(f[:, :, orders.T], b[:, :, orders.T]))
        return longest

    def _one(self, forward: FloatArray, backward: FloatArray) -> FloatArray:
        """forward, backward: (p, v, l, k) by place."""
        p, num_chunks = forward.shape[:2]
        free = np.zeros((p, forward.shape[3]))
        done: dict[tuple[bool, int, int], FloatArray] = {}
        for stage, slot in self._sequence(p, num_chunks):
            part = slot.chunk * p + stage
            before = _before(slot, part, p * num_chunks)
            start = free[stage] if before is None else np.maximum(free[stage], done[before])
            seconds = (forward if slot.is_forward else backward)[stage, slot.chunk, slot.place]
            done[slot.is_forward, part, slot.place] = free[stage] = start + seconds
        longest: FloatArray = free.max(axis=0)
        return longest

    def _sequence(self, p: int, num_chunks: int) -> list[tuple[int, Slot]]:
        """All actions, each after those it waits for."""
        ready: set[tuple[bool, int, int]] = set()
        sequence: list[tuple[int, Slot]] = []
        at = [0] * p
        while any(at[s] < len(self.slots[s]) for s in range(p)):
            before_round = len(sequence)
            for stage in range(p):
                while at[stage] < len(self.slots[stage]):
                    slot = self.slots[stage][at[stage]]
                    part = slot.chunk * p + stage
                    needed = _before(slot, part, p * num_chunks)
                    if needed is not None and needed not in ready:
                        break
                    ready.add((slot.is_forward, part, slot.place))
                    sequence.append((stage, slot))
                    at[stage] += 1
            if len(sequence) == before_round:
                raise ValueError("the turns of the stages wait for each other in a circle")
        return sequence


def _before(slot: Slot, part: int, num_parts: int) -> tuple[bool, int, int] | None:
    """The action on another part that a slot waits for."""
    if slot.is_forward:
        return (True, part - 1, slot.place) if part else None
    return (False, part + 1, slot.place) if part < num_parts - 1 else (True, part, slot.place)
