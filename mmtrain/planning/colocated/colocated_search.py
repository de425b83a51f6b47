"""The fastest `colocated` candidates: meshes in the order of their lower bounds, with the best order of encoders."""

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from itertools import islice, zip_longest

from mmtrain.costs.hardware import GIB
from mmtrain.planning.artifact.layout import Layout, MeshSize, split_tp_group
from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.planning.colocated.colocated_layouts import (
    colocated_layout,
    llm_mesh_sizes,
    merged_microbatch_counts,
    other_mesh_sizes,
    with_recompute,
)
from mmtrain.planning.colocated.encoder_order import max_ahead_choices, plan_encoder_order
from mmtrain.planning.colocated.llm_alone import min_in_flight, simulate_llm_alone
from mmtrain.planning.colocated.stage_kernels import compute_share
from mmtrain.planning.colocated.tp_bubbles import fill_tp_bubbles
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import busiest_rank, runs_alike
from mmtrain.planning.layer_costs.layer_costs import BACKWARD, FORWARD, LayerCosts
from mmtrain.planning.layer_costs.layer_partition import layout_graph
from mmtrain.planning.space.budget import ColocatedBudget
from mmtrain.planning.space.candidate import (
    EQUAL_STEP_TIME_RATIO,
    Candidate,
    DecidedSearch,
    MeshAssignment,
    Rejected,
    SearchResults,
    partition_of,
)
from mmtrain.planning.space.constraints import UnitChoices
from mmtrain.planning.space.problem import PlanningProblem, Progress, progress_of_part
from mmtrain.planning.space.sample_batches import batch_split_of, num_microbatches_of
from mmtrain.program.ir.graph import LLM, StageGraph, StageId

RecomputeShares = Mapping[str, float]  # by unit: share of each stage's layers that is recomputed
SLOW_FIRST_BATCH = "slower on the first sampled batch than another colocated layout"


class ColocatedStrategy:
    """Encoders on the LLM's ranks, with their layers in the bubbles of its pipeline (Optimus, arXiv 2408.03505)."""

    def num_searches(self, problem: PlanningProblem) -> int:
        """Return the number of rank counts: each is searched by itself."""
        return len(problem.cluster.rank_counts)

    def search(
        self, evaluator: Evaluator, incumbent: Candidate | None, progress: Progress | None = None
    ) -> DecidedSearch:
        """Search every number of ranks by itself; where losers are named, what is slower than the incumbent too."""
        counts = evaluator.problem.cluster.rank_counts
        of_counts = [
            search_colocated(evaluator, num_ranks, progress_of_part(progress, part, 1, len(counts)), incumbent)
            for part, num_ranks in enumerate(counts)
        ]
        return DecidedSearch(SearchResults().merged(*of_counts))


