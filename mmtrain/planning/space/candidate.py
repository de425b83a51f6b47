"""A candidate plan: the one object that the search carries from a choice of meshes to a simulated step.

Every strategy advances candidates through the stages of `CandidateStage` in order. A candidate never changes; each
step returns a new one with the same `id`, which numbers its mesh assignment. So several layer partitions of one mesh
assignment share an id, and the search keeps the fastest of them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple, Protocol

from mmtrain.costs import RankMemory
from mmtrain.costs.hardware import GIB
from mmtrain.planning.artifact.layout import Layout, MeshSize, first_ranks, replicated_summary
from mmtrain.planning.artifact.plan import (
    AS_FAST_RATIO,
    Alternative,
    Placement,
    SchedulePlan,
    StepMeasurement,
    sharding_text,
)
from mmtrain.planning.space.sample_batches import BatchSplit, unit_split
from mmtrain.program.ir.graph import LLM, DispatchMode, Exchange, StageGraph, StageId

LayerPartition = tuple[tuple[int, ...], ...]  # for each layer chain the bounds of its model chunks, from 0 to its end
# A placement, the mesh of each unit and its microbatches.
AssignmentSizes = tuple[Placement, tuple[tuple[str, MeshSize], ...], tuple[tuple[str, int], ...]]

# Step times of one placement within this factor count as equal, and the simpler layout is chosen: simulated differences
# below a tenth of a percent are far below the error of predictions (docs/benchmarks.md, Predictions).
EQUAL_STEP_TIME_RATIO = 1.001
# Ways to run a model, from the simplest; `MeshAssignment.complexity_level` is an index into them. Between levels, step
# times within `AS_FAST_RATIO` count as equal ("Within 1%, the plan with fewer mechanisms is chosen").
COMPLEXITY_LEVELS = ("replicas", "one pipeline", "sharded replicas", "ranks of their own", "shared ranks")


class CandidateStage(IntEnum):
    """How much is known of a candidate; each stage is more expensive to reach than the one before."""

    ENUMERATED = 0  # a placement and meshes
    BOUNDED = 1  # no layer partition of these meshes is faster than a lower bound
    PARTITIONED = 2  # layers are divided over pipeline ranks
    ESTIMATED = 3  # the pipeline recurrence gives its step time, without waiting for messages
    FITTED = 4  # it fits into memory, with the layers recomputed that this takes
    SIMULATED = 5
    MEASURED = 6  # it was run


@dataclass(frozen=True)
class MeshAssignment:
    """A placement with a mesh size for every unit, before layers are divided into stages.

    In `unified` all units are on the same ranks, and `pp` is the number of ranks of the one pipeline. Where the LLM's
    replicas share sequences (`cp`), they are data-parallel replicas of the other units. An encoder whose `tp` is only a
    divisor of the LLM's has a replica on each part of the LLM's TP groups that is as large.
    """

    placement: Placement
    meshes: Mapping[str, MeshSize]
    num_microbatches: Mapping[str, int]  # of each replica, by unit
    # In `replicated`: replicas that hold one copy of the state together; None: all hold weights whole (ZeRO-1).
    shard: int | None = None
    dispatch: DispatchMode | None = None  # in `replicated`: what is balanced over the ranks
    exchange: Exchange = "all_to_all"  # in `replicated`: by which rows are dispatched
    encoder_first: bool = False  # in `replicated`: see `StageGraph`
    keeps_weights: bool = False  # in `replicated`, with `shard`: they stay gathered through a step (ZeRO-2)

    @property
    def pipeline_microbatches(self) -> Mapping[str, int | None]:
        """Microbatches that decide how long a unit's pipeline fills; None: the LLM's pipeline decides, not the unit."""
        if self.placement != "unified":
            return self.num_microbatches
        num_llm = self.num_microbatches[LLM]
        return {unit: num if num == num_llm else None for unit, num in self.num_microbatches.items()}

    @property
    def batch_split(self) -> BatchSplit:
        """Data-parallel degrees and microbatches, by unit."""
        return tuple(
            unit_split(unit, mesh, self.num_microbatches[unit], self.dispatch) for unit, mesh in self.meshes.items()
        )

    @property
    def sizes(self) -> AssignmentSizes:
        """The meshes and microbatches that make a pipelined assignment, as a key."""
        return self.placement, tuple(self.meshes.items()), tuple(self.num_microbatches.items())

    @property
    def ranks(self) -> int:
        """Number of ranks that it uses."""
        if self.placement == "disaggregated":
            return sum(mesh.ranks for mesh in self.meshes.values())
        return self.meshes[LLM].ranks

    @property
    def passes_of_step(self) -> int:
        """Forwards and backwards of a step, of one replica of each unit: what a simulation of it takes grows so."""
        return sum(2 * mesh.pp * mesh.vpp * self.num_microbatches[unit] for unit, mesh in self.meshes.items())

    @property
    def complexity_level(self) -> int:
        """Index in `COMPLEXITY_LEVELS`: the larger, the more must work for a step to take the predicted time."""
        if self.placement == "colocated":
            return COMPLEXITY_LEVELS.index("shared ranks")
        if self.placement == "disaggregated":
            return COMPLEXITY_LEVELS.index("ranks of their own")
        if self.placement == "replicated":
            return COMPLEXITY_LEVELS.index("sharded replicas")
        return COMPLEXITY_LEVELS.index("replicas" if self.meshes[LLM].pp == 1 else "one pipeline")

    def tp_group_across_nodes(self, ranks_per_node: int) -> tuple[int, ...] | None:
        """Return a tensor-parallel group whose ranks lie on different nodes, if there is one."""
        meshes = self.meshes if self.placement == "disaggregated" else {LLM: self.meshes[LLM]}
        for name, first_rank in first_ranks(meshes).items():
            mesh = meshes[name]
            if ranks_per_node % mesh.tp or first_rank % mesh.tp:
                for start in range(first_rank, first_rank + mesh.ranks, mesh.tp):
                    if start // ranks_per_node != (start + mesh.tp - 1) // ranks_per_node:
                        return tuple(range(start, start + mesh.tp))
        return None

    def __str__(self) -> str:
        if self.placement == "colocated":
            return "colocated: " + ", ".join(f"{unit} {mesh}" for unit, mesh in self.meshes.items())
        if self.placement == "replicated":
            llm, counts = self.meshes[LLM], self.num_microbatches
            sharded = sharding_text(self.shard, self.keeps_weights)
            return replicated_summary(llm, sharded, counts, self.dispatch, self.exchange, self.encoder_first)
        num_llm = self.num_microbatches[LLM]
        suffix = {unit: f" mb{num}" if num != num_llm else "" for unit, num in self.num_microbatches.items()}
        if self.placement == "unified":
            llm = self.meshes[LLM]
            of_own = {name: f" tp{m.tp} dp{m.dp}" if m.tp != llm.tp else "" for name, m in self.meshes.items()}
            others = "".join(f", {unit}{of_own[unit]}{suffix[unit]}" for unit in suffix if of_own[unit] or suffix[unit])
            return f"unified: {llm}{others}"
        return f"{self.placement}: " + ", ".join(f"{unit} {mesh}{suffix[unit]}" for unit, mesh in self.meshes.items())


class UnitTimeBound(Protocol):
    """Seconds that a unit of this mesh needs in a step at least; infinite where it cannot fit into memory."""

    def __call__(self, unit: str, mesh: MeshSize, num_microbatches: int | None, in_flight_behind: int = 0) -> float:
        """Return the seconds.

        num_microbatches: of a replica; None where they are not known, or do not decide how the pipeline fills.
        in_flight_behind: the least number of its microbatches that are in flight in the pipelines that read from it.
        """


@dataclass(frozen=True)
class FittedLayout:
    """Which ranks hold which layers and recompute which of them, with the bytes that takes."""

    layout: Layout
    graph: StageGraph
    memory: Mapping[int, RankMemory]  # by rank of the first replica group

    @property
    def peak_bytes(self) -> float:
        """Bytes on the fullest rank."""
        return max(rank.total for rank in self.memory.values())


@dataclass(frozen=True)
class Simulation:
    """The simulator's prediction, mean over the sampled batches."""

    graph: StageGraph  # of stages, or of pieces of their blocks where the schedule uses them
    step_time_s: float
    first_batch_step_s: float  # of the first sampled batch alone
    bubbles: Mapping[str, float]  # kind -> share of all rank-seconds
    busiest_stages: tuple[StageId, ...]  # stages of the rank that computes most
    busiest_s: float  # seconds of a step that it computes


