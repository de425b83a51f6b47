"""The timeline of the LLM's interleaved 1F1B by itself: when every chunk runs, and how far it could move.

Interleaved 1F1B (Megatron-LM): a rank holds `vpp` chunks, microbatches go through a chunk in groups of `pp`, and a rank
starts with as many chunk forwards as its warm-up says, then alternates one forward with one backward.
Which of all timelines of that order: backwards as early as they can, forwards as late as those let them. So encoders
in front of the LLM have the most time, and so have those behind it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from mmtrain.errors import PlanError

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class InterleavedPipeline:
    """Sizes and costs of an interleaved pipeline; virtual stage v is chunk v // pp of rank v % pp. Any unit of time."""

    pp: int
    vpp: int
    num_microbatches: int
    forward: tuple[float, ...]  # (pp * vpp,) of one microbatch
    backward: tuple[float, ...]
    transfer: float  # from a rank to the next

    def __post_init__(self) -> None:
        if self.num_microbatches % self.pp:
            raise PlanError(
                f"{self.num_microbatches} microbatches do not go in groups of pp={self.pp} through interleaved stages; "
                "take a multiple"
            )

    @property
    def warm_up(self) -> tuple[int, ...]:
        """Chunk forwards of each rank before its first backward: those that Megatron-LM takes."""
        most = self.num_microbatches * self.vpp
        return tuple(min(most, 2 * (self.pp - r - 1) + (self.vpp - 1) * self.pp) for r in range(self.pp))

    def seconds(self, rank: int, work: "ChunkPass") -> float:
        """What a piece of work takes there."""
        return (self.forward if work[0] else self.backward)[work[1] * self.pp + rank]


ChunkPass = tuple[bool, int, int]  # forward?, chunk, microbatch


@dataclass(frozen=True)
class InterleavedTimeline:
    """When each rank runs what; time begins with the first forward."""

    pipeline: InterleavedPipeline
    order: tuple[tuple[ChunkPass, ...], ...]  # of each rank
    start: tuple[FloatArray, ...]  # (2 * vpp * num_microbatches,) of each rank

    @property
    def end(self) -> float:
        """When the last rank is done."""
        return max(
            float(start[-1]) + self.pipeline.seconds(rank, order[-1])
            for rank, (order, start) in enumerate(zip(self.order, self.start, strict=True))
        )

    def first_forwards(self) -> FloatArray:
        """F: when stage 0 starts each microbatch."""
        return self._of_stage_0(True)

    def last_backwards(self) -> FloatArray:
        """B: when stage 0 is through with each microbatch's backward."""
        return self._of_stage_0(False) + self.pipeline.backward[0]

    def _of_stage_0(self, forward: bool) -> FloatArray:
        when = np.empty(self.pipeline.num_microbatches)
        for (is_forward, chunk, mb), start in zip(self.order[0], self.start[0], strict=True):
            if chunk == 0 and is_forward == forward:
                when[mb] = start
        return when


def simulate_interleaved(pipeline: InterleavedPipeline, warm_up: Sequence[int] | None = None) -> InterleavedTimeline:
    """Lay interleaved 1F1B out in time, by default with Megatron-LM's warm-up.

    Raises:
        PlanError: with this warm-up the ranks wait for each other for ever.
    """
    counts = pipeline.warm_up if warm_up is None else warm_up
    order = tuple(tuple(_turns(pipeline, count)) for count in counts)
    early = _earliest(pipeline, order)
    return InterleavedTimeline(pipeline, order, _forwards_latest(pipeline, order, early))


def _turns(pipeline: InterleavedPipeline, warm_up: int) -> Iterator[ChunkPass]:
    pp, vpp = pipeline.pp, pipeline.vpp
    total = pipeline.num_microbatches * vpp

    def work(forward: bool, k: int) -> ChunkPass:
        chunk = k // pp % vpp
        return forward, chunk if forward else vpp - 1 - chunk, k // (pp * vpp) * pp + k % pp

    yield from (work(True, k) for k in range(warm_up))
    for k in range(total - warm_up):
        yield work(True, warm_up + k)
        yield work(False, k)
    yield from (work(False, k) for k in range(total - warm_up, total))


def _before(pipeline: InterleavedPipeline, rank: int, work: ChunkPass) -> tuple[int, ChunkPass] | None:
    """Whose result a piece of work reads."""
    forward, chunk, mb = work
    if forward:
        if rank > 0:
            return rank - 1, work
        return (pipeline.pp - 1, (True, chunk - 1, mb)) if chunk > 0 else None
    if rank < pipeline.pp - 1:
        return rank + 1, work
    return (0, (False, chunk + 1, mb)) if chunk < pipeline.vpp - 1 else (rank, (True, chunk, mb))


def _earliest(pipeline: InterleavedPipeline, order: Sequence[Sequence[ChunkPass]]) -> list[dict[ChunkPass, float]]:
    """Start of every piece of work when none is put off."""
    start: list[dict[ChunkPass, float]] = [{} for _ in order]
    clock, at = [0.0] * len(order), [0] * len(order)
    moved = True
    while moved:
        moved = False
        for rank, todo in enumerate(order):
            mine, now, first = start[rank], clock[rank], at[rank]
            for work in todo[first:]:
                source = _before(pipeline, rank, work)
                if source is not None:
                    begun = start[source[0]].get(source[1])
                    if begun is None:
                        break
                    arrived = begun + pipeline.seconds(*source) + (pipeline.transfer if source[0] != rank else 0.0)
                    now = max(now, arrived)
                mine[work] = now
                now += pipeline.seconds(rank, work)
            clock[rank], at[rank] = now, len(mine)
            moved = moved or at[rank] > first
    if any(len(mine) < len(todo) for mine, todo in zip(start, order, strict=True)):
        raise PlanError("the ranks of the pipeline wait for each other for ever; give earlier ranks a longer warm-up")
    return start


def _forwards_latest(
    pipeline: InterleavedPipeline, order: Sequence[Sequence[ChunkPass]], early: list[dict[ChunkPass, float]]
) -> tuple[FloatArray, ...]:
    """Put forwards off until right before what waits for them; backwards stay. Read against the data flow."""
    late: list[dict[ChunkPass, float]] = [{} for _ in order]
    readers = [{} for _ in order]  # type: list[dict[ChunkPass, tuple[int, ChunkPass]]]
    for rank, todo in enumerate(order):
        for work in todo:
            source = _before(pipeline, rank, work)
            if source is not None:
                readers[source[0]][source[1]] = rank, work
    at, clock = [len(todo) for todo in order], [inf] * len(order)
    moved = True
    while moved:
        moved = False
        for rank, todo in enumerate(order):
            while at[rank]:
                work = todo[at[rank] - 1]
                due = clock[rank]
                if work[0]:
                    reader, what = readers[rank][work]
                    if what not in late[reader]:
                        break
                    due = min(due, late[reader][what] - (pipeline.transfer if reader != rank else 0.0))
                    late[rank][work] = clock[rank] = due - pipeline.seconds(rank, work)
                else:
                    late[rank][work] = clock[rank] = early[rank][work]
                at[rank] -= 1
                moved = True
    return tuple(np.array([mine[work] for work in todo]) for mine, todo in zip(late, order, strict=True))