def search_colocated(
    evaluator: Evaluator, num_ranks: int, progress: Progress | None = None, incumbent: Candidate | None = None
) -> SearchResults:
    """Schedule and simulate the colocated layouts on `num_ranks` ranks that may be the fastest.

    Layouts are tried in the order of their lower bounds (`_by_bound`). Of each, the encoders' layers are put into the
    LLM's bubbles, and that order is kept if it is faster than the coarse one. Some of them are tried again with fewer,
    larger microbatches of the encoders; then pieces of layers are put into the gaps inside the LLM's layers
    (`tp_bubbles`). Where no order fits into memory, encoders are kept closer to the LLM, which then waits for them.
    Where nothing fits otherwise and the recipe leaves it open, layers are recomputed, those of other units before the
    LLM's. A generator's passes lie between the LLM's (`generator_order`); bubbles of both together are then the
    encoders'.

    incumbent: the fastest candidate of other placements. Layouts that cannot be faster, or are far behind it, get
        rougher figures, and none if no loser is named. If all that were simulated are far behind it, fewer are tried.
    """
    if len(evaluator.problem.shape.units) < 2:
        return SearchResults()
    budget = evaluator.budget.colocated
    rejected: list[Rejected] = []
    simulated: list[Candidate] = []
    slower, too_slow = list[Candidate](), list[Candidate]()  # scheduled and not simulated; not scheduled
    levels = _recompute_levels(evaluator.layer_costs, budget.recompute_shares)
    bound = _StepBound(evaluator.layer_costs)
    rivals = [incumbent] if incumbent is not None and not evaluator.problem.request.names_losers else []
    max_step_s = evaluator.problem.request.max_step_s
    effort = _Effort(budget)

    def limit_s() -> float:
        return min((found.step_time_s for found in (*rivals, *simulated)), default=max_step_s) * EQUAL_STEP_TIME_RATIO

    attempts = (_Attempt(candidate, evaluator, levels) for candidate in _enumerate(evaluator, num_ranks, bound))
    for attempt in _by_bound(attempts, evaluator, bound, limit_s):
        candidate = attempt.candidate
        if candidate.time_lower_bound_s > limit_s():
            too_slow.append(candidate)
            continue
        if effort.is_spent(bound.is_far_behind(simulated, incumbent, budget.far_ratio)):
            break
        if progress is not None:
            progress(min(effort.num_tried, budget.min_tried_assignments), budget.min_tried_assignments)
        too_large = _too_large(candidate, evaluator)
        if too_large is not None and (simulated or incumbent is not None):  # else say exactly what it needs
            rejected.append(too_large)
            continue
        far_ratio = budget.far_ratio / bound.llm_compute_share(candidate.assignment)
        limits = _Limits.beside([*rivals, *simulated], incumbent, far_ratio, max_step_s)
        outcome = attempt.run(limits)
        effort.add(attempt)
        if isinstance(outcome, Candidate):
            simulated.append(outcome)
        elif outcome is not None:
            rejected.append(outcome)
            if attempt.num_scheduled and outcome.need_gib is None:
                slower.append(candidate.bounded(limits.llm_alone_s))
    rival_s = math.inf if incumbent is None else incumbent.step_time_s * EQUAL_STEP_TIME_RATIO
    if not bound.is_far_behind(simulated, incumbent, budget.far_ratio):
        simulated = _with_merged_microbatches(simulated, [*slower, *too_slow], evaluator, levels, bound, rival_s)
    rejected += [_too_slow(candidate, limit_s()) for candidate in too_slow[:1]]
    return SearchResults(fill_tp_bubbles(simulated, evaluator, rival_s), tuple(rejected))


def _too_slow(candidate: Candidate, limit_s: float) -> Rejected:
    """Reject a candidate whose work takes longer than a step may."""
    ratio = candidate.time_lower_bound_s / limit_s
    return Rejected(candidate, f"at least {ratio:.2f}x slower: its work cannot be done sooner")


def _too_large(candidate: Candidate, evaluator: Evaluator) -> Rejected | None:
    """Reject a candidate whose LLM alone cannot fit, which is known before the batches are laid out for it."""
    assignment = candidate.assignment
    least_bytes = evaluator.memory_lower_bound(LLM, assignment.meshes[LLM], assignment.num_microbatches[LLM])
    if least_bytes <= evaluator.memory_bytes:
        return None
    reason = f"too large: a rank needs at least {least_bytes / GIB:.3g} of {evaluator.memory_bytes / GIB:.3g} GiB"
    return Rejected(candidate, reason, least_bytes / GIB)


def _with_merged_microbatches(
    simulated: Sequence[Candidate],
    slower: Sequence[Candidate],
    evaluator: Evaluator,
    levels: list[RecomputeShares],
    bound: "_StepBound",
    rival_s: float,
) -> list[Candidate]:
    """Return the simulated candidates, and those with fewer microbatches of other units that may become the fastest.

    Pieces of layers in the gaps of the LLM (`tp_bubbles`) may make these shorter, at most by the share of the gaps, and
    never shorter than the LLM alone.

    slower: candidates that were not simulated, with the seconds that they take at least as their bounds.
    rival_s: the step time of another placement; a layout whose LLM alone, or the busiest of whose ranks, takes longer
        is left as it is.
    """
    budget = evaluator.budget.colocated
    found = list(simulated)
    num_in_vain, effort = 0, _Effort(budget)
    for merged in islice(_by_merged_estimate(simulated, slower, evaluator, bound), budget.max_merged_layouts):
        if num_in_vain == budget.max_merged_in_vain or effort.num_passes >= budget.max_merged_passes:
            break
        fastest = min(found, key=lambda candidate: candidate.step_time_s, default=None)
        best_s = rival_s if fastest is None else min(fastest.step_time_s, rival_s)
        if merged.time_lower_bound_s >= best_s:
            continue
        llm_compute_share = bound.llm_compute_share(merged.assignment)
        with_gaps_s, far_ratio = best_s / llm_compute_share, budget.far_ratio / llm_compute_share
        first_batch_s = math.inf if fastest is None else far_ratio * fastest.first_batch_step_s
        limits = _Limits(best_s, first_batch_s, budget.far_ratio * with_gaps_s)
        attempt = _Attempt(merged, evaluator, levels)
        outcome = attempt.run(limits)
        effort.add(attempt)
        if not isinstance(outcome, Candidate):
            continue
        is_fastest = fastest is None or outcome.step_time_s < fastest.step_time_s
        num_in_vain = 0 if is_fastest else num_in_vain + 1
        if outcome.step_time_s < with_gaps_s:
            found.append(outcome)
    return found


