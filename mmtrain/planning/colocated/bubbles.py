"""Place kernels into the free time of a rank whose busy times are given, each as early as it fits.

`FreeTime` holds the intervals in which a rank computes nothing, and those in which its tensor-parallel link carries
nothing. A `KernelChain` is a sequence of kernels that run one after another from its release time on. Compute kernels
need a free compute interval as long as themselves, collectives one of the link. Chains on a rank are independent.

`place_kernels` is list scheduling: at any moment the first chain (in the given order) runs whose next kernel is ready
and fits into the free interval. The rank never idles while there is one. No kernel is interrupted. Times are seconds.
"""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

TIME_ROUNDING = 1e-7  # s: sums of many durations differ by less


@dataclass(frozen=True)
class FreeTime:
    """Free time of one rank: (n, 2) intervals (start, end) in ascending order; the outer ones reach to infinity."""

    compute: FloatArray
    link: FloatArray

    @classmethod
    def around(cls, busy: FloatArray, link_busy: FloatArray) -> "FreeTime":
        """Return what (n, 2) busy intervals leave free; they may touch, but not overlap."""
        return cls(_between(busy), _between(link_busy))

    def time_reversed(self) -> "FreeTime":
        """Return the same intervals with time running backwards."""
        return FreeTime(-self.compute[::-1, ::-1], -self.link[::-1, ::-1])

    def without(self, placed: "PlacedKernels") -> "FreeTime":
        """Return what is left when these kernels run."""
        spans = placed.spans
        return FreeTime(
            _subtract(self.compute, spans[placed.computes]),
            _subtract(self.link, spans[~placed.computes]),
        )


@dataclass(frozen=True)
class KernelSequence:
    """Kernels in the order in which they run: durations, and which of them compute."""

    durations: tuple[float, ...]
    computes: tuple[bool, ...]  # the others are collectives on the link

    @classmethod
    def concatenate(cls, parts: Sequence["KernelSequence"]) -> "KernelSequence":
        """Run the parts one after another."""
        return cls(
            tuple(itertools.chain.from_iterable(part.durations for part in parts)),
            tuple(itertools.chain.from_iterable(part.computes for part in parts)),
        )

    def time_reversed(self) -> "KernelSequence":
        """Return the sequence from its last kernel to its first."""
        return KernelSequence(self.durations[::-1], self.computes[::-1])

    @cached_property
    def latency(self) -> float:
        """Time from the start of the first kernel to the end of the last one when nothing delays them."""
        return float(sum(self.durations))


@dataclass(frozen=True)
class KernelChain:
    """Kernels that may start at `release`; the caller identifies the chain by `label`, such as a microbatch."""

    label: int
    release: float
    kernels: KernelSequence


@dataclass(frozen=True)
class PlacedKernels:
    """Kernels in time: one row each."""

    spans: FloatArray  # (n, 2) start and end
    labels: npt.NDArray[np.int64]  # (n,) of the chain
    kernel_index: npt.NDArray[np.int64]  # (n,) position in the chain's sequence
    computes: npt.NDArray[np.bool_]  # (n,) on the compute stream, not on the link

    def time_reversed(self, num_kernels: int) -> "PlacedKernels":
        """Return the same with time running backwards; every chain has `num_kernels` kernels."""
        return PlacedKernels(-self.spans[:, ::-1], self.labels, num_kernels - 1 - self.kernel_index, self.computes)


def place_kernels(free_time: FreeTime, chains: Sequence[KernelChain]) -> tuple[PlacedKernels, dict[int, float]]:
    """Place all chains; return their kernels, and the end of each chain by its label.

    Args:
        free_time: when the rank and its link are free.
        chains: the earlier one comes first when several are ready.
    """
    if not chains:
        none = np.zeros(0, dtype=np.int64)
        return PlacedKernels(np.zeros((0, 2)), none, none, none.astype(bool)), {}
    scheduler = _ListScheduler(free_time, chains)
    scheduler.run()
    rows = np.array(scheduler.rows, dtype=np.float64).reshape(-1, 5)  # no rows where all chains are empty
    placed = PlacedKernels(rows[:, :2], rows[:, 2].astype(np.int64), rows[:, 3].astype(np.int64), rows[:, 4] > 0)
    return placed, {progress.label: progress.ready for progress in scheduler.chains}


