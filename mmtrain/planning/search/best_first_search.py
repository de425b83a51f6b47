"""Find the fastest layer partition over all mesh assignments, best first: more work on a candidate tightens its bound.

Candidates wait in one queue, ordered by a lower bound of their step time. Where they are too many to list, the next one
joins the queue when its estimate says that it may lead it. The candidate with the least bound gets the next piece of
work and goes back into the queue with a tighter bound (`NodeStage`): arithmetic, the exact optimum of a dynamic program
for each layer chain, the memory that its anchor partition needs, an estimate of the anchor. The anchor of a chain is
the partition whose slowest chunk is done soonest (OmniBal, arXiv 2407.20761). Then partitions are estimated: all of
them if the whole search has few, else those near the anchor, so that the search is heuristic. The partition with the
least estimate is fitted into memory and simulated. Candidates that cannot beat the fastest one cost no more work.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import product
from typing import NamedTuple

from mmtrain.planning.artifact.plan import AS_FAST_RATIO, Placement
from mmtrain.planning.evaluate.evaluator import Evaluator, RecomputeToFit
from mmtrain.planning.layer_costs.layer_partition import (
    ChainPartition,
    FloatArray,
    LayerChain,
    all_chain_partitions,
    chain_time_lower_bound,
    jittered_partitions,
    partition_time_lower_bound,
    whole_root,
)
from mmtrain.planning.layer_costs.span_recompute import SpanRecompute
from mmtrain.planning.search.meshes_in_line import MeshesInLine
from mmtrain.planning.space.candidate import (
    EQUAL_STEP_TIME_RATIO,
    Candidate,
    LayerPartition,
    MeshAssignment,
    Rejected,
    SearchResults,
    rank_candidates,
)
from mmtrain.planning.space.problem import Progress
from mmtrain.program.ir.graph import LLM, StageId

CUT_SHORT_LABEL = "next in line"  # of the first assignment that the budget left out


class AllocatedCandidates(NamedTuple):
    """Mesh assignments with lower bounds: some to begin with, and others, as many as are asked for."""

    listed: Sequence[Candidate]
    first: Sequence[tuple[float, Candidate]] = ()  # those with the least estimated seconds
    further: Iterator[tuple[float, Candidate]] = iter(())  # and the others, in the order of theirs
    # Returns more of those with the LLM's mesh of an assignment, in the order of theirs too.
    near: "Callable[[MeshAssignment], Iterator[tuple[float, Candidate]]] | None" = None

    def only(self, placement: Placement) -> "AllocatedCandidates":
        """Return those of one placement that may fit; all but the listed ones are `disaggregated`."""
        may_fit = [c for c in self.listed if c.placement == placement and math.isfinite(c.time_lower_bound_s)]
        first = [entry for entry in self.first if math.isfinite(entry[1].time_lower_bound_s)]
        return self._replace(listed=may_fit, first=first)


class NodeStage(Enum):
    """What is known of a node of the queue; each stage takes more work to reach than the one before."""

    START = 0  # the mesh assignment's bound, by arithmetic alone
    CHAINS_BOUNDED = 1  # the best partition of each layer chain
    MEMORY_BOUNDED = 2  # what the anchor must recompute to fit
    ANCHOR_ESTIMATED = 3
    PARTITION_ESTIMATED = 4  # the node is one partition, which waits for the simulator


@dataclass(frozen=True)
class AnchorFit:
    """What a candidate must recompute to fit into memory, and its anchor with that."""

    recompute: RecomputeToFit
    anchor: LayerPartition


@dataclass(order=True)
class SearchNode:
    """A candidate in the queue; the one with the least bound comes first."""

    bound_s: float
    number: int = field(init=False, default=0)  # breaks ties: first queued, first served
    candidate: Candidate = field(compare=False)
    stage: NodeStage = field(compare=False, default=NodeStage.START)
    chains: tuple[LayerChain, ...] = field(compare=False, default=())  # from CHAINS_BOUNDED on
    # From MEMORY_BOUNDED on, if not every partition is tried.
    fit: AnchorFit | None = field(compare=False, default=None)

    @property
    def recompute(self) -> RecomputeToFit:
        """The recomputation that spans of its layers need to fit; known from MEMORY_BOUNDED on."""
        assert self.fit is not None, f"node {self.number} is {self.stage.name}, not MEMORY_BOUNDED"
        return self.fit.recompute

    @property
    def anchor(self) -> LayerPartition:
        """The partition that others are sought around; from MEMORY_BOUNDED on."""
        assert self.fit is not None, f"node {self.number} is {self.stage.name}, not MEMORY_BOUNDED"
        return self.fit.anchor


class BestFirstSearch:
    """Simulates layouts in the order of their lower bounds until no other can be faster than the best one found.

    Each placement that lost may then be searched to its end too, so that the ranking shows its best layout.

    Args:
        allocated: mesh assignments with lower bounds.
        evaluator: estimates, fits and simulates them.
        num_simulated: simulate at least this many if they fit, so that the ranking has figures to show.
    """

    def __init__(self, allocated: AllocatedCandidates, evaluator: Evaluator, num_simulated: int) -> None:
        self.evaluator = evaluator
        self.budget = evaluator.budget.partitions
        self.allocated = allocated
        self.searched_near: set[int] = set()  # ids of candidates
        self.candidates = [*allocated.listed, *(candidate for _, candidate in allocated.first)]
        self.mesh_estimates = {candidate.id: seconds for seconds, candidate in allocated.first}
        self.discount = self.budget.mesh_estimate_discount  # of the next estimate, see `_next_that_may_be_fastest`
        self.in_line = MeshesInLine(allocated.further)
        self.num_simulated = num_simulated
        self.max_step_s = evaluator.problem.request.max_step_s
        self.rejected: list[Rejected] = []
        # By id of the candidate, that is by mesh assignment:
        self.best: dict[int, Candidate] = {}  # the partition with the fastest simulated step
        self.misfits: dict[int, Rejected] = {}  # the partition that needs least memory, of those that do not fit
        self.runner_ups: dict[int, list[Candidate]] = {}  # partitions with the next best estimates
        self.queue: list[SearchNode] = []
        self.put_off: list[SearchNode] = []  # slower than the fastest; they wait for a search of their placement alone
        self.num_slow = 0  # of these, the first sampled batch of so many was simulated
        self.num_tried = 0  # layouts that were simulated, on one batch at least
        self.num_queued = 0
        self.max_estimated = self.budget.max_assignments  # of those that come one after another
        self.next_in_line: tuple[float, Candidate] | None = None  # the first of them that the budget left out
        self.searched: Callable[[Candidate], bool] | None = None  # who competes; None: all do
        self.slack = 1.0  # by which a bound must lie below the fastest step to be worth a simulation
        assignments = (candidate.assignment for candidate in self.candidates)
        self.is_exhaustive = self._num_partitions(assignments) <= self.budget.max_partitions_to_try_all
        self.num_replica_groups = None if self.is_exhaustive else self.budget.num_estimated_replica_groups
        self.estimator = evaluator.estimator(self.num_replica_groups)
        for candidate in self.candidates:
            self._start(candidate)

    def find_fastest(self, progress: Progress | None = None) -> None:
        """Search until no candidate can change the choice.

        progress: called with the number of candidates that are decided, and the number of all.
        """
        num_looked_at = 0
        for node in self.undecided():
            if progress is not None:
                progress(num_looked_at, len(self.candidates))
            num_looked_at += node.stage is NodeStage.START
            self.advance(node)
        if not self.is_exhaustive:
            self.simulate_runner_ups()
        self.search_simpler()
        if progress is not None:
            progress(1, 1)

    def results(self) -> SearchResults:
        """Rank what was simulated, and say why all else was not."""
        rejected = (*self.rejected, *self.unsearched(), *self.left_out())
        return SearchResults(rank_candidates(self.best.values()), rejected, tuple(self.candidates))

    def may_fit(self, placement: Placement) -> bool:
        """Return whether a layout of a placement fits, or waits and may fit."""
        waiting = (node.candidate for node in (*self.queue, *self.put_off) if math.isfinite(node.bound_s))
        return any(candidate.placement == placement for candidate in (*self.best.values(), *waiting))

    def undecided(self) -> Iterator[SearchNode]:
        """Take from the queue what may change the choice: from the least bound on, then near the fastest assignment."""
        while True:
            while self.has_undecided():
                yield heapq.heappop(self.queue)
            if not self.take_near_fastest():
                return

    def take_near_fastest(self) -> bool:
        """Go on with the assignments near the fastest one; return False where that has been done."""
        own = [candidate for candidate in self.best.values() if candidate.placement == "disaggregated"]
        fastest = min(own, key=lambda candidate: candidate.step_time_s, default=None)
        if self.allocated.near is None or fastest is None or fastest.id in self.searched_near:
            return False
        self.searched_near.add(fastest.id)
        known = {str(candidate.assignment) for candidate in self.candidates}
        near = self.allocated.near(fastest.assignment)
        self.in_line.go_on_with(entry for entry in near if str(entry[1].assignment) not in known)
        self.discount = self.budget.near_estimate_discount
        self.max_estimated = len(self.mesh_estimates) + self.evaluator.budget.meshes.max_near_assignments
        return True

    def has_undecided(self) -> bool:
        """Return whether a candidate waits that may change the choice, after those whose turn it is have joined."""
        while (entry := self._next_that_may_be_fastest()) is not None:
            seconds, candidate = entry
            self.in_line.take(entry)
            self.mesh_estimates[candidate.id] = seconds
            self.candidates.append(candidate)
            self._start(candidate)
        return bool(self.queue) and not self.is_decided()

    def _next_that_may_be_fastest(self) -> tuple[float, Candidate] | None:
        """Return the next candidate that is not listed if it may lead the queue, and be faster than what is known."""
        first_s = self.queue[0].bound_s if self.queue else math.inf
        entry = self.in_line.first_within(min(first_s, self._fastest_s()) / self.discount)
        if entry is not None and len(self.mesh_estimates) >= self.max_estimated:
            if not self.searched_near:
                self.next_in_line = entry
            return None
        return entry

    def _start(self, candidate: Candidate) -> None:
        tp_group = candidate.assignment.tp_group_across_nodes(self.evaluator.problem.hardware.ranks_per_node)
        if tp_group is not None:
            self.rejected.append(
                Rejected(candidate, f"the tensor-parallel group of ranks {tp_group} lies on two nodes")
            )
        else:
            self._push(SearchNode(0.0 if self.is_exhaustive else candidate.time_lower_bound_s, candidate))

    def is_decided(self) -> bool:
        """Return whether no candidate in the queue can change the choice."""
        first = self.queue[0]
        if first.bound_s > self.max_step_s or self.num_tried == self.budget.max_simulated:
            return True
        if math.isinf(first.bound_s):  # nothing that waits can fit; a few are tried to explain why
            return bool(self.best) or len(self.misfits) >= self.evaluator.budget.explanations.max_misfits_to_try
        slack = EQUAL_STEP_TIME_RATIO if self.is_exhaustive else 1.0
        has_enough = len(self.best) + self.num_slow >= self.num_simulated
        return has_enough and first.bound_s > self._fastest_s() * slack

    def search_simpler(self) -> None:
        """Search simpler candidates whose step may take at most `AS_FAST_RATIO` times the fastest."""
        if not self.best:
            return
        fastest = min(self.best.values(), key=lambda candidate: candidate.step_time_s)
        limit_s = fastest.step_time_s * AS_FAST_RATIO
        for level in range(fastest.assignment.complexity_level):
            self._search_alone(partial(_has_complexity_level, level), limit_s)

    def search_losing_placements(self) -> None:
        """Search the placements that lost until no other layout of the same placement can be faster than its best.

        Where that is far behind, until none can be much faster.
        """
        for placement in sorted({node.candidate.placement for node in (*self.queue, *self.put_off)}):
            self._search_alone(partial(_has_placement, placement), far_ratio=self.budget.far_loser_ratio)

    def _search_alone(
        self, is_searched: Callable[[Candidate], bool], limit_s: float = math.inf, far_ratio: float = math.inf
    ) -> None:
        """Search some of the candidates by themselves, to their end or up to bounds of `limit_s` seconds.

        far_ratio: those whose best step takes more times as long as the fastest are searched less closely.
        """
        fastest_s = min((candidate.step_time_s for candidate in self.best.values()), default=math.inf)
        waiting = [*self.queue, *self.put_off]
        others = [node for node in waiting if not is_searched(node.candidate)]
        self.queue, self.put_off = [node for node in waiting if is_searched(node.candidate)], []
        self.searched = is_searched
        heapq.heapify(self.queue)
        while self.queue and math.isfinite(self.queue[0].bound_s):
            own_s = self._fastest_s()
            self.slack = self.budget.far_loser_slack if own_s > fastest_s * far_ratio else 1.0
            if self.queue[0].bound_s * self.slack > min(own_s, limit_s):
                break
            self.advance(heapq.heappop(self.queue))
        self.queue += others
        self.searched, self.slack = None, 1.0

    def _num_partitions(self, assignments: Iterable[MeshAssignment]) -> int:
        """Count the layer partitions of all assignments, up to the largest number that is tried in full."""
        layers = {unit.name: len(unit.layers) for unit in self.evaluator.problem.shape.units}
        total = 0
        for assignment in assignments:
            if assignment.placement == "unified":
                mesh = assignment.meshes[LLM]
                total += math.comb(sum(layers.values()) - 1, mesh.pp * mesh.vpp - 1)
            else:
                meshes = assignment.meshes.items()
                total += math.prod(math.comb(layers[unit] - 1, mesh.pp * mesh.vpp - 1) for unit, mesh in meshes)
            if total > self.budget.max_partitions_to_try_all:
                break
        return total

    def _push(self, node: SearchNode) -> None:
        self.num_queued += 1
        node.number = self.num_queued
        heapq.heappush(self.queue, node)

    def advance(self, node: SearchNode) -> None:
        """Put the next piece of work into the node with the least bound, and queue what comes of it."""
        if node.stage is NodeStage.ANCHOR_ESTIMATED:
            partition = self._estimate_near_anchor(node)
            if partition is None:
                return
            if partition.bound_s * self.slack >= self._fastest_s():
                self._push(partition)
                return
            node = partition  # the sooner a fast one is known, the fewer others are looked at
        if node.stage is NodeStage.PARTITION_ESTIMATED and self._only_adds_a_figure(node):
            self.put_off.append(node)
        elif node.stage is NodeStage.PARTITION_ESTIMATED:
            self._simulate(node.bound_s, node.candidate)
        elif node.stage is NodeStage.START:
            self._bound_by_chains(node)
        elif self.is_exhaustive:
            self._estimate_all_partitions(node)
        elif node.stage is NodeStage.CHAINS_BOUNDED:
            self._bound_by_memory(node)
        else:
            self._estimate_anchor(node)

    def _bound_by_chains(self, node: SearchNode) -> None:
        """Tighten the bound by the best partition of each layer chain."""
        chains = self.evaluator.layer_chains(node.candidate)
        if not all(chain.has_partition for chain in chains):
            reason = "its layers cannot be cut into so many stages under parallel.*.pp and layers_per_chunk"
            self.rejected.append(Rejected(node.candidate, reason))
            return
        bound_s = max(node.bound_s, *map(chain_time_lower_bound, chains))
        self._push(SearchNode(bound_s, node.candidate.bounded(bound_s), NodeStage.CHAINS_BOUNDED, chains))

    def _bound_by_memory(self, node: SearchNode) -> None:
        """Tighten the bound by what the anchor must recompute to fit.

        The new bound never exceeds the anchor's estimate, and takes less time to compute.
        """
        recompute = self.evaluator.recompute_to_fit(node.candidate)
        anchors = []
        seconds = []
        for chain, of_chain in zip(node.chains, recompute, strict=True):
            anchors.append(chain.anchor_within(of_chain) or chain.anchor or ())
            seconds.append(partition_time_lower_bound(chain, anchors[-1], of_chain))
        # Infinite where a chunk alone does not fit; others on its rank may leave it room.
        least_s = max(filter(math.isfinite, seconds), default=0.0)
        bound_s = max(node.bound_s, least_s * self.budget.anchor_estimate_discount)
        fit = AnchorFit(recompute, tuple(anchors))
        candidate = node.candidate.bounded(bound_s)
        self._push(SearchNode(bound_s, candidate, NodeStage.MEMORY_BOUNDED, node.chains, fit))

    def _estimate_anchor(self, node: SearchNode) -> None:
        """Estimate the anchor alone, so that candidates far behind wait until the others are decided."""
        estimate_s = self.evaluator.estimate_anchor(node.candidate, node.anchor, self.num_replica_groups)
        mesh_estimate_s = self.mesh_estimates.get(node.candidate.id)
        if mesh_estimate_s is not None:
            self.in_line.learn(node.candidate, estimate_s / mesh_estimate_s)
        bound_s = max(node.bound_s, estimate_s * self.budget.anchor_estimate_discount)
        candidate = node.candidate.bounded(bound_s)
        self._push(SearchNode(bound_s, candidate, NodeStage.ANCHOR_ESTIMATED, node.chains, node.fit))

    def _estimate_all_partitions(self, node: SearchNode) -> None:
        """Let every partition of a candidate wait for the simulator, with its estimate as bound."""
        recompute = self.evaluator.recompute_to_fit(node.candidate)
        options = [all_chain_partitions(chain) for chain in node.chains]
        if not all(options):
            self._reject_for_memory(node)
            return
        partitions = list(product(*options))
        estimates = self._estimate(node, partitions, recompute).tolist()
        for partition, estimate_s in zip(partitions, estimates, strict=True):
            estimated = node.candidate.partitioned(partition).estimated(estimate_s)
            bound_s = max(estimate_s, node.bound_s)
            self._push(SearchNode(bound_s, estimated, NodeStage.PARTITION_ESTIMATED, node.chains))

    def _estimate_near_anchor(self, node: SearchNode) -> SearchNode | None:
        """Estimate partitions near the anchor; return a node of the best, or None if none of them fits."""
        options = [
            self._partitions_near_anchor(chain, of_chain)
            for chain, of_chain in zip(node.chains, node.recompute, strict=True)
        ]
        if not all(options):
            self._reject_for_memory(node)
            return None
        estimates = self._descend(node, options)
        by_estimate = sorted(estimates, key=lambda partition: estimates[partition])
        ranked = [
            node.candidate.partitioned(partition).estimated(estimates[partition])
            for partition in by_estimate[: 1 + self.budget.num_runner_ups]
        ]
        self.runner_ups[node.candidate.id] = ranked[1:]
        bound_s = max(estimates[by_estimate[0]], node.bound_s)
        return SearchNode(bound_s, ranked[0], NodeStage.PARTITION_ESTIMATED, node.chains)

    def _descend(self, node: SearchNode, options: Sequence[Sequence[ChainPartition]]) -> dict[LayerPartition, float]:
        """Estimate partitions near the anchor, then near the best of these, until none is better."""
        estimates: dict[LayerPartition, float] = {}
        best_s = math.inf
        for _ in range(self.budget.max_jitter_rounds):
            combined = _combine_best(options, self.budget.max_jitters_per_assignment)
            new = [partition for partition in combined if partition not in estimates]
            if new:
                estimates |= zip(new, self._estimate(node, new, node.recompute).tolist(), strict=True)
            best = min(estimates, key=lambda partition: estimates[partition])
            if estimates[best] >= best_s:
                break
            best_s = estimates[best]
            if best_s > self._fastest_s() * self.budget.max_estimate_ratio:
                break
            options = [
                jittered_partitions(chain, around, of_chain, self.budget) or [around]
                for chain, around, of_chain in zip(node.chains, best, node.recompute, strict=True)
            ]
        return estimates

    def _estimate(
        self, node: SearchNode, partitions: Sequence[LayerPartition], recompute: RecomputeToFit
    ) -> FloatArray:
        return self.estimator.estimate(node.candidate.assignment, node.chains, partitions, recompute)

    def _in_flight(self, candidate: Candidate, partition: LayerPartition) -> Mapping[StageId, int]:
        return self.estimator.in_flight(candidate.assignment, partition)

    def _fastest(self) -> Candidate | None:
        """Return the fastest simulated candidate; during `_search_alone` only among those that it searches."""
        found = (c for c in self.best.values() if self.searched is None or self.searched(c))
        return min(found, key=lambda candidate: candidate.step_time_s, default=None)

    def _fastest_s(self) -> float:
        """Return the step time of the fastest, or the longest that is allowed."""
        fastest = self._fastest()
        return self.max_step_s if fastest is None else fastest.step_time_s

    def _partitions_near_anchor(self, chain: LayerChain, recompute: SpanRecompute | None) -> list[ChainPartition]:
        """Return the partitions of one chain that are worth estimating."""
        around = chain.anchor_within(recompute)
        if around is not None:
            return jittered_partitions(chain, around, recompute, self.budget)
        if chain.vpp > 1 and chain.anchor is not None:  # one chunk of a rank may leave room for another
            return jittered_partitions(chain, chain.anchor, None, self.budget)
        return []

    def _only_adds_a_figure(self, node: SearchNode) -> bool:
        """Return whether a partition has very many passes to simulate, and would only be one more to rank."""
        has_many = node.candidate.assignment.passes_of_step > self.budget.max_passes_of_ranked
        limit_s = self.budget.many_passes_ratio * self._fastest_s()
        return has_many and not self.is_exhaustive and bool(self.best) and node.bound_s > limit_s

    def _simulate(self, bound_s: float, candidate: Candidate) -> None:
        """Fit an estimated candidate and simulate it, unless another partition of its meshes is as fast.

        One that the first sampled batch shows to be slower than another is put off, with the step of that as its bound.
        """
        known = self.best.get(candidate.id)
        if known is not None and known.step_time_s <= bound_s:
            return
        fitted = self._try_to_fit(candidate)
        if fitted is None:
            if not self.is_exhaustive:
                self._push_runner_up(candidate.id)
            if not any(node.candidate.id == candidate.id for node in self.queue):
                self._reject_misfit(candidate.id)
            return
        fastest, limit_s = self._fastest(), math.inf
        if fastest is not None and not self.is_exhaustive:
            limit_s = fastest.first_batch_step_s * self.budget.max_first_batch_ratio
        simulated = self.evaluator.simulate_unless_slow(fitted, limit_s)
        self.num_tried += 1
        if simulated is None:
            assert fastest is not None
            bound_s = max(bound_s, fastest.step_time_s)
            self.put_off.append(SearchNode(bound_s, candidate, NodeStage.PARTITION_ESTIMATED))
            self.num_slow += 1
        elif known is None or simulated.step_time_s < known.step_time_s:
            self.best[candidate.id] = simulated

    def simulate_runner_ups(self) -> None:
        """Simulate the partitions with the next best estimates of the meshes found fastest."""
        if not self.best:
            return
        fastest = min(self.best, key=lambda number: self.best[number].step_time_s)
        for candidate in self.runner_ups.pop(fastest, []):  # taken out, so that none that does not fit is queued again
            assert candidate.estimated_step_s is not None
            self._simulate(candidate.estimated_step_s, candidate)

    def _push_runner_up(self, number: int) -> None:
        """Queue the next partition of a mesh assignment whose best one does not fit."""
        if self.runner_ups.get(number):
            candidate = self.runner_ups[number].pop(0)
            assert candidate.estimated_step_s is not None
            self._push(SearchNode(candidate.estimated_step_s, candidate, NodeStage.PARTITION_ESTIMATED))

    def _try_to_fit(self, candidate: Candidate) -> Candidate | None:
        assert candidate.partition is not None
        fitted = self.evaluator.fit(candidate, self._in_flight(candidate, candidate.partition))
        if isinstance(fitted, Candidate):
            return fitted
        known = self.misfits.get(candidate.id)
        if known is None or (fitted.need_gib or 0.0) < (known.need_gib or 0.0):
            self.misfits[candidate.id] = fitted
        return None

    def _reject_for_memory(self, node: SearchNode) -> None:
        """Reject meshes without a partition that fits; the reason is the memory that the anchor needs."""
        self._try_to_fit(node.candidate.partitioned(tuple(chain.anchor or () for chain in node.chains)))
        self._reject_misfit(node.candidate.id)

    def _reject_misfit(self, number: int) -> None:
        if number not in self.best and number in self.misfits:
            self.rejected.append(self.misfits[number])

    def left_out(self) -> Iterator[Rejected]:
        """Say so if the budget ended the search while other assignments might be faster."""
        if self.next_in_line is not None:
            seconds, candidate = self.next_in_line
            reason = (
                f"not looked at, like those behind it: the search ended after {self.budget.max_assignments} sizes; a "
                f"first estimate says {seconds:.3g} s"
            )
            yield Rejected(candidate, reason, label=CUT_SHORT_LABEL)

    def unsearched(self) -> Iterator[Rejected]:
        """Reject what still waits: it cannot be faster, or cannot fit."""
        fastest_s = self._fastest_s()
        explained = set(self.best)
        max_explained = len(explained) + self.evaluator.budget.explanations.max_unsearched
        for node in sorted([*self.queue, *self.put_off]):
            if node.candidate.id in explained or len(explained) >= max_explained:
                continue
            explained.add(node.candidate.id)
            if math.isinf(node.bound_s):
                reason = "does not fit: even the least that its ranks must hold is too much"
            else:
                slowest = _slowest_units(node)
                reason = f"at least {node.bound_s / fastest_s:.2f}x slower: {slowest} cannot be done sooner"
            yield Rejected(node.candidate, reason)


def _has_complexity_level(level: int, candidate: Candidate) -> bool:
    return candidate.assignment.complexity_level == level


def _has_placement(placement: Placement, candidate: Candidate) -> bool:
    return candidate.placement == placement


def _slowest_units(node: SearchNode) -> str:
    """Name the units whose work makes the bound, as far as is known."""
    if not node.chains:
        return "its work"
    return " and ".join(max(node.chains, key=chain_time_lower_bound).units)


def _combine_best(options: Sequence[Sequence[ChainPartition]], limit: int) -> list[LayerPartition]:
    """Combine the first partitions of each chain into at most `limit` partitions of all."""
    num_of_chain = max(1, whole_root(limit, len(options)))
    return list(product(*(partitions[:num_of_chain] for partitions in options)))