def _by_merged_estimate(
    simulated: Sequence[Candidate], slower: Sequence[Candidate], evaluator: Evaluator, bound: "_StepBound"
) -> Iterator[Candidate]:
    """Yield assignments with fewer microbatches, first those whose steps, changed as their bounds change, are shortest.

    One of the simulated ones and one of the others take turns: of those, too little is known to compare them. Those
    with very many passes come last.
    """
    max_passes = evaluator.budget.colocated.max_passes_to_come_first
    orders = []
    for candidates in (simulated, slower):
        estimated = []
        for candidate in candidates:
            seconds = candidate.time_lower_bound_s if candidate.simulation is None else candidate.step_time_s
            seconds_per_bound = seconds / bound.seconds(candidate.assignment)
            for merged in _merged(candidate.assignment, evaluator, bound):
                has_many = merged.assignment.passes_of_step > max_passes
                estimated.append((has_many, seconds_per_bound * merged.time_lower_bound_s, merged.id, merged))
        orders.append([merged for *_, merged in sorted(estimated)])
    yield from (merged for turn in zip_longest(*orders) for merged in turn if merged is not None)


def _merged(assignment: MeshAssignment, evaluator: Evaluator, bound: "_StepBound") -> Iterator[Candidate]:
    """Yield the assignment with fewer microbatches of its other units, with the lower bounds of these steps."""
    meshes = assignment.meshes
    others = {unit: mesh for unit, mesh in meshes.items() if unit != LLM}
    ratios = evaluator.budget.meshes.merged_microbatches
    for counts in merged_microbatch_counts(evaluator.problem.choices, others, meshes[LLM], ratios):
        split = evaluator.layer_costs.batch_split({unit: mesh.dp for unit, mesh in meshes.items()}, counts)
        merged = MeshAssignment("colocated", meshes, num_microbatches_of(split))
        yield evaluator.enumerated(merged).bounded(bound.seconds(merged))


def has_colocated_meshes(choices: Mapping[str, UnitChoices], num_ranks: int) -> bool:
    """Return whether there are colocated meshes on `num_ranks` ranks."""
    if len(choices) < 2:
        return False
    meshes = (others for llm in llm_mesh_sizes(choices, num_ranks) for others in other_mesh_sizes(choices, llm))
    return next(meshes, None) is not None


@dataclass(frozen=True)
class _Limits:
    """Seconds above which no more is done for a layout."""

    llm_alone_s: float  # of the LLM alone: the layout is not scheduled
    first_batch_s: float  # of the first sampled batch: no other one is simulated
    planned_s: float  # of the planned order: the coarse one is not simulated

    @classmethod
    def beside(
        cls, simulated: Sequence[Candidate], incumbent: Candidate | None, far_ratio: float, max_step_s: float
    ) -> "_Limits":
        """Return the limits where some layouts are simulated: those that are far behind get rougher figures.

        max_step_s: slower layouts are of no use.
        """
        incumbent_s = max_step_s if incumbent is None else min(incumbent.step_time_s, max_step_s)
        if not simulated:
            return cls(max_step_s, math.inf, far_ratio * incumbent_s)
        best = min(simulated, key=lambda candidate: candidate.step_time_s)
        fastest_s = best.step_time_s
        alone_s = min(fastest_s * EQUAL_STEP_TIME_RATIO, max_step_s)
        return cls(alone_s, far_ratio * best.first_batch_step_s, far_ratio * min(fastest_s, incumbent_s))


