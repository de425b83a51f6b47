"""Lay out interleaved 1F1B of an LLM alone in time: backwards as early, forwards as late as they can be.

Interleaved 1F1B (Megatron-LM): a rank holds `vpp` model chunks, microbatches go through a chunk in groups of `pp`, and
a rank starts with as many chunk forwards as its warm-up says, then alternates one forward with one backward.
Among all timelines of that order this one leaves the most time to encoders before the LLM's forwards and after its
backwards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from mmtrain.errors import PlanError

FloatArray = npt.NDArray[np.float64]
ChunkPass = tuple[bool, int, int]  # is it a forward, model chunk, microbatch


@dataclass(frozen=True)
class InterleavedPipeline:
    """Sizes and costs of an interleaved pipeline; virtual stage v is chunk v // pp of rank v % pp. Any unit of time."""

    pp: int
    vpp: int
    num_microbatches: int
    forward: tuple[float, ...]  # (pp * vpp,) of one microbatch
    backward: tuple[float, ...]  # (pp * vpp,)
    transfer: float  # from a rank to the next

    def __post_init__(self) -> None:
        if self.num_microbatches % self.pp:
            raise PlanError(
                f"{self.num_microbatches} microbatches do not go in groups of pp={self.pp} through interleaved stages; "
                "take a multiple"
            )

    @property
    def warm_up(self) -> tuple[int, ...]:
        """Chunk forwards of each rank before its first backward, as in Megatron-LM."""
        total = self.num_microbatches * self.vpp
        return tuple(min(total, 2 * (self.pp - rank - 1) + (self.vpp - 1) * self.pp) for rank in range(self.pp))

    def duration(self, rank: int, chunk_pass: ChunkPass) -> float:
        """Return what a forward or backward of a chunk takes on a rank."""
        is_forward, chunk, _ = chunk_pass
        durations = self.forward if is_forward else self.backward
        return durations[chunk * self.pp + rank]


@dataclass(frozen=True)
class InterleavedTimeline:
    """When each rank runs what; time 0 is the start of the first forward."""

    pipeline: InterleavedPipeline
    order: tuple[tuple[ChunkPass, ...], ...]  # of each rank
    start: tuple[FloatArray, ...]  # (2 * vpp * num_microbatches,) of each rank

    @property
    def end(self) -> float:
        """When the last rank is done."""
        return max(
            float(start[-1]) + self.pipeline.duration(rank, order[-1])
            for rank, (order, start) in enumerate(zip(self.order, self.start, strict=True))
        )

    def first_forwards(self) -> FloatArray:
        """Return F: when stage 0 starts each microbatch."""
        return self._starts_on_stage_0(forward=True)

    def last_backwards(self) -> FloatArray:
        """Return B: when stage 0 has ended each microbatch's backward."""
        return self._starts_on_stage_0(forward=False) + self.pipeline.backward[0]

    def _starts_on_stage_0(self, *, forward: bool) -> FloatArray:
        starts = np.empty(self.pipeline.num_microbatches)
        for (is_forward, chunk, mb), start in zip(self.order[0], self.start[0], strict=True):
            if chunk == 0 and is_forward == forward:
                starts[mb] = start
        return starts


def simulate_interleaved(pipeline: InterleavedPipeline, warm_up: Sequence[int] | None = None) -> InterleavedTimeline:
    """Lay interleaved 1F1B out in time, by default with Megatron-LM's warm-up.

    Raises:
        PlanError: with this warm-up the ranks deadlock.
    """
    counts = pipeline.warm_up if warm_up is None else warm_up
    order = tuple(tuple(_rank_order(pipeline, count)) for count in counts)
    earliest = _earliest_starts(pipeline, order)
    return InterleavedTimeline(pipeline, order, _delay_forwards(pipeline, order, earliest))


