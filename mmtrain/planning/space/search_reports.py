"""What a search tells those who ask: how far it is, and how it allocated ranks to units (`search/pipelined.py`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Progress = Callable[[int, int], None]  # candidates that are decided, and the number of all

PERCENT = 100


def progress_of_part(progress: Progress | None, num_before: int, num_searches: int, num_all: int) -> Progress | None:
    """Return the progress of some searches as that of all of them, which count as equally long.

    num_before: searches that are done by then; num_searches: those that report here; num_all: all together.
    """
    if progress is None:
        return None
    report = progress

    def report_part(done: int, total: int) -> None:
        done_searches = num_before + num_searches * done / max(total, 1)
        report(round(PERCENT * done_searches), PERCENT * num_all)

    return report_part


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