@dataclass
class _Attempt:
    """The attempt to make one mesh assignment run: with more and more recompute until some order fits into memory."""

    candidate: Candidate
    evaluator: Evaluator
    levels: list[RecomputeShares]
    num_scheduled: int = field(default=0, init=False)
    _layouts: dict[int, Layout | Rejected | None] = field(default_factory=dict, init=False)

    def layout_at(self, level: int) -> Layout | Rejected | None:
        """Return the layout with what this level recomputes, or why no order of it can run.

        None where the layers are too few.
        """
        if level not in self._layouts:
            self._layouts[level] = self._lay_out(self.levels[level])
        return self._layouts[level]

    def _lay_out(self, recompute: RecomputeShares) -> Layout | Rejected | None:
        """Return the layout with a share of its layers recomputed, see `layout_at`."""
        layer_costs, hardware = self.evaluator.layer_costs, self.evaluator.problem.hardware
        if self._divided is None:
            return None
        tp_group = split_tp_group(self._divided.units, hardware.ranks_per_node)
        if tp_group is not None:
            return Rejected(self.candidate, f"the tensor-parallel group of ranks {tp_group} lies on two nodes")
        layout = with_recompute(self._divided, layer_costs, recompute)
        least_memory = layer_costs.memory(layout_graph(layout, layer_costs), self._least_in_flight)
        if max(memory.total for memory in least_memory.values()) > self.evaluator.memory_bytes:
            return self.evaluator.misfit(self.candidate, least_memory)
        return layout

    @cached_property
    def _divided(self) -> Layout | None:
        """Every unit in stages, whatever is recomputed; None if the layers are too few."""
        assignment, choices = self.candidate.assignment, self.evaluator.problem.choices
        others = {unit: mesh for unit, mesh in assignment.meshes.items() if unit != LLM}
        divisions = {name: unit.layers_per_chunk for name, unit in choices.items()}
        llm, num_microbatches = assignment.meshes[LLM], assignment.num_microbatches
        return colocated_layout(self.evaluator.layer_costs, others, llm, num_microbatches, divisions)

    @cached_property
    def _least_in_flight(self) -> Mapping[StageId, int]:
        """The fewest microbatches that each stage must hold, whatever is recomputed."""
        assert self._divided is not None
        return min_in_flight(layout_graph(self._divided, self.evaluator.layer_costs))

    @cached_property
    def first_level(self) -> int | None:
        """The least recompute under which some order can run; None where there is none."""
        last = len(self.levels) - 1
        if isinstance(self.layout_at(0), Layout):
            return 0
        if not isinstance(self.layout_at(last), Layout):
            return None
        # More recompute never needs more memory, so the level is found by halving.
        return bisect_left(range(last + 1), True, key=lambda level: isinstance(self.layout_at(level), Layout))

    def tighten_bound(self) -> None:
        """Let the candidate's bound know what must be recomputed at least, for which its layers are divided."""
        layout = None if self.first_level is None else self.layout_at(self.first_level)
        if isinstance(layout, Layout):
            layer_costs = self.evaluator.layer_costs
            busiest_s = _least_seconds_of_busiest_rank(layout_graph(layout, layer_costs), layer_costs)
            self.candidate = self.candidate.bounded(busiest_s)

    def run(self, limits: _Limits) -> Candidate | Rejected | None:
        """Return the fastest order under the least recompute that fits; None if the layers are too few for the mesh."""
        if self.first_level is None:
            least_memory = self.layout_at(len(self.levels) - 1)
            return None if isinstance(least_memory, Layout) else least_memory
        outcome: Candidate | Rejected | None = None
        for level in range(self.first_level, len(self.levels)):
            layout = self.layout_at(level)
            if not isinstance(layout, Layout):
                outcome = layout
            else:
                self.num_scheduled += 1
                outcome = _schedule_and_simulate(self.candidate, layout, self.evaluator, limits)
            if not isinstance(outcome, Rejected) or outcome.need_gib is None:
                break  # it runs, or more memory would not help
        return outcome


@dataclass
class _Effort:
    """What was scheduled so far."""

    budget: ColocatedBudget
    num_tried: int = 0
    num_passes: int = 0

    def add(self, attempt: _Attempt) -> None:
        """Count an attempt that has run."""
        self.num_tried += attempt.num_scheduled > 0
        self.num_passes += attempt.candidate.assignment.passes_of_step * attempt.num_scheduled

    def is_spent(self, is_far_behind: bool) -> bool:
        """Return whether enough was tried; where all of it is far behind another placement, less is enough."""
        has_tried = self.num_tried >= self.budget.min_tried_assignments
        has_passes = self.num_passes >= self.budget.max_scheduled_passes
        return (has_tried and has_passes) or (is_far_behind and (has_tried or has_passes))


