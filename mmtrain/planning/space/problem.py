"""The planning problem: everything that a plan depends on, fixed before the search starts.

A search reports how far it is, and how it allocated ranks to units.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmtrain.costs import CostModel, Hardware, Precision, StateBytes, StateCopies, state_bytes
from mmtrain.models.shapes.model_shape import ModelShape
from mmtrain.planning.artifact.plan import Placement, Plan, StepMeasurement
from mmtrain.planning.space.constraints import RecomputeMode, SequenceParallelSetting, TpOverlapSetting, UnitChoices
from mmtrain.planning.space.sample_batches import SampledBatches
from mmtrain.recipe.settings.schema import Recipe

# Runs a few steps of each plan; plans of one call take turns, step by step.
MeasurePlans = Callable[[Sequence[Plan]], Sequence[StepMeasurement]]
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
    """How many ranks each unit gets in the mesh assignment of `disaggregated` that seems fastest."""

    ranks: Mapping[str, int]  # by unit
    step_s: float  # as estimated before layers are divided; infinite where nothing fits
    relaxed_s: float  # no allocation is faster, even of fractions of ranks
    seconds: float  # that the allocation took, by the clock of the watch

    def __str__(self) -> str:
        ranks = ", ".join(f"{unit} {count}" for unit, count in self.ranks.items())
        return (
            f"Allocation of ranks to units (disaggregated): {ranks}; a step of about {self.step_s:.3g} s, and of "
            f"{self.relaxed_s:.3g} s at least if ranks were divisible. Allocated in {self.seconds:.2f} s."
        )


@dataclass(frozen=True)
class AllocationWatch:
    """Times the allocation and takes its result."""

    clock: Callable[[], float]  # seconds
    report: Callable[[Allocation], None]


@dataclass(frozen=True)
class PlanRequest:
    """What the caller wants besides the fastest plan."""

    num_alternatives: int = 5  # losers that the plan names, each with the reason it lost
    explain: bool = False  # name every loser
    baseline: str | None = None  # return the plan that this rule of thumb makes (`advise.baselines.BASELINES`)
    measure: MeasurePlans | None = None  # runs the plans predicted fastest; the fastest as run is chosen
    num_measured: int = 12  # plans that are run: sizes and layer partitions of them, not counting rules of thumb
    progress: Progress | None = None
    allocation_watch: AllocationWatch | None = None  # learns how ranks were allocated, and the seconds of it
    announce: Callable[[str], None] | None = None  # called with the next step of planning, in words
    max_step_s: float = math.inf  # slower plans are of no use, so searches may end without any

    @property
    def names_losers(self) -> bool:
        """Whether more is asked for than the fastest plan, so that the best of each placement is sought."""
        return self.num_alternatives > 0 or self.explain or self.measure is not None

    def say(self, text: str) -> None:
        """Announce the next step of planning, if the caller listens."""
        if self.announce is not None:
            self.announce(text)


@dataclass(frozen=True)
class Constraints:
    """What the recipe and the model allow, by unit."""

    placements: tuple[Placement, ...]  # those that are searched
    choices: Mapping[str, UnitChoices]  # mesh sizes
    recompute: Mapping[str, RecomputeMode]
    sequence_parallel: Mapping[str, SequenceParallelSetting]
    tp_overlap: Mapping[str, TpOverlapSetting]
    encoder_microbatches: Mapping[str, int]  # of units whose number of microbatches the recipe fixes


@dataclass(frozen=True)
class Cluster:
    """Ranks to plan for."""

    hardware: Hardware
    num_ranks: int
    # Numbers of ranks for which some mesh exists: all ranks, or with `parallel.max_gpus` several up to that. Empty if
    # the constraints leave no mesh at all.
    rank_counts: tuple[int, ...]


@dataclass(frozen=True)
class PlanningProblem:
    """One model, one data distribution and one cluster: the search is a function of this and of its budget."""

    recipe: Recipe
    recipe_sha256: str
    settings: Mapping[str, Any]  # by dotted path, those of the recipe that plans depend on
    shape: ModelShape
    costs: CostModel
    precision: Precision
    seq_len: int
    batches: SampledBatches
    constraints: Constraints
    cluster: Cluster
    request: PlanRequest = field(default_factory=PlanRequest)
    # Seconds of a step that a quick search found, by the ranks that hold experts together; infinite where it found no
    # plan, or none as fast as with fewer ranks.
    expert_steps_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def hardware(self) -> Hardware:
        """What the ranks are."""
        return self.cluster.hardware

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes of weights, gradients and optimizer state per parameter."""
        optimizer = self.recipe.train.optimizer
        every = self.recipe.train.peer_copies.every
        copies = StateCopies.planned(every, self.cluster.num_ranks, self.hardware)
        return state_bytes(self.precision, optimizer.moments, optimizer.kind, copies)

    @property
    def choices(self) -> Mapping[str, UnitChoices]:
        """Mesh sizes that each unit may have."""
        return self.constraints.choices