class _ChainProgress:
    """How far a chain has come: its next kernel, and when that is ready."""

    __slots__ = ("computes", "durations", "label", "next", "num_kernels", "priority", "ready")

    def __init__(self, chain: KernelChain, priority: int) -> None:
        self.label = chain.label
        self.priority = priority  # the lowest comes first
        self.ready = chain.release
        self.next = 0
        self.computes = chain.kernels.computes
        self.durations = chain.kernels.durations
        self.num_kernels = len(self.durations)


class _ListScheduler:
    """Walks through the free intervals of a rank and fills them."""

    def __init__(self, free_time: FreeTime, chains: Sequence[KernelChain]) -> None:
        self.starts: list[float] = free_time.compute[:, 0].tolist()
        self.ends: list[float] = free_time.compute[:, 1].tolist()
        self.link_starts: list[float] = free_time.link[:, 0].tolist()
        self.link_ends: list[float] = free_time.link[:, 1].tolist()
        self.link_interval = 0
        self.link_clock = -inf
        self.rows: list[tuple[float, float, int, int, bool]] = []  # start, end, label, kernel index, computes
        self.chains = [_ChainProgress(chain, priority) for priority, chain in enumerate(chains)]

    def run(self) -> None:
        """Place kernel after kernel in the order of time, until every chain is done."""
        unreleased = sorted(self.chains, key=lambda chain: chain.ready, reverse=True)  # the earliest at the end
        active: list[_ChainProgress] = []  # released, and with a compute kernel next
        interval, clock = 0, -inf
        while active or unreleased:
            if unreleased and (not active or unreleased[-1].ready <= max(clock, _earliest_ready(active))):
                released = unreleased.pop()
                self._place_collectives(released)
                if released.next < released.num_kernels:
                    active.append(released)
                    active.sort(key=lambda chain: chain.priority)
                continue
            interval = self._first_useful_interval(interval, clock, active)
            clock, end = max(clock, self.starts[interval]), self.ends[interval]
            chosen, start = self._choose(active, clock, end)
            if chosen is None:
                interval += 1
                continue
            clock = start + chosen.durations[chosen.next]
            self.rows.append((start, clock, chosen.label, chosen.next, True))
            chosen.ready = clock
            chosen.next += 1
            self._place_collectives(chosen)
            if chosen.next == chosen.num_kernels:
                active.remove(chosen)

    def _choose(self, active: list[_ChainProgress], clock: float, end: float) -> tuple[_ChainProgress | None, float]:
        """Return the chain that runs next in the free interval that ends at `end`, and when it starts."""
        chosen, earliest = None, inf
        for chain in active:
            start = chain.ready if chain.ready > clock else clock
            if start < earliest and start + chain.durations[chain.next] <= end + TIME_ROUNDING:
                chosen, earliest = chain, start
        return chosen, earliest

    def _first_useful_interval(self, interval: int, clock: float, active: list[_ChainProgress]) -> int:
        """Return the first interval from `interval` on that ends after some chain is ready."""
        soonest = max(clock, _earliest_ready(active))
        return interval if self.ends[interval] > soonest else bisect_right(self.ends, soonest, interval)

    def _place_collectives(self, chain: _ChainProgress) -> None:
        """Place the collectives that come next in a chain, up to its next compute kernel."""
        while chain.next < chain.num_kernels and not chain.computes[chain.next]:
            duration = chain.durations[chain.next]
            earliest = max(chain.ready, self.link_clock)
            interval = self.link_interval
            while max(earliest, self.link_starts[interval]) + duration > self.link_ends[interval] + TIME_ROUNDING:
                interval += 1
            start = max(earliest, self.link_starts[interval])
            self.link_interval = interval
            self.link_clock = start + duration
            self.rows.append((start, start + duration, chain.label, chain.next, False))
            chain.ready = start + duration
            chain.next += 1


def _earliest_ready(active: list[_ChainProgress]) -> float:
    return min(chain.ready for chain in active)


def _between(busy: FloatArray) -> FloatArray:
    """Return the gaps between busy intervals, those before the first and after the last included."""
    ordered = busy[np.argsort(busy[:, 0], kind="stable")]
    starts = np.concatenate([[-np.inf], ordered[:, 1]])
    ends = np.concatenate([ordered[:, 0], [np.inf]])
    is_gap = ends - starts > TIME_ROUNDING
    return np.stack([starts[is_gap], ends[is_gap]], axis=1)


def _subtract(free: FloatArray, used: FloatArray) -> FloatArray:
    """Return what is left of free intervals when intervals inside them are used."""
    busy = np.stack([free[:-1, 1], free[1:, 0]], axis=1)
    return _between(np.concatenate([busy, used]))