class _Knowledge(IntEnum):
    """What the bound of a waiting mesh assignment knows."""

    LLM_ALONE = 0
    ALL_UNITS = 1
    RECOMPUTE = 2


def _by_bound(
    attempts: Iterable[_Attempt], evaluator: Evaluator, bound: "_StepBound", max_step_s: Callable[[], float]
) -> Iterator[_Attempt]:
    """Yield colocated mesh assignments in the order of the lower bounds of their steps, and some above a limit.

    With fewer microbatches of other units, those above may come below it. One is yielded at least, to name a loser.

    Each bound knows more than the one before and takes longer: the LLM alone; the work of all units; and what memory
    makes them recompute, for which layers are divided. That is done for `max_laid_out` assignments, those with the
    least bounds, and no others are tried then. Bounds that differ by less than `bound_class_ratio` say little about
    which is faster, so of those the ones come first that are scheduled soonest. One with very many passes
    waits for the next class of bounds.
    """
    waiting: list[tuple[float, int, int, int, _Knowledge, _Attempt]] = []
    budget = evaluator.budget.colocated
    least_s = math.inf

    def push(attempt: _Attempt, knowledge: _Knowledge) -> None:
        order = _search_order(attempt.candidate)
        if knowledge is _Knowledge.RECOMPUTE:
            num_passes = attempt.candidate.assignment.passes_of_step
            num_classes = math.floor(math.log(order[0] / least_s, budget.bound_class_ratio)) + 1
            num_classes += num_passes > budget.max_passes_to_come_first
            order = (least_s * budget.bound_class_ratio**num_classes, num_passes, order[2])
        heapq.heappush(waiting, (*order, attempt.candidate.id, knowledge, attempt))

    for attempt in attempts:
        push(attempt, _Knowledge.LLM_ALONE)
    num_laid_out = num_slow = 0
    while waiting:
        *_, knowledge, attempt = heapq.heappop(waiting)
        if attempt.candidate.time_lower_bound_s > max_step_s():
            if not num_slow or (num_slow < budget.max_laid_out and knowledge is not _Knowledge.LLM_ALONE):
                num_slow += 1
                yield attempt
        elif knowledge is _Knowledge.RECOMPUTE:
            yield attempt
        elif knowledge is _Knowledge.LLM_ALONE:
            attempt.candidate = attempt.candidate.bounded(bound.seconds(attempt.candidate.assignment))
            push(attempt, _Knowledge.ALL_UNITS)
        elif _too_large(attempt.candidate, evaluator) is not None:
            yield attempt
        elif num_laid_out < budget.max_laid_out:
            least_s = min(least_s, attempt.candidate.time_lower_bound_s)
            attempt.tighten_bound()
            push(attempt, _Knowledge.RECOMPUTE)
            num_laid_out += attempt.first_level is not None


def _search_order(candidate: Candidate) -> tuple[float, int, int]:
    llm = candidate.assignment.meshes[LLM]
    return candidate.time_lower_bound_s, llm.pp, llm.tp


def _enumerate(evaluator: Evaluator, num_ranks: int, bound: "_StepBound") -> Iterator[Candidate]:
    """List every colocated mesh assignment with the lower bound of the LLM's step alone."""
    layer_costs, choices = evaluator.layer_costs, evaluator.problem.choices
    colocated_vpp = evaluator.budget.meshes.colocated_vpp
    for llm_mesh in llm_mesh_sizes(choices, num_ranks):
        for llm in _with_chunks(llm_mesh, choices[LLM], colocated_vpp):
            for others in other_mesh_sizes(choices, llm_mesh):
                meshes = {unit.name: llm if unit.name == LLM else others[unit.name] for unit in layer_costs.shape.units}
                split = layer_costs.batch_split({unit: mesh.dp for unit, mesh in meshes.items()})
                assignment = MeshAssignment("colocated", meshes, num_microbatches_of(split))
                yield evaluator.enumerated(assignment).bounded(bound.llm_seconds(assignment))


def _with_chunks(mesh: MeshSize, unit: UnitChoices, open_vpp: tuple[int, ...]) -> Iterator[MeshSize]:
    """List the mesh with the numbers of model chunks that its layers allow, or with the number the recipe fixes."""
    fixed_vpp = unit.fixed_vpp_on(mesh.pp)
    for vpp in open_vpp if fixed_vpp is None else (fixed_vpp,):
        if vpp == 1 or (mesh.pp > 1 and mesh.pp * vpp <= unit.num_layers):
            yield replace(mesh, vpp=vpp)