@dataclass(frozen=True)
class Candidate:
    """One way to run the model; `stage` says which fields are known."""

    id: int  # number of its mesh assignment
    assignment: MeshAssignment
    stage: CandidateStage = CandidateStage.ENUMERATED
    time_lower_bound_s: float = 0.0  # infinite where its ranks must hold more than their memory
    partition: LayerPartition | None = None
    estimated_step_s: float | None = None
    fit: FittedLayout | None = None
    explicit_schedule: SchedulePlan | None = None  # 1F1B or encoder-first where there is none
    simulation: Simulation | None = None
    measured_step_s: float | None = None  # infinite where it could not be run
    memory_ratio: float | None = None  # as run, see `artifact.plan.StepMeasurement`
    ratio_by_rank: Mapping[int, float] = field(default_factory=dict)  # as run, by rank of the first replica group
    is_out_of_memory: bool = False  # as run

    def bounded(self, seconds: float) -> "Candidate":
        """Return it with a lower bound of its step, at least as tight as before."""
        self._require_at_most(CandidateStage.BOUNDED)
        bound = max(seconds, self.time_lower_bound_s)
        return replace(self, stage=CandidateStage.BOUNDED, time_lower_bound_s=bound)

    def partitioned(self, partition: LayerPartition) -> "Candidate":
        """Return it with its layers divided over pipeline ranks."""
        self._require_at_most(CandidateStage.PARTITIONED)
        return replace(self, stage=CandidateStage.PARTITIONED, partition=partition)

    def estimated(self, seconds: float) -> "Candidate":
        """Return it with the step time that the pipeline recurrence gives its partition."""
        self._require(CandidateStage.PARTITIONED)
        return replace(self, stage=CandidateStage.ESTIMATED, estimated_step_s=seconds)

    def fitted(self, fit: FittedLayout, schedule: SchedulePlan | None = None) -> "Candidate":
        """Return it with a layout that fits into memory; again with another schedule, what was simulated is dropped."""
        self._require(CandidateStage.PARTITIONED)
        return replace(self, stage=CandidateStage.FITTED, fit=fit, explicit_schedule=schedule, simulation=None)

    def simulated(self, simulation: Simulation) -> "Candidate":
        """Return it with the simulator's prediction."""
        self._require(CandidateStage.FITTED)
        return replace(self, stage=CandidateStage.SIMULATED, simulation=simulation)

    def measured(self, step: StepMeasurement) -> "Candidate":
        """Return it with what was seen when it was run."""
        self._require(CandidateStage.SIMULATED)
        return replace(
            self,
            stage=CandidateStage.MEASURED,
            measured_step_s=step.seconds,
            memory_ratio=step.memory_ratio,
            ratio_by_rank=self._largest_ratios(step.ratio_by_rank),
            is_out_of_memory=step.is_out_of_memory,
        )

    def _largest_ratios(self, of_all: Sequence[float]) -> dict[int, float]:
        """Return for each rank of the first replica group the largest ratio of the ranks that hold its stages."""
        if not of_all:
            return {}
        stages = [frozenset(stage for stage, _ in self.graph.held_by(rank)) for rank in range(len(of_all))]
        largest: dict[frozenset[StageId], float] = {}
        for held, ratio in zip(stages, of_all, strict=True):
            largest[held] = max(ratio, largest.get(held, ratio))
        return {rank: largest[stages[rank]] for rank in self.memory}

    @property
    def placement(self) -> Placement:
        """How units share ranks."""
        return self.assignment.placement

    @property
    def layout(self) -> Layout:
        """Which ranks hold which layers; from FITTED on."""
        return self._fit.layout

    @property
    def fitted_graph(self) -> StageGraph:
        """Which stages its ranks hold, and which of their layers they recompute; from FITTED on."""
        return self._fit.graph

    @property
    def memory(self) -> Mapping[int, RankMemory]:
        """Bytes by rank of the first replica group; from FITTED on."""
        return self._fit.memory

    @property
    def peak_bytes(self) -> float:
        """Bytes on the fullest rank; from FITTED on."""
        return self._fit.peak_bytes

    @property
    def schedule(self) -> SchedulePlan:
        """What orders its program; from FITTED on."""
        return self.explicit_schedule or self.layout.default_schedule

    @property
    def first_batch_step_s(self) -> float:
        """Simulated seconds of the first sampled batch; from SIMULATED on."""
        return self._simulation.first_batch_step_s

    @property
    def graph(self) -> StageGraph:
        """Its stage graph; from SIMULATED on."""
        return self._simulation.graph

    @property
    def step_time_s(self) -> float:
        """Simulated seconds of a step; from SIMULATED on."""
        return self._simulation.step_time_s

    @property
    def bubbles(self) -> Mapping[str, float]:
        """Share of all rank-seconds by kind of bubble; from SIMULATED on."""
        return self._simulation.bubbles

    @property
    def busiest_stages(self) -> tuple[StageId, ...]:
        """Stages of the rank that computes most; from SIMULATED on."""
        return self._simulation.busiest_stages

    @property
    def busiest_s(self) -> float:
        """Seconds of a step that this rank computes; from SIMULATED on."""
        return self._simulation.busiest_s

    @property
    def summary(self) -> str:
        """One line for tables."""
        return str(self.assignment) if self.simulation is None else self.layout.summary

    @property
    def _fit(self) -> FittedLayout:
        assert self.fit is not None, f"candidate {self.id} is {self.stage.name}, not FITTED"
        return self.fit

    @property
    def _simulation(self) -> Simulation:
        assert self.simulation is not None, f"candidate {self.id} is {self.stage.name}, not SIMULATED"
        return self.simulation

    def _require(self, stage: CandidateStage) -> None:
        assert self.stage >= stage, f"candidate {self.id} is {self.stage.name}, not yet {stage.name}"

    def _require_at_most(self, stage: CandidateStage) -> None:
        assert self.stage <= stage, f"candidate {self.id} is {self.stage.name}, already past {stage.name}"


