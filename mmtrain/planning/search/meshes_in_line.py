"""Mesh assignments that join a search one after another, the fastest first by an estimate of their steps."""

import math
from collections import deque
from collections.abc import Iterator

from mmtrain.planning.space.candidate import Candidate
from mmtrain.program.ir.graph import LLM

EstimatedCandidate = tuple[float, Candidate]  # seconds of a step, by its meshes alone


class MeshesInLine:
    """Knows which of the assignments that have not joined may be the fastest.

    An estimate by meshes leaves out that the layers of a pipeline cannot be divided evenly, nor microbatches be alike.
    So the least ratio seen so far, of the estimate of a layer partition to that by meshes, is taken as that of others,
    but not of those whose pipeline of the LLM is shorter than all seen: they may lose less. (With 24 ranks
    qwen2_vl_7b's pipelines of five ranks lie 15% above the estimate, and eight replicas without one 1%.)
    """

    def __init__(self, further: Iterator[EstimatedCandidate]) -> None:
        """Prepare to take from `further`, which yields candidates in the order of their estimates."""
        self._further = further
        self._next = next(further, None)
        self._waiting: dict[int, deque[EstimatedCandidate]] = {}  # by the LLM's pp
        self._least_ratio = math.inf
        self._shortest_pp = math.inf  # of those whose ratio is known

    def learn(self, candidate: Candidate, ratio: float) -> None:
        """Note the ratio of a candidate's estimate by its layer partition to that by its meshes."""
        self._least_ratio = min(self._least_ratio, ratio)
        self._shortest_pp = min(self._shortest_pp, candidate.assignment.meshes[LLM].pp)

    def go_on_with(self, further: Iterator[EstimatedCandidate]) -> None:
        """Take from other ones from now on, and forget those that wait."""
        self._further, self._waiting = further, {}
        self._next = next(further, None)

    def first_within(self, limit_s: float) -> EstimatedCandidate | None:
        """Return the one with the least corrected estimate if that is at most `limit_s`; it stays in line."""
        least_s, first = self._first_waiting()
        low_ratio = min(self._ratio(1), self._least_ratio)  # of whichever comes
        while self._next is not None and self._next[0] * low_ratio <= min(limit_s, least_s):
            pp = self._next[1].assignment.meshes[LLM].pp
            self._waiting.setdefault(pp, deque()).append(self._next)
            self._next = next(self._further, None)
            least_s, first = self._first_waiting()
        return first if least_s <= limit_s else None

    def take(self, first: EstimatedCandidate) -> None:
        """Remove what `first_within` returned."""
        taken = self._waiting[first[1].assignment.meshes[LLM].pp].popleft()
        assert taken is first

    def _first_waiting(self) -> tuple[float, EstimatedCandidate | None]:
        """Return the one with the least corrected estimate of those that were taken from the iterator, and that."""
        heads = ((of_pp[0][0] * self._ratio(pp), of_pp[0]) for pp, of_pp in self._waiting.items() if of_pp)
        return min(heads, key=lambda head: head[0], default=(math.inf, None))

    def _ratio(self, pp: int) -> float:
        return self._least_ratio if self._shortest_pp <= pp else 1.0