@dataclass
class _StepBound:
    """The least seconds of a colocated step, for even microbatches and without messages.

    All of it follows from what the sampled batches hold in total: there are thousands of meshes, and to lay the batches
    out for each takes far longer than the few layouts that are simulated.
    """

    layer_costs: LayerCosts
    # Seconds of another unit's work in a step outside collectives, if one TP group did all of it; by unit, tp and the
    # microbatches of all its replicas.
    other_work: dict[tuple[str, int, int], float] = field(default_factory=dict)
    llm_compute_shares: dict[int, float] = field(default_factory=dict)  # by tp

    def seconds(self, assignment: MeshAssignment) -> float:
        """Return the seconds of the LLM's pipeline alone, or of one rank's share of all work if that is more."""
        others = {unit: mesh for unit, mesh in assignment.meshes.items() if unit != LLM}
        llm_rank_s = self._llm_rank_seconds(assignment) * self.llm_compute_share(assignment)
        other_rank_s = sum(
            self._other_work(unit, mesh.tp, mesh.dp * assignment.num_microbatches[unit]) / (mesh.pp * mesh.dp)
            for unit, mesh in others.items()
        )
        return float(max(self.llm_seconds(assignment), llm_rank_s + other_rank_s))

    def is_far_behind(self, simulated: Sequence[Candidate], incumbent: Candidate | None, ratio: float) -> bool:
        """Return whether all simulated layouts take over `ratio` times as long as the incumbent, gaps filled or not."""
        ends_s = [found.step_time_s * self.llm_compute_share(found.assignment) for found in simulated]
        return incumbent is not None and min(ends_s, default=0.0) > ratio * incumbent.step_time_s

    def llm_seconds(self, assignment: MeshAssignment) -> float:
        """Return the seconds of the LLM's pipeline alone."""
        llm, num_llm = assignment.meshes[LLM], assignment.num_microbatches[LLM]
        return self._llm_rank_seconds(assignment) * (1 + (llm.pp - 1) / llm.vpp / num_llm)

    def _llm_rank_seconds(self, assignment: MeshAssignment) -> float:
        """Return the seconds of one rank's share of the LLM's work."""
        llm, num_llm = assignment.meshes[LLM], assignment.num_microbatches[LLM]
        times = self.layer_costs.unit_times(LLM, llm.tp, self.layer_costs.loads.undivided)
        return float(times.mean[:, [FORWARD, BACKWARD]].sum() / llm.pp * num_llm)

    def _other_work(self, unit: str, tp: int, num_microbatches: int) -> float:
        key = (unit, tp, num_microbatches)
        if key not in self.other_work:
            num_filled, load = self.layer_costs.loads.even_microbatches(unit, num_microbatches)
            share = compute_share(self.layer_costs, unit, tp, load)
            self.other_work[key] = num_filled * self.layer_costs.seconds_of(unit, tp, load) * share
        return self.other_work[key]

    def llm_compute_share(self, assignment: MeshAssignment) -> float:
        """Return the share of the LLM's passes in which its rank cannot compute anything else."""
        tp = assignment.meshes[LLM].tp
        if tp not in self.llm_compute_shares:
            load = self.layer_costs.loads.of_unit(LLM, self.layer_costs.loads.undivided).mean()
            self.llm_compute_shares[tp] = compute_share(self.layer_costs, LLM, tp, load)
        return self.llm_compute_shares[tp]


def _recompute_levels(layer_costs: LayerCosts, shares: tuple[float, ...]) -> list[RecomputeShares]:
    """List what to recompute where the recipe leaves it open: more and more of other units' layers, then the LLM's."""
    free = [unit for unit, mode in layer_costs.recompute.items() if mode == "auto"]
    of_others = [{unit: share for unit in free if unit != LLM} for share in shares]
    of_llm = [of_others[-1] | {LLM: share} for share in shares[1:] if LLM in free]
    return [*of_others, *of_llm]