@dataclass(frozen=True)
class Rejected:
    """A candidate that lost, and why: the only way in which a candidate becomes an `Alternative`."""

    candidate: Candidate
    reason: str
    need_gib: float | None = None  # what its fullest rank needs, where that is the reason
    label: str = ""  # in front of its summary, like `megatron baseline`

    @property
    def alternative(self) -> Alternative:
        """The line of the ranking."""
        candidate = self.candidate
        is_simulated = candidate.simulation is not None
        return Alternative(
            summary=f"{self.label}, {candidate.summary}" if self.label else candidate.summary,
            placement=candidate.placement,
            step_time_s=candidate.step_time_s if is_simulated else None,
            peak_memory_gib=round(candidate.peak_bytes / GIB, 4) if is_simulated else self.need_gib,
            reason=self.reason,
        )


@dataclass(frozen=True)
class SearchResults:
    """Everything that one search learned, or several together."""

    candidates: tuple[Candidate, ...] = ()  # simulated; the chosen one first, then by step time
    rejected: tuple[Rejected, ...] = ()
    enumerated: tuple[Candidate, ...] = ()  # all candidates of `unified` and `disaggregated`, with their bounds

    @property
    def best(self) -> Candidate | None:
        """The candidate to choose."""
        return self.candidates[0] if self.candidates else None

    @property
    def fastest_s(self) -> float:
        """Seconds of the chosen step; infinity without any."""
        return self.candidates[0].step_time_s if self.candidates else math.inf

    @property
    def least_need_gib(self) -> float:
        """GiB that the rejected candidate nearest to fitting needs; infinity if that is not known of any."""
        return min((loser.need_gib for loser in self.rejected if loser.need_gib is not None), default=math.inf)

    def merged(self, *others: "SearchResults") -> "SearchResults":
        """Rank what several searches learned together."""
        every = (self, *others)
        return SearchResults(
            rank_candidates(candidate for results in every for candidate in results.candidates),
            tuple(loser for results in every for loser in results.rejected),
            tuple(candidate for results in every for candidate in results.enumerated),
        )