def _rank_order(pipeline: InterleavedPipeline, warm_up: int) -> Iterator[ChunkPass]:
    """Return the passes of a rank in the order of interleaved 1F1B."""
    pp, vpp = pipeline.pp, pipeline.vpp
    total = pipeline.num_microbatches * vpp

    def chunk_pass(is_forward: bool, k: int) -> ChunkPass:
        chunk = k // pp % vpp
        return is_forward, chunk if is_forward else vpp - 1 - chunk, k // (pp * vpp) * pp + k % pp

    yield from (chunk_pass(True, k) for k in range(warm_up))
    for k in range(total - warm_up):
        yield chunk_pass(True, warm_up + k)
        yield chunk_pass(False, k)
    yield from (chunk_pass(False, k) for k in range(total - warm_up, total))


def _source(pipeline: InterleavedPipeline, rank: int, chunk_pass: ChunkPass) -> tuple[int, ChunkPass] | None:
    """Return the rank and pass whose result a pass reads; None for a microbatch's first forward."""
    is_forward, chunk, mb = chunk_pass
    if is_forward:
        if rank > 0:
            return rank - 1, chunk_pass
        return (pipeline.pp - 1, (True, chunk - 1, mb)) if chunk > 0 else None
    if rank < pipeline.pp - 1:
        return rank + 1, chunk_pass
    return (0, (False, chunk + 1, mb)) if chunk < pipeline.vpp - 1 else (rank, (True, chunk, mb))


def _earliest_starts(
    pipeline: InterleavedPipeline, order: Sequence[Sequence[ChunkPass]]
) -> list[dict[ChunkPass, float]]:
    """Return when every pass starts if none is delayed."""
    starts: list[dict[ChunkPass, float]] = [{} for _ in order]
    clock = [0.0] * len(order)
    num_done = [0] * len(order)
    progressed = True
    while progressed:
        progressed = False
        for rank, passes in enumerate(order):
            rank_starts, time, first = starts[rank], clock[rank], num_done[rank]
            for chunk_pass in passes[first:]:
                source = _source(pipeline, rank, chunk_pass)
                if source is not None:
                    source_start = starts[source[0]].get(source[1])
                    if source_start is None:
                        break
                    transfer = pipeline.transfer if source[0] != rank else 0.0
                    time = max(time, source_start + pipeline.duration(*source) + transfer)
                rank_starts[chunk_pass] = time
                time += pipeline.duration(rank, chunk_pass)
            clock[rank] = time
            num_done[rank] = len(rank_starts)
            progressed = progressed or num_done[rank] > first
    if any(len(rank_starts) < len(passes) for rank_starts, passes in zip(starts, order, strict=True)):
        raise PlanError("the ranks of the pipeline deadlock; give earlier ranks a longer warm-up")
    return starts


def _delay_forwards(
    pipeline: InterleavedPipeline, order: Sequence[Sequence[ChunkPass]], earliest: list[dict[ChunkPass, float]]
) -> tuple[FloatArray, ...]:
    """Delay forwards until right before their readers; backwards keep their starts. Goes against the data flow."""
    late: list[dict[ChunkPass, float]] = [{} for _ in order]
    readers: list[dict[ChunkPass, tuple[int, ChunkPass]]] = [{} for _ in order]
    for rank, passes in enumerate(order):
        for chunk_pass in passes:
            source = _source(pipeline, rank, chunk_pass)
            if source is not None:
                readers[source[0]][source[1]] = rank, chunk_pass
    num_left = [len(passes) for passes in order]
    clock = [inf] * len(order)
    progressed = True
    while progressed:
        progressed = False
        for rank, passes in enumerate(order):
            while num_left[rank]:
                chunk_pass = passes[num_left[rank] - 1]
                if chunk_pass[0]:
                    reading_rank, reader = readers[rank][chunk_pass]
                    if reader not in late[reading_rank]:
                        break
                    transfer = pipeline.transfer if reading_rank != rank else 0.0
                    due = min(clock[rank], late[reading_rank][reader] - transfer)
                    start = due - pipeline.duration(rank, chunk_pass)
                else:
                    start = earliest[rank][chunk_pass]
                late[rank][chunk_pass] = clock[rank] = start
                num_left[rank] -= 1
                progressed = True
    return tuple(
        np.array([rank_late[chunk_pass] for chunk_pass in passes])
        for rank_late, passes in zip(late, order, strict=True)
    )
