"""Everything the search asks about candidates: lower bounds, estimates, memory and simulation.

An `Evaluator` belongs to one planning problem. It owns all caches, so candidates stay small and immutable.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count

from mmtrain.costs import RankMemory
from mmtrain.planning.artifact.layout import Layout
from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.planning.evaluate.layout_simulation import (
    LoweredPrograms,
    schedule_memory,
    scheduled_graph,
    simulate_unless_slow,
)
from mmtrain.planning.evaluate.lower_bounds import MeshTimes, UnitMemoryBound, unit_time_bound
from mmtrain.planning.evaluate.memory_fit import MemoryMisfit, explain_misfit, fit_memory, within_host_memory
from mmtrain.planning.evaluate.mesh_time_estimate import MeshTimeEstimate
from mmtrain.planning.evaluate.partition_orders import KnownOrders
from mmtrain.planning.evaluate.step_time_estimator import StepTimeEstimator
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.layer_partition import (
    KnownChains,
    LayerChain,
    in_flight_by_chunk,
    layer_chains,
    layout_graph,
    partitioned_layout,
)
from mmtrain.planning.layer_costs.span_recompute import SpanRecompute
from mmtrain.planning.space.budget import DEFAULT_BUDGET, SearchBudget
from mmtrain.planning.space.candidate import (
    AssignmentSizes,
    Candidate,
    FittedLayout,
    LayerPartition,
    MeshAssignment,
    Rejected,
    Simulation,
    UnitTimeBound,
)
from mmtrain.planning.space.problem import PlanningProblem, PlanRequest
from mmtrain.program import build_program
from mmtrain.program.ir.graph import StageGraph, StageId
from mmtrain.program.schedules.builder import ScheduleKind

RecomputeToFit = Sequence[SpanRecompute | None]  # by chain, see `recompute_to_fit`; None where the anchor needs none
_WhatRuns = tuple[ScheduleKind, StageGraph]


@dataclass(frozen=True)
class KnownSchedules:
    """Orders and programs, which variants of a problem share: how layers keep activations changes neither."""

    orders: KnownOrders
    programs: LoweredPrograms

    @classmethod
    def none(cls, budget: SearchBudget) -> "KnownSchedules":
        """Return an object that knows nothing yet."""
        kept = budget.evaluation
        return cls(KnownOrders(kept.max_kept_order_actions), LoweredPrograms(kept.max_kept_program_actions))


class Evaluator:
    """Advances candidates of one problem; what is asked twice is computed once."""

    def __init__(
        self,
        problem: PlanningProblem,
        budget: SearchBudget = DEFAULT_BUDGET,
        layer_costs: LayerCosts | None = None,
        known_schedules: KnownSchedules | None = None,
    ) -> None:
        """Evaluate candidates of `problem`.

        Args:
            problem: what is planned.
            budget: how much is tried.
            layer_costs: costs of the same model and data, with the sequence parallelism that is planned. By default
                there is none, see `layer_costs.token_splits`.
            known_schedules: of another variant of the problem.
        """
        self.problem = problem
        self.budget = budget
        self.layer_costs = layer_costs or LayerCosts(problem, budget=budget)
        self._ids = count()
        # Of mesh assignments, which a quick search and the whole one look at alike:
        self._layer_chains: dict[AssignmentSizes, tuple[LayerChain, ...]] = {}
        self._recompute_to_fit: dict[AssignmentSizes, RecomputeToFit] = {}
        self._anchor_estimates: dict[tuple[AssignmentSizes, LayerPartition, int | None], float] = {}
        self._known_chains = KnownChains()
        self.known_schedules = known_schedules or KnownSchedules.none(budget)
        self._mesh_time_estimates: dict[float, MeshTimeEstimate] = {}  # by share of the memory
        self._estimators: dict[int | None, StepTimeEstimator] = {}
        self._simulations: dict[_WhatRuns | None, Simulation] = {}
        self._slow: dict[_WhatRuns | None, float] = {}  # seconds that the first batch exceeds, of those not simulated

    def with_budget(self, budget: SearchBudget, request: PlanRequest) -> "Evaluator":
        """Return an evaluator for another search of the same problem; both know what either has computed."""
        other = self.with_problem(replace(self.problem, request=request))
        other.budget = budget
        return other

    def with_problem(self, problem: PlanningProblem) -> "Evaluator":
        """Return an evaluator for a problem with another request or other placements, which knows what this one does.

        What one of them learns, the other knows too.
        """
        other = copy(self)
        other.problem = problem
        return other

    @property
    def memory_bytes(self) -> float:
        """Memory of a rank."""
        return self.problem.hardware.memory_bytes

    @cached_property
    def memory_lower_bound(self) -> UnitMemoryBound:
        """The least bytes that the fullest rank of a unit's mesh holds."""
        return UnitMemoryBound(self.layer_costs)

    @cached_property
    def mesh_times(self) -> MeshTimes:
        """The seconds of a unit's mesh in a step, whether or not it fits into memory."""
        return MeshTimes(self.layer_costs, self.budget.bounds)

    @cached_property
    def time_lower_bound(self) -> UnitTimeBound:
        """The least seconds of a unit's mesh in a step; infinite where it cannot fit into memory."""
        return self.time_lower_bound_within(1.0)

    def time_lower_bound_within(self, share: float) -> UnitTimeBound:
        """Return the bound that is infinite where a unit cannot fit into this share of the memory."""
        return unit_time_bound(self.mesh_times, self.memory_lower_bound, share * self.memory_bytes)

    def mesh_time_estimate_within(self, share: float) -> MeshTimeEstimate:
        """Return what estimates the seconds of a unit in a step if it has this share of the memory."""
        if share not in self._mesh_time_estimates:
            estimate = MeshTimeEstimate(
                self.layer_costs, self.mesh_times, self.memory_lower_bound, share * self.memory_bytes
            )
            self._mesh_time_estimates[share] = estimate
        return self._mesh_time_estimates[share]

    def enumerated(self, assignment: MeshAssignment) -> Candidate:
        """Return a new candidate, under a number of its own."""
        return Candidate(next(self._ids), assignment)

    def layer_chains(self, candidate: Candidate) -> tuple[LayerChain, ...]:
        """Return the lines of layers that the candidate divides over pipeline ranks."""
        sizes = candidate.assignment.sizes
        if sizes not in self._layer_chains:
            chains = layer_chains(candidate.assignment, self.layer_costs, self.problem.choices, self._known_chains)
            self._layer_chains[sizes] = chains
        return self._layer_chains[sizes]

    def recompute_to_fit(self, candidate: Candidate) -> RecomputeToFit:
        """Return the recomputation that spans of layers need, where the anchor does not fit without any."""
        sizes = candidate.assignment.sizes
        if sizes not in self._recompute_to_fit:
            self._recompute_to_fit[sizes] = self._find_recompute_to_fit(candidate)
        return self._recompute_to_fit[sizes]

    def _find_recompute_to_fit(self, candidate: Candidate) -> RecomputeToFit:
        chains, layer_costs = self.layer_chains(candidate), self.layer_costs
        anchor = tuple(chain.anchor or () for chain in chains)
        num_in_flight = self.estimator(None).in_flight(candidate.assignment, anchor)
        graph = layout_graph(partitioned_layout(candidate.assignment, layer_costs, anchor), layer_costs)
        memory = layer_costs.memory(graph, num_in_flight)
        if max(rank.total for rank in memory.values()) <= self.memory_bytes:
            return [None] * len(chains)
        return [chain.recompute_to_fit(in_flight_by_chunk(chain, num_in_flight), self.memory_bytes) for chain in chains]

    def estimate_anchor(self, candidate: Candidate, anchor: LayerPartition, num_replica_groups: int | None) -> float:
        """Return the step of a candidate's anchor, with what it must recompute to fit.

        num_replica_groups: see `estimator`.
        """
        key = candidate.assignment.sizes, anchor, num_replica_groups
        if key not in self._anchor_estimates:
            chains, recompute = self.layer_chains(candidate), self.recompute_to_fit(candidate)
            estimator = self.estimator(num_replica_groups)
            [step_s] = estimator.estimate(candidate.assignment, chains, [anchor], recompute).tolist()
            self._anchor_estimates[key] = step_s
        return self._anchor_estimates[key]

    def estimator(self, num_replica_groups: int | None) -> StepTimeEstimator:
        """Return the step-time estimator.

        num_replica_groups: groups of each batch that stand for all, those with most work; None: all are estimated.
        """
        if num_replica_groups not in self._estimators:
            machine = self.problem.hardware
            orders = self.known_schedules.orders
            estimator = StepTimeEstimator(self.layer_costs, machine, num_replica_groups, orders)
            self._estimators[num_replica_groups] = estimator
        return self._estimators[num_replica_groups]

    def fit(
        self,
        candidate: Candidate,
        num_in_flight: Mapping[StageId, int],
        memory_bytes: float | None = None,
        ratio_by_rank: Mapping[int, float] | None = None,
    ) -> Candidate | Rejected:
        """Recompute as few layers of a partitioned candidate as memory demands, under 1F1B.

        num_in_flight: microbatches of each stage between forward and backward, at most. memory_bytes: that ranks may
        hold; by default what they have. ratio_by_rank: what ranks hold beside what is counted for them, where known.
        """
        assert candidate.partition is not None
        fit = fit_memory(
            candidate.assignment,
            candidate.partition,
            self.layer_costs,
            self.memory_bytes if memory_bytes is None else memory_bytes,
            num_in_flight,
            self.budget.evaluation,
            ratio_by_rank or {},
        )
        if isinstance(fit, MemoryMisfit):
            return Rejected(candidate, fit.reason, fit.need_gib)
        return candidate.fitted(fit)

    def fit_schedule(self, candidate: Candidate, layout: Layout, schedule: SchedulePlan) -> Candidate | Rejected:
        """Compare what the layout's ranks hold under a schedule with their memory; nothing is recomputed for it."""
        graph = scheduled_graph(layout, schedule, self.layer_costs)
        memory = schedule_memory(graph, schedule, self.layer_costs)
        fit = FittedLayout(layout, graph, memory)
        if fit.peak_bytes > self.memory_bytes:
            return self.misfit(candidate, memory)
        on_host = within_host_memory(fit, self.layer_costs.host_memory_bytes)
        if isinstance(on_host, MemoryMisfit):
            return Rejected(candidate, on_host.reason)
        return candidate.fitted(fit, schedule)

    def misfit(self, candidate: Candidate, memory: Mapping[int, RankMemory]) -> Rejected:
        """Reject a candidate for what its ranks hold."""
        misfit = explain_misfit(self.layer_costs, memory, self.memory_bytes)
        return Rejected(candidate, misfit.reason, misfit.need_gib)

    def simulate(self, candidate: Candidate) -> Candidate:
        """Simulate a fitted candidate on the sampled batches, unless one that runs the same stages was simulated."""
        simulated = self.simulate_unless_slow(candidate, math.inf)
        assert simulated is not None
        return simulated

    def simulate_unless_slow(self, candidate: Candidate, max_first_batch_s: float) -> Candidate | None:
        """Do as `simulate`, but simulate nothing beyond the first sampled batch where that takes longer: None."""
        key = _what_runs(candidate)
        simulation = self._simulations.get(key)
        if simulation is None and self._slow.get(key, 0.0) < max_first_batch_s:
            simulation = self._simulate(candidate.layout, candidate.schedule, max_first_batch_s=max_first_batch_s)
            if key is not None:
                self._remember(key, simulation, max_first_batch_s)
        if simulation is None or simulation.first_batch_step_s > max_first_batch_s:
            return None
        return candidate.simulated(simulation)

    def _remember(self, key: _WhatRuns, simulation: Simulation | None, max_first_batch_s: float) -> None:
        if simulation is None:
            self._slow[key] = max_first_batch_s
        else:
            self._simulations[key] = simulation

    @cached_property
    def _simulate(self) -> "partial[Simulation | None]":
        return partial(
            simulate_unless_slow,
            layer_costs=self.layer_costs,
            machine=self.problem.hardware,
            budget=self.budget.evaluation,
            programs=self.known_schedules.programs,
        )


