"""How each placement is searched. A new placement is a folder with a `PlacementStrategy`, and one entry here.

For `unified` and `disaggregated` the first step is the allocation of ranks to units. MMScale (arXiv 2408.04275)
allocates GPUs to encoder, LLM and generator before anything else. Here the mesh assignments are listed with the lower
bounds of their steps, which order the search. On large clusters those of `disaggregated` come one after another, the
fastest first by an estimate, and the search asks for as many as it needs.
"""

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Protocol

from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.artifact.plan import Placement
from mmtrain.planning.colocated.colocated_search import ColocatedStrategy, has_colocated_meshes
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.search.allocation_order import StepEstimate, most_split_assignments, ordered_assignments
from mmtrain.planning.search.best_first_search import AllocatedCandidates, BestFirstSearch
from mmtrain.planning.search.mesh_enumeration import (
    Choices,
    all_disaggregated,
    has_pipelined_meshes,
    has_replicated_mesh,
    lower_bound,
    unified_assignments,
    unit_mesh_sizes,
    units_slow_to_fill,
    with_encoder_chunks,
)
from mmtrain.planning.search.replicated import ReplicatedStrategy
from mmtrain.planning.space.budget import MeshBudget, SearchBudget
from mmtrain.planning.space.candidate import Candidate, MeshAssignment, SearchResults, UnitTimeBound
from mmtrain.planning.space.problem import Allocation, AllocationWatch, PlanningProblem, Progress, progress_of_part
from mmtrain.program.ir.graph import LLM


class PlacementSearch(Protocol):
    """A search that knows the fastest plan, and can go on to the best ones of placements that lost."""

    @property
    def results(self) -> SearchResults:
        """Simulated candidates, and why others lost."""

    def name_losers(self) -> None:
        """Search for the best plan of each placement that was left because it is slower."""


class PlacementStrategy(Protocol):
    """Finds the fastest candidates of one or several placements."""

    def num_searches(self, problem: PlanningProblem) -> int:
        """Return how many searches `search` runs, each of which reports its own progress."""

    def search(
        self, evaluator: Evaluator, incumbent: Candidate | None, progress: Progress | None = None
    ) -> PlacementSearch:
        """Search until no candidate that is left can be the fastest.

        incumbent: the fastest candidate of the strategies before.
        progress: called with the number of candidates that are decided, and the number of all.
        """


class PipelinedStrategy:
    """One pipeline of all units, or a pipeline for each unit on ranks of its own."""

    def num_searches(self, problem: PlanningProblem) -> int:
        """Return 1: all numbers of ranks are searched together."""
        return 1

    def search(
        self, evaluator: Evaluator, incumbent: Candidate | None, progress: Progress | None = None
    ) -> PlacementSearch:
        """Allocate ranks to units in every way, and search the layer partitions of these, best first."""
        search = PipelinedSearch(evaluator)
        search.first.find_fastest(progress)
        search.find_roomier(progress)
        return search


