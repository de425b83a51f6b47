"""What the planner says of the allocation of ranks to units, to those who ask; see `allocation.py`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Allocation:
    """How many ranks each unit gets in the mesh assignment of `disaggregated` with the lowest bound."""

    ranks: Mapping[str, int]  # by unit
    bound_s: float  # seconds of the slowest unit at least; infinite where nothing fits
    relaxed_s: float  # no allocation is faster, even of fractions of ranks
    num_assignments: int  # that the search starts with, of all placements
    seconds: float  # that the step took, by the clock of the watch

    def __str__(self) -> str:
        ranks = ", ".join(f"{unit} {count}" for unit, count in self.ranks.items())
        return (
            f"Allocation of ranks to units (disaggregated): {ranks}; a step of {self.bound_s:.3g} s at least, "
            f"{self.relaxed_s:.3g} s if ranks were divisible. {self.num_assignments:,} mesh assignments listed in "
            f"{self.seconds:.2f} s."
        )


@dataclass(frozen=True)
class AllocationWatch:
    """Times the allocation and takes its result."""

    clock: Callable[[], float]  # seconds
    report: Callable[[Allocation], None]
