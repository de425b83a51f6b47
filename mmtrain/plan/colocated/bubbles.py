"""Place kernels into the free time of a rank whose busy times are given, each as early as it fits.

`FreeTime` holds the intervals in which a rank computes nothing, and those in which its tensor-parallel link carries
nothing. A `KernelChain` is a sequence of kernels that run one after another from its release time on. Compute kernels
need a free compute interval as long as themselves, collectives one of the link. Chains on a rank are independent.

`place_kernels` is list scheduling: at any moment the first chain (in the given order) runs whose next kernel is ready
and fits into the free interval. The rank never idles while there is one. Only cuttable kernels are interrupted.

All times are in one unit, whichever it is.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import inf

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

TIME_ROUNDING = 1e-7  # of a unit of time: sums of many durations differ by less


@dataclass(frozen=True)
class FreeTime:
    """Free time of one rank, as (n, 2) intervals (start, end) in ascending order; the outer ones reach to infinity."""

    compute: FloatArray
    link: FloatArray

    @classmethod
    def around(cls, busy: FloatArray, link_busy: FloatArray) -> "FreeTime":
        """What these occupied intervals leave free; they may touch, but not overlap."""
        return cls(_between(busy), _between(link_busy))

    def mirrored(self) -> "FreeTime":
        """The same with time running backwards."""
        return FreeTime(-self.compute[::-1, ::-1], -self.link[::-1, ::-1])

    def without(self, placed: "PlacedKernels") -> "FreeTime":
        """What is left when kernels have been placed."""
        spans = placed.spans
        return FreeTime(_less(self.compute, spans[placed.computes]), _less(self.link, spans[~placed.computes]))


@dataclass(frozen=True)
class KernelSequence:
    """Kernels in order: what each takes, which of them compute, and which may be cut into pieces."""

    durations: tuple[float, ...]
    computes: tuple[bool, ...]
    cuttable: tuple[bool, ...]

    @classmethod
    def of(cls, durations: Sequence[float], computes: Sequence[bool], cut_above: float = inf) -> "KernelSequence":
        """Kernels of which those that compute for longer than `cut_above` may be cut."""
        cuttable = [c and d > cut_above for d, c in zip(durations, computes, strict=True)]
        return cls(tuple(durations), tuple(computes), tuple(cuttable))

    @classmethod
    def joined(cls, parts: Sequence["KernelSequence"]) -> "KernelSequence":
        """One after another."""
        return cls(
            tuple(chain.from_iterable(k.durations for k in parts)),
            tuple(chain.from_iterable(k.computes for k in parts)),
            tuple(chain.from_iterable(k.cuttable for k in parts)),
        )

    def mirrored(self) -> "KernelSequence":
        """Last kernel first."""
        return KernelSequence(self.durations[::-1], self.computes[::-1], self.cuttable[::-1])

    @cached_property
    def compute_time(self) -> float:
        """What they compute, uncut."""
        return float(sum(d for d, c in zip(self.durations, self.computes, strict=True) if c))

    @cached_property
    def latency(self) -> float:
        """What they take one after another."""
        return float(sum(self.durations))


@dataclass(frozen=True)
class KernelChain:
    """Kernels that may begin at `release`; `name` is the caller's."""

    name: int
    release: float
    kernels: KernelSequence


@dataclass(frozen=True)
class PlacedKernels:
    """Kernels, or pieces of kernels, in time; one row each."""

    spans: FloatArray  # (n, 2) start and end
    chains: npt.NDArray[np.int64]  # (n,) name of the chain
    kernels: npt.NDArray[np.int64]  # (n,) index in the chain
    computes: npt.NDArray[np.bool_]  # (n,) on the compute stream, not the link

    def mirrored(self, num_kernels: int) -> "PlacedKernels":
        """The same with time running backwards, in chains of `num_kernels`."""
        return PlacedKernels(-self.spans[:, ::-1], self.chains, num_kernels - 1 - self.kernels, self.computes)


def place_kernels(
    free: FreeTime, chains: Sequence[KernelChain], cut_cost: float = 0.0
) -> tuple[PlacedKernels, dict[int, float]]:
    """Place all chains; also return when each has finished.

    Args:
        free time: what is free.
        chains: the earlier comes first when several are ready.
        cut_cost: share of a kernel's duration that each cut of it adds.
    """
    if not chains:
        none = np.zeros(0, dtype=np.int64)
        return PlacedKernels(np.zeros((0, 2)), none, none, none.astype(bool)), {}
    filling = _ListScheduler(free, chains, cut_cost)
    filling.run()
    rows = np.array(filling.rows, dtype=np.float64).reshape(-1, 5)  # none where chains are empty
    placed = PlacedKernels(rows[:, :2], rows[:, 2].astype(np.int64), rows[:, 3].astype(np.int64), rows[:, 4] > 0)
    return placed, {run.name: run.ready for run in filling.runs}