class PipelinedSearch:
    """A best-first search over the ways to allocate ranks to units.

    Where no layout of `disaggregated` fits, ranks are allocated again, to meshes that should leave more room. Not so
    where the request limits the step time, which may be why none was found.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        request, budget = evaluator.problem.request, evaluator.budget
        num_wanted = request.num_alternatives + 1
        if request.measure is not None:  # where the best sizes have few layer partitions, as many sizes are run
            num_wanted = max(num_wanted, request.num_measured)
        self.num_simulated = max(budget.partitions.min_simulated, num_wanted)
        allocated = allocate_ranks(evaluator, budget, request.allocation_watch)
        self.first = BestFirstSearch(allocated, evaluator, self.num_simulated)
        self.searches = [self.first]

    @property
    def results(self) -> SearchResults:
        """What was found and rejected, with however much room."""
        return SearchResults().merged(*(search.results() for search in self.searches))

    def name_losers(self) -> None:
        """Search for the best layouts of `unified` and `disaggregated`, whichever lost."""
        for search in self.searches:
            search.search_losing_placements()
        self.find_roomier(None)

    def find_roomier(self, progress: Progress | None) -> None:
        """Search `disaggregated` with more room, as long as it may be used and nothing fits."""
        budget = self.evaluator.budget.meshes
        is_limited = math.isfinite(self.evaluator.problem.request.max_step_s)
        of_placement = [c for c in self.first.candidates if c.placement == "disaggregated"]
        if is_limited or not any(math.isfinite(c.time_lower_bound_s) for c in of_placement):
            return  # not searched to its end, or excluded by the recipe or by what ranks hold at least
        for share in budget.roomier_shares[len(self.searches) - 1 :]:
            if any(search.may_fit("disaggregated") for search in self.searches):
                return
            roomier = allocate_ranks(self.evaluator, self.evaluator.budget, memory_share=share).only("disaggregated")
            self.searches.append(BestFirstSearch(roomier, self.evaluator, self.num_simulated))
            self.searches[-1].find_fastest(progress)


PIPELINED = PipelinedStrategy()
STRATEGIES: Mapping[Placement, PlacementStrategy] = {
    "unified": PIPELINED,
    "disaggregated": PIPELINED,
    "colocated": ColocatedStrategy(),
    "replicated": ReplicatedStrategy(),
}


def has_meshes(choices: Choices, ranks: int, placement: Placement) -> bool:
    """Return whether a placement has meshes that use exactly `ranks` ranks."""
    if placement == "colocated":
        return has_colocated_meshes(choices, ranks)
    if placement == "replicated":
        return has_replicated_mesh(choices, ranks)
    return has_pipelined_meshes(choices, ranks, placement)


class StrategySearches:
    """Searches of every placement of the problem; each strategy knows the best candidate of those before."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.searches: list[PlacementSearch] = []
        placements = evaluator.problem.constraints.placements
        self._strategies = list(dict.fromkeys(STRATEGIES[placement] for placement in placements))

    @property
    def results(self) -> SearchResults:
        """What the searches so far found."""
        return SearchResults().merged(*(search.results for search in self.searches))

    def search(self, max_strategies: int | None = None) -> SearchResults:
        """Search the placements that are left, or those of so many strategies in all; return what was found so far."""
        problem = self.evaluator.problem
        num_searches = [strategy.num_searches(problem) for strategy in self._strategies]
        num_all, report = sum(num_searches), problem.request.progress
        for i, strategy in enumerate(self._strategies[:max_strategies]):
            if i >= len(self.searches):
                progress = progress_of_part(report, sum(num_searches[:i]), num_searches[i], num_all)
                self.searches.append(strategy.search(self.evaluator, self.results.best, progress))
        report_end = progress_of_part(report, 0, num_all, num_all)
        if report_end is not None and len(self.searches) == len(self._strategies):
            report_end(1, 1)
        return self.results

    def find_faster_than(self, step_s: float) -> bool:
        """Search one strategy after another until one has a faster plan; return whether there is one."""
        counts = range(1, len(self._strategies) + 1)
        return any(self.search(max_strategies=count).fastest_s < step_s for count in counts)

    def with_losers(self) -> SearchResults:
        """Return what was found, also the best plan of each placement that lost where the request asks for it."""
        request = self.evaluator.problem.request
        if request.names_losers:
            request.say("looking for the best plans of placements that lost")
            for search in self.searches:
                search.name_losers()
        return self.results


def allocate_ranks(
    evaluator: Evaluator,
    budget: SearchBudget,
    watch: AllocationWatch | None = None,
    memory_share: float = 1.0,
) -> AllocatedCandidates:
    """List the mesh assignments of all placements that are searched, on every number of ranks, with their bounds.

    watch: learns the best allocation of the largest number of ranks, where units may have ranks of their own.
    memory_share: of the ranks' memory, which their meshes are chosen to fit into.
    """
    problem = evaluator.problem
    placements = problem.constraints.placements
    start_s = 0.0 if watch is None else watch.clock()
    listed: list[Candidate] = []
    further: list[Iterator[tuple[float, Candidate]]] = []
    for num_ranks in problem.cluster.rank_counts:
        if "unified" in placements:
            bound = evaluator.time_lower_bound_within(memory_share)
            assignments = unified_assignments(problem.choices, num_ranks)
            listed += (evaluator.enumerated(a).bounded(lower_bound(bound, a)) for a in assignments)
        if "disaggregated" in placements:
            all_of_few, ordered = _disaggregated_candidates(evaluator, num_ranks, memory_share)
            listed += all_of_few
            further.append(ordered)
    ordered = heapq.merge(*further, key=itemgetter(0))
    first = list(islice(ordered, budget.meshes.num_first_assignments))
    if watch is not None:
        seconds = watch.clock() - start_s
        of_few = [(c.time_lower_bound_s, c) for c in listed if c.placement == "disaggregated"]
        on_most = min([*of_few, *first], key=lambda entry: (-entry[1].assignment.ranks, entry[0]), default=None)
        if on_most is not None:
            step_s, best = on_most
            ranks = {unit: mesh.ranks for unit, mesh in best.assignment.meshes.items()}
            bound = evaluator.time_lower_bound_within(memory_share)
            relaxed_s = relaxed_step_s(problem.choices, sum(ranks.values()), bound)
            watch.report(Allocation(ranks, step_s, relaxed_s, seconds))
    return AllocatedCandidates(listed, first, ordered, partial(_near_candidates, evaluator, memory_share))