class DecidedSearch(NamedTuple):
    """A search of a strategy (`search.strategies.PlacementSearch`) that has found the best plans of what lost, too."""

    results: SearchResults

    def name_losers(self) -> None:
        """Do nothing."""


def rank_candidates(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Order simulated candidates by step time; of those as fast as the fastest, the simplest is chosen and leads.

    As fast is within `AS_FAST_RATIO` where their complexity levels differ, and within `EQUAL_STEP_TIME_RATIO` else.
    """
    ordered = sorted(candidates, key=lambda candidate: (candidate.step_time_s, candidate.layout.complexity))
    if not ordered:
        return ()
    as_fast = [candidate for candidate in ordered if candidate.step_time_s <= ordered[0].step_time_s * AS_FAST_RATIO]
    level = min(candidate.assignment.complexity_level for candidate in as_fast)
    simplest = [candidate for candidate in as_fast if candidate.assignment.complexity_level == level]
    limit_s = simplest[0].step_time_s * EQUAL_STEP_TIME_RATIO
    equal = [candidate for candidate in simplest if candidate.step_time_s <= limit_s]
    chosen = min(equal, key=lambda candidate: (candidate.layout.complexity, candidate.step_time_s))
    return (chosen, *(candidate for candidate in ordered if candidate is not chosen))


def partition_of(layout: Layout) -> LayerPartition:
    """Read the layer partition of a layout in which every unit is a layer chain of its own."""
    return tuple((0, *(stage.layers[1] for stage in unit.stages)) for unit in layout.units.values())