class _ChainProgress:
    """How far a chain has come: its next compute kernel, and when that is ready."""

    __slots__ = ("at", "computes", "cuttable", "durations", "name", "ready", "whole")

    def __init__(self, chain: KernelChain) -> None:
        self.name, self.ready, self.at = chain.name, chain.release, 0
        self.computes, self.cuttable = chain.kernels.computes, chain.kernels.cuttable
        self.whole = chain.kernels.durations
        self.durations = list(self.whole)  # of a kernel that was cut: what is left


class _ListScheduler:
    """Walks through a rank's free intervals."""

    def __init__(self, free: FreeTime, chains: Sequence[KernelChain], cut_cost: float) -> None:
        self.starts, self.ends = free.compute[:, 0].tolist(), free.compute[:, 1].tolist()
        self.link_starts, self.link_ends = free.link[:, 0].tolist(), free.link[:, 1].tolist()
        self.link_at, self.link_clock = 0, -inf
        self.cut_cost = cut_cost
        self.rows: list[tuple[float, float, int, int, bool]] = []
        self.runs = [_ChainProgress(c) for c in chains]

    def run(self) -> None:
        """Place kernel after kernel in the order of time, until every chain is through."""
        places = {id(run): place for place, run in enumerate(self.runs)}
        coming = sorted(self.runs, key=lambda run: run.ready, reverse=True)
        left: list[_ChainProgress] = []
        at, clock = 0, -inf
        while left or coming:
            if coming and (not left or coming[-1].ready <= max(clock, min(run.ready for run in left))):
                run = coming.pop()
                self._communicate(run)
                if run.at < len(run.whole):
                    left.append(run)
                    left.sort(key=lambda run: places[id(run)])
                continue
            at = self._skip(at, clock, left)
            clock, end = max(clock, self.starts[at]), self.ends[at]
            chosen, begin = self._choose(left, clock, end)
            if chosen is None:
                clock = self._cut(left, clock, end)
                at += 1
                continue
            clock = begin + chosen.durations[chosen.at]
            self.rows.append((begin, clock, chosen.name, chosen.at, True))
            chosen.ready, chosen.at = clock, chosen.at + 1
            self._communicate(chosen)
            if chosen.at == len(chosen.whole):
                left.remove(chosen)

    def _choose(self, left: list[_ChainProgress], clock: float, end: float) -> tuple[_ChainProgress | None, float]:
        """Who runs next in the free interval that is left until `end`, and from when."""
        chosen, begin = None, inf
        for run in left:
            start = run.ready if run.ready > clock else clock
            if start < begin and start + run.durations[run.at] <= end + TIME_ROUNDING:
                chosen, begin = run, start
        return chosen, begin

    def _skip(self, at: int, clock: float, left: list[_ChainProgress]) -> int:
        """The first interval from `at` on that ends after some chain is ready."""
        soonest = max(clock, min(run.ready for run in left))
        return at if self.ends[at] > soonest else bisect_right(self.ends, soonest, at)

    def _cut(self, left: list[_ChainProgress], clock: float, end: float) -> float:
        """Fill the rest of an interval with pieces of kernels that may be cut; returns when it is used up."""
        for run in left:
            start = max(clock, run.ready)
            whole = run.whole[run.at]
            if run.cuttable[run.at] and end - start >= self.cut_cost * whole * _WORTH:
                self.rows.append((start, end, run.name, run.at, True))
                run.durations[run.at] += self.cut_cost * whole - (end - start)
                run.ready = clock = end
        return clock

    def _communicate(self, run: _ChainProgress) -> None:
        """Place the collectives that come next in a chain."""
        while run.at < len(run.whole) and not run.computes[run.at]:
            seconds, earliest = run.whole[run.at], max(run.ready, self.link_clock)
            at = self.link_at
            while max(earliest, self.link_starts[at]) + seconds > self.link_ends[at] + TIME_ROUNDING:
                at += 1
            begin = max(earliest, self.link_starts[at])
            self.link_at, self.link_clock = at, begin + seconds
            self.rows.append((begin, begin + seconds, run.name, run.at, False))
            run.ready, run.at = begin + seconds, run.at + 1


_WORTH = 3.0  # a piece must do at least so many times what cutting it off costs


def _between(busy: FloatArray) -> FloatArray:
    """Gaps between occupied intervals, the outer ones included."""
    ordered = busy[np.argsort(busy[:, 0], kind="stable")]
    starts, ends = np.concatenate([[-np.inf], ordered[:, 1]]), np.concatenate([ordered[:, 0], [np.inf]])
    some = ends - starts > TIME_ROUNDING
    return np.stack([starts[some], ends[some]], axis=1)


def _less(free: FloatArray, taken: FloatArray) -> FloatArray:
    """Free intervals without what was taken out of them."""
    busy = np.stack([free[:-1, 1], free[1:, 0]], axis=1)
    return _between(np.concatenate([busy, taken]))