def possible_assignments(evaluator: Evaluator, choices: Choices, num_ranks: int) -> Iterator[MeshAssignment]:
    """List assignments of `unified` and of `disaggregated`, of these on many ranks only the first; as for a search."""
    yield from unified_assignments(choices, num_ranks)
    budget = evaluator.budget.meshes
    if num_ranks <= budget.max_ranks_to_enumerate_all:
        yield from all_disaggregated(choices, num_ranks, budget)
    else:
        ordered = _ordered_disaggregated(evaluator, choices, num_ranks, 1.0, budget)
        yield from (assignment for _, assignment in islice(ordered, budget.num_first_assignments))


def _disaggregated_candidates(
    evaluator: Evaluator, num_ranks: int, memory_share: float
) -> tuple[list[Candidate], Iterator[tuple[float, Candidate]]]:
    """Return all candidates if ranks are few, else none, and then one after another with their estimated seconds."""
    choices, budget = evaluator.problem.choices, evaluator.budget.meshes
    if num_ranks > budget.max_ranks_to_enumerate_all:
        ordered = _ordered_disaggregated(evaluator, choices, num_ranks, memory_share, budget)
        return [], _with_chunks(evaluator, memory_share, ordered)
    bound = evaluator.time_lower_bound_within(memory_share)
    assignments = all_disaggregated(choices, num_ranks, budget)
    return [evaluator.enumerated(a).bounded(lower_bound(bound, a)) for a in assignments], iter(())


def _near_candidates(
    evaluator: Evaluator, memory_share: float, assignment: MeshAssignment
) -> Iterator[tuple[float, Candidate]]:
    """Yield candidates with this assignment's mesh of the LLM, more of them than the whole order has."""
    choices, budget = evaluator.problem.choices, evaluator.budget.meshes
    beside_llm = {**choices, LLM: choices[LLM].fixed_to(assignment.meshes[LLM])}
    wider = replace(budget, max_assignments_per_llm_mesh=budget.max_near_assignments)
    ordered = _ordered_disaggregated(evaluator, beside_llm, assignment.ranks, memory_share, wider)
    return _with_chunks(evaluator, memory_share, ordered)


def _with_chunks(
    evaluator: Evaluator, memory_share: float, ordered: Iterator[tuple[float, MeshAssignment]]
) -> Iterator[tuple[float, Candidate]]:
    """Yield candidates of assignments, also with encoders in several model chunks where their pipelines fill slowly."""
    choices, budget = evaluator.problem.choices, evaluator.budget.meshes
    bound = evaluator.time_lower_bound_within(memory_share)
    for seconds, assignment in ordered:
        slow_to_fill = units_slow_to_fill(assignment, lower_bound(bound, assignment), bound, budget)
        for variant in with_encoder_chunks(choices, assignment, slow_to_fill):
            yield seconds, evaluator.enumerated(variant).bounded(lower_bound(bound, variant))


def _ordered_disaggregated(
    evaluator: Evaluator, choices: Choices, num_ranks: int, memory_share: float, budget: MeshBudget
) -> Iterator[tuple[float, MeshAssignment]]:
    """Yield assignments with their estimated seconds, which ascend.

    If none may fit, they are those that split units most, so that the planner can say why they do not fit.
    """
    times = evaluator.mesh_times
    bound, ranks_per_node = evaluator.time_lower_bound_within(memory_share), evaluator.problem.hardware.ranks_per_node

    def without_recompute(unit: str, mesh: MeshSize, num_microbatches: int, behind: int) -> float:
        may_fit = bound(unit, mesh, num_microbatches, behind) < math.inf
        return times.filled_seconds(unit, mesh, num_microbatches) if may_fit else math.inf

    # The estimate sees no room in some meshes that fit; where that holds for all, the bound decides.
    for fitting in (evaluator.mesh_time_estimate_within(memory_share), without_recompute):
        estimate = StepEstimate(times.filled_seconds, fitting, times.round_trip)
        ordered = ordered_assignments(choices, num_ranks, estimate, budget, ranks_per_node)
        first = next(ordered, None)
        if first is not None:
            yield first
            yield from ordered
            return
    for assignment in most_split_assignments(choices, num_ranks, budget):
        yield math.inf, assignment


def relaxed_step_s(choices: Choices, num_ranks: int, bound: UnitTimeBound) -> float:
    """Return the least seconds of a step in which units share `num_ranks` as if these were divisible.

    A unit then needs the rank-seconds of its most efficient mesh, whatever its share. Shares in proportion to these are
    optimal: all units take equally long, the sum of their rank-seconds by `num_ranks`. Pipelines fill at no cost.
    """
    rank_seconds = (
        min(bound(unit, mesh, None) * mesh.ranks for mesh in unit_mesh_sizes(choices, unit, num_ranks))
        for unit in choices
    )
    return sum(rank_seconds) / num_ranks