def _what_runs(candidate: Candidate) -> _WhatRuns | None:
    """Return what the simulation of a fitted candidate depends on; None where its order is its own."""
    schedule = candidate.schedule
    return None if schedule.order is not None else (schedule.kind, candidate.fitted_graph)


def verify_program(candidate: Candidate, evaluator: Evaluator) -> None:
    """Build the program of a simulated candidate and prove that it is complete, free of deadlock, and fits into memory.

    The simulator follows a few ranks and the memory rule counts microbatches by a formula; this looks at every action
    of every rank. A candidate that fits only as run may hold so much more, as counted.

    Raises:
        ProgramError: names what is wrong. The search is at fault, not the recipe.
    """
    graph = candidate.graph
    counted = evaluator.layer_costs.graph_memory(graph)
    limits = dict.fromkeys(candidate.memory, evaluator.memory_bytes)
    if candidate.peak_bytes > evaluator.memory_bytes and candidate.memory_ratio is not None:
        for rank in limits:
            limits[rank] /= candidate.ratio_by_rank.get(rank, candidate.memory_ratio)
    limit = counted.activation_limit(graph, candidate.memory, limits, evaluator.problem.hardware.host_memory_bytes)
    build_program(graph, limit, candidate.schedule.kind, candidate.schedule.order)