def _schedule_and_simulate(
    candidate: Candidate, layout: Layout, evaluator: Evaluator, limits: _Limits
) -> Candidate | Rejected:
    """Return the faster of the planned and the coarse order that fit; or why none fits or can be fast enough.

    What the coarse order holds is counted only where the planned one does not fit, or may be slower.
    """
    layer_costs, hardware = evaluator.layer_costs, evaluator.problem.hardware
    graph = layout_graph(layout, layer_costs)
    llm_alone = simulate_llm_alone(graph, layer_costs, hardware)
    if llm_alone.step_time_s > limits.llm_alone_s:
        is_recomputed = any(unit.num_recomputed for unit in layout.units.values())
        cause = " when layers are recomputed to fit" if is_recomputed else ""
        slower = f"at least {llm_alone.step_time_s / limits.llm_alone_s:.2f}x slower"
        without = "the LLM alone takes" if graph.encoders else "the LLM and its generator take"
        return Rejected(candidate, f"{slower}: {without} that long{cause}")
    busiest_s = _least_seconds_of_busiest_rank(graph, layer_costs)
    if busiest_s > limits.llm_alone_s:
        slower = f"at least {busiest_s / limits.llm_alone_s:.2f}x slower"
        return Rejected(candidate, f"{slower}: its busiest rank computes that long")
    candidate = candidate.partitioned(partition_of(layout))
    num_microbatches = dict(layout.num_microbatches)
    coarse = SchedulePlan(kind="coarse", num_microbatches=num_microbatches)
    coarse_bound_s = llm_alone.step_time_s + _encoder_seconds_of_first_rank(graph, layer_costs)
    coarse_bound_s *= evaluator.budget.colocated.coarse_bound_share
    coarse_bound_s = max(coarse_bound_s, llm_alone.step_time_s * EQUAL_STEP_TIME_RATIO)
    for max_ahead in max_ahead_choices(candidate.assignment.meshes[LLM].pp):
        order = plan_encoder_order(graph, layer_costs, hardware, max_ahead=max_ahead, llm_alone=llm_alone)
        planned = SchedulePlan(kind="explicit", num_microbatches=num_microbatches, order=order)
        outcome = evaluator.fit_schedule(candidate, layout, planned)
        if isinstance(outcome, Candidate):
            fastest = evaluator.simulate_unless_slow(outcome, limits.first_batch_s)
            if fastest is None:
                return Rejected(outcome, SLOW_FIRST_BATCH)
            may_lose = max_ahead is None and coarse_bound_s < fastest.step_time_s <= limits.planned_s
            is_other_order = may_lose and not runs_alike(graph, planned, coarse, hardware)
            fitted = evaluator.fit_schedule(candidate, layout, coarse) if is_other_order else None
            others = [evaluator.simulate(fitted)] if isinstance(fitted, Candidate) else []
            return min(fastest, *others, key=lambda simulated: simulated.step_time_s) if others else fastest
        if max_ahead is None:
            outcome = evaluator.fit_schedule(candidate, layout, coarse)
            if isinstance(outcome, Candidate):
                return evaluator.simulate_unless_slow(outcome, limits.first_batch_s) or Rejected(
                    outcome, SLOW_FIRST_BATCH
                )
    assert isinstance(outcome, Rejected)
    return outcome


def _least_seconds_of_busiest_rank(graph: StageGraph, layer_costs: LayerCosts) -> float:
    """Return what some rank computes in a step, which no order shortens, mean over the batches.

    Pieces of other layers may run in the gaps that collectives leave inside layers, so those do not count.
    """
    split = batch_split_of(graph)
    shares = (
        compute_share(layer_costs, mesh.unit, mesh.tp, layer_costs.loads.of_unit(mesh.unit, split).mean())
        for mesh in graph.meshes
        if mesh.tp > 1
    )
    _, busiest_s = busiest_rank(graph, layer_costs.stage_seconds(graph))
    return busiest_s * min(shares, default=1.0)


def _encoder_seconds_of_first_rank(graph: StageGraph, layer_costs: LayerCosts) -> float:
    """Return what the LLM's first rank computes for encoders in a step, mean over replicas and batches.

    In the coarse order the LLM starts there after all forwards of encoders, and their backwards follow its last one.
    """
    first_rank = graph.stage(StageId(LLM, 0)).tp_groups[0][0]
    seconds = layer_costs.stage_seconds(graph)
    encoder_stages = [sid for sid, _ in graph.held_by(first_rank) if sid.unit in graph.encoders]
    passes = [seconds[sid].forward + seconds[sid].backward for sid in encoder_stages]
    return sum(float(of_stage.sum(axis=2).mean()) for of_stage in passes)
