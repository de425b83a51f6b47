"""Which layer partition of which mesh assignment is fastest: best-first search by bounds that grow tighter with work.

A candidate waits in one queue with a lower bound of its step time: arithmetic first, then the exact optimum of a
dynamic program over the partitions of each layer chain, then an estimate of its anchor partition. When its turn comes,
its partitions are estimated: all of them if the whole search has few, else those near the anchor. A partition whose
estimate comes first is fitted into memory and simulated. Candidates that cannot beat the fastest one are never looked
at.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from mmtrain.planning.artifact.plan import AS_FAST_RATIO, Placement
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_partition import (
    ChainPartition,
    FloatArray,
    LayerChain,
    all_chain_partitions,
    anchor_partition,
    chain_time_lower_bound,
    in_flight_by_chunk,
    jittered_partitions,
    layout_graph,
    partition_time_lower_bound,
    partitioned_layout,
    recompute_to_fit,
)
from mmtrain.planning.layer_costs.span_recompute import SpanRecompute
from mmtrain.planning.space.candidate import (
    EQUAL_STEP_TIME_RATIO,
    Candidate,
    CandidateStage,
    LayerPartition,
    MeshAssignment,
    Rejected,
    SearchResults,
    rank_candidates,
)
from mmtrain.planning.space.search_progress import Progress
from mmtrain.program.ir.graph import LLM, StageId

RecomputeToFit = list[SpanRecompute | None]  # by chain, see `recompute_to_fit`; None where the anchor needs none


def best_first_search(
    candidates: Sequence[Candidate], evaluator: Evaluator, num_simulated: int, progress: Progress | None = None
) -> SearchResults:
    """Simulate layouts in the order of their lower bounds until no other can be faster than the best one found.

    Then, if losers are named, each other placement is searched to its own end, so that the ranking shows its best
    layout and not one that was met on the way.

    Args:
        candidates: mesh assignments with lower bounds.
        evaluator: estimates, fits and simulates them.
        num_simulated: at least so many of them are simulated, if so many fit, so that the ranking has figures to show.
        progress: called with the number of candidates that were looked at or are settled, of how many.
    """
    return _Search(evaluator, num_simulated, progress).run(candidates)


@dataclass(order=True)
class SearchNode:
    """A candidate in the queue; the one with the least bound comes first."""

    bound_s: float
    number: int  # decides between equal bounds: what waited first
    candidate: Candidate = field(compare=False)
    chains: tuple[LayerChain, ...] | None = field(compare=False, default=None)
    fit: "AnchorFit | None" = field(compare=False, default=None)
    is_anchor_estimated: bool = field(compare=False, default=False)


@dataclass(frozen=True)
class AnchorFit:
    """What a candidate must recompute to fit into memory, and its anchor with that."""

    recompute: RecomputeToFit
    anchor: LayerPartition


class _Search:
    def __init__(self, evaluator: Evaluator, num_simulated: int, progress: Progress | None) -> None:
        self.evaluator = evaluator
        self.budget = evaluator.budget.partitions
        self.num_simulated = num_simulated
        self.max_step_s = evaluator.problem.request.max_step_s
        self.progress = progress
        self.rejected: list[Rejected] = []
        # By id of the candidate, that is by mesh assignment:
        self.best: dict[int, Candidate] = {}  # the partition with the fastest simulated step
        self.misfits: dict[int, Rejected] = {}  # the partition that needs least memory, of those that do not fit
        self.runner_ups: dict[int, list[Candidate]] = {}  # partitions with the next best estimates
        self.queue: list[SearchNode] = []
        self.num_queued = 0
        self.is_exhaustive = False
        self.searched: Callable[[Candidate], bool] | None = None  # who competes; None: all do
        self.estimator = evaluator.estimator(self.budget.num_estimated_replica_groups)

    def run(self, candidates: Sequence[Candidate]) -> SearchResults:
        """Work the queue off."""
        assignments = (candidate.assignment for candidate in candidates)
        self.is_exhaustive = self._num_partitions(assignments) <= self.budget.max_partitions_to_try_all
        if self.is_exhaustive:
            self.estimator = self.evaluator.estimator(None)
        for candidate in candidates:
            self._start(candidate)
        num_looked_at = 0
        while self.queue and not self._is_decided(self.queue[0]):
            node = heapq.heappop(self.queue)
            self._report(num_looked_at, len(candidates))
            num_looked_at += node.chains is None and node.candidate.stage < CandidateStage.PARTITIONED
            self._advance(node)
        if not self.is_exhaustive:
            self._simulate_runner_ups()
        self._search_simpler()
        if self.evaluator.problem.request.names_losers:
            self._search_placements()
        self._reject_unsearched()
        self._report(len(candidates), len(candidates))
        return SearchResults(rank_candidates(self.best.values()), tuple(self.rejected))

    def _start(self, candidate: Candidate) -> None:
        tp_group = candidate.assignment.tp_group_across_nodes(self.evaluator.problem.hardware.ranks_per_node)
        if tp_group is not None:
            self.rejected.append(
                Rejected(candidate, f"the tensor-parallel group of ranks {tp_group} lies on two nodes")
            )
        else:
            self._push(0.0 if self.is_exhaustive else candidate.time_lower_bound_s, candidate)

    def _report(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)

    def _is_decided(self, first: SearchNode) -> bool:
        """Return whether no candidate in the queue can change the choice."""
        if first.bound_s > self.max_step_s:
            return True
        if math.isinf(first.bound_s):  # nothing that waits can fit; a few are tried to explain why
            return bool(self.best) or len(self.misfits) >= self.evaluator.budget.explanations.max_misfits_to_try
        slack = EQUAL_STEP_TIME_RATIO if self.is_exhaustive else 1.0
        return len(self.best) >= self.num_simulated and first.bound_s > self._fastest_s() * slack

    def _search_simpler(self) -> None:
        """Search what is simpler than the fastest candidate, as far as it may be as fast within 1%."""
        if not self.best:
            return
        fastest = min(self.best.values(), key=lambda candidate: candidate.step_time_s)
        limit_s = fastest.step_time_s * AS_FAST_RATIO
        for level in range(fastest.assignment.complexity_level):
            self._search_to_end(partial(_has_complexity_level, level), limit_s)

    def _search_placements(self) -> None:
        """Search the placements that lost until no other layout of the same placement can be faster than its best."""
        for placement in sorted({node.candidate.placement for node in self.queue}):
            self._search_to_end(partial(_has_placement, placement))

    def _search_to_end(self, is_searched: Callable[[Candidate], bool], limit_s: float = math.inf) -> None:
        """Search some of the candidates by themselves, to their end or up to bounds of `limit_s` seconds."""
        others = [node for node in self.queue if not is_searched(node.candidate)]
        self.queue = [node for node in self.queue if is_searched(node.candidate)]
        self.searched = is_searched
        heapq.heapify(self.queue)
        while self.queue and math.isfinite(self.queue[0].bound_s):
            if self.queue[0].bound_s > min(self._fastest_s(), limit_s):
                break
            self._advance(heapq.heappop(self.queue))
        self.queue += others
        self.searched = None

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

    def _push(
        self,
        bound_s: float,
        candidate: Candidate,
        chains: tuple[LayerChain, ...] | None = None,
        fit: AnchorFit | None = None,
        is_anchor_estimated: bool = False,
    ) -> None:
        self.num_queued += 1
        heapq.heappush(self.queue, SearchNode(bound_s, self.num_queued, candidate, chains, fit, is_anchor_estimated))

    def _advance(self, node: SearchNode) -> None:
        """Put the next piece of work into the candidate with the least bound."""
        if node.candidate.stage == CandidateStage.ESTIMATED:
            self._simulate(node.bound_s, node.candidate)
        elif node.chains is None:
            self._bound_by_chains(node)
        elif self.is_exhaustive:
            self._estimate_all_partitions(node, node.chains)
        elif node.fit is None:
            self._bound_by_memory(node, node.chains)
        elif node.is_anchor_estimated:
            self._estimate_near_anchor(node, node.chains, node.fit.recompute)
        else:
            self._estimate_anchor(node, node.chains, node.fit)

    def _bound_by_chains(self, node: SearchNode) -> None:
        """Tighten the bound by the best partition of each layer chain."""
        chains = self.evaluator.layer_chains(node.candidate)
        if any(chain.anchor is None for chain in chains):
            reason = "its layers cannot be cut into so many stages under parallel.*.pp"
            self.rejected.append(Rejected(node.candidate, reason))
            return
        bound_s = max(node.bound_s, *map(chain_time_lower_bound, chains))
        self._push(bound_s, node.candidate.bounded(bound_s), chains)

    def _bound_by_memory(self, node: SearchNode, chains: tuple[LayerChain, ...]) -> None:
        """Tighten the bound by what the anchor must recompute to fit.

        It is at most what the anchor's estimate will be, which takes longer to work out.
        """
        recompute = self._recompute_to_fit(node.candidate, chains)
        anchors = []
        seconds = []
        for chain, of_chain in zip(chains, recompute, strict=True):
            anchors.append(anchor_partition(chain, of_chain) or chain.anchor or ())
            seconds.append(partition_time_lower_bound(chain, anchors[-1], of_chain))
        # Infinite where a chunk alone does not fit; others on its rank may leave it room.
        least_s = max(filter(math.isfinite, seconds), default=0.0)
        bound_s = max(node.bound_s, least_s * self.budget.anchor_estimate_discount)
        fit = AnchorFit(recompute, tuple(anchors))
        self._push(bound_s, node.candidate.bounded(bound_s), chains, fit)

    def _estimate_anchor(self, node: SearchNode, chains: tuple[LayerChain, ...], fit: AnchorFit) -> None:
        """Estimate the anchor alone, so that candidates far behind wait until the others are settled."""
        estimate_s = float(self._estimate(node.candidate, chains, [fit.anchor], fit.recompute)[0])
        bound_s = max(node.bound_s, estimate_s * self.budget.anchor_estimate_discount)
        self._push(bound_s, node.candidate.bounded(bound_s), chains, fit, is_anchor_estimated=True)

    def _estimate_all_partitions(self, node: SearchNode, chains: tuple[LayerChain, ...]) -> None:
        """Let every partition of a candidate wait for the simulator, with its estimate as bound."""
        recompute = self._recompute_to_fit(node.candidate, chains)
        options = [all_chain_partitions(chain) for chain in chains]
        if not all(options):
            self._reject_for_memory(node.candidate, chains)
            return
        partitions = list(product(*options))
        estimates = self._estimate(node.candidate, chains, partitions, recompute).tolist()
        for partition, estimate_s in zip(partitions, estimates, strict=True):
            estimated = node.candidate.partitioned(partition).estimated(estimate_s)
            self._push(max(estimate_s, node.bound_s), estimated, chains)

    def _estimate_near_anchor(
        self, node: SearchNode, chains: tuple[LayerChain, ...], recompute: RecomputeToFit
    ) -> None:
        """Estimate partitions near the anchor; simulate the best, or let it wait for the simulator."""
        options = [
            self._partitions_near_anchor(chain, of_chain) for chain, of_chain in zip(chains, recompute, strict=True)
        ]
        if not all(options):
            self._reject_for_memory(node.candidate, chains)
            return
        estimates = self._descend(node.candidate, chains, options, recompute)
        by_estimate = sorted(estimates, key=lambda partition: estimates[partition])
        ranked = [
            node.candidate.partitioned(partition).estimated(estimates[partition])
            for partition in by_estimate[: 1 + self.budget.num_runner_ups]
        ]
        self.runner_ups[node.candidate.id] = ranked[1:]
        bound_s = max(estimates[by_estimate[0]], node.bound_s)
        if bound_s < self._fastest_s():  # the sooner a fast one is known, the fewer others are looked at
            self._simulate(bound_s, ranked[0])
        else:
            self._push(bound_s, ranked[0], chains)

    def _descend(
        self,
        candidate: Candidate,
        chains: Sequence[LayerChain],
        options: Sequence[Sequence[ChainPartition]],
        recompute: RecomputeToFit,
    ) -> dict[LayerPartition, float]:
        """Estimate partitions near the anchor, then near the best of these, until none is better."""
        estimates: dict[LayerPartition, float] = {}
        best_s = math.inf
        for _ in range(self.budget.max_jitter_rounds):
            combined = _combine_best(options, self.budget.max_jitters_per_assignment)
            new = [partition for partition in combined if partition not in estimates]
            if new:
                estimates |= zip(new, self._estimate(candidate, chains, new, recompute).tolist(), strict=True)
            best = min(estimates, key=lambda partition: estimates[partition])
            if estimates[best] >= best_s:
                break
            best_s = estimates[best]
            if best_s > self._fastest_s() * self.budget.max_estimate_ratio:
                break
            options = [
                jittered_partitions(chain, around, of_chain, self.budget) or [around]
                for chain, around, of_chain in zip(chains, best, recompute, strict=True)
            ]
        return estimates

    def _estimate(
        self,
        candidate: Candidate,
        chains: Sequence[LayerChain],
        partitions: Sequence[LayerPartition],
        recompute: RecomputeToFit,
    ) -> FloatArray:
        return self.estimator.estimate(candidate.assignment, chains, partitions, recompute)

    def _in_flight(self, candidate: Candidate, partition: LayerPartition) -> Mapping[StageId, int]:
        return self.estimator.in_flight(candidate.assignment, partition)

    def _fastest_s(self) -> float:
        """Return the seconds of the fastest step so far; while some are searched by themselves, of these."""
        return min(
            (
                candidate.step_time_s
                for candidate in self.best.values()
                if self.searched is None or self.searched(candidate)
            ),
            default=self.max_step_s,
        )

    def _recompute_to_fit(self, candidate: Candidate, chains: Sequence[LayerChain]) -> RecomputeToFit:
        """Return the recomputation that spans of layers need, where the anchor does not fit without any."""
        layer_costs, memory_bytes = self.evaluator.layer_costs, self.evaluator.memory_bytes
        anchor = tuple(chain.anchor or () for chain in chains)
        num_in_flight = self._in_flight(candidate, anchor)
        graph = layout_graph(partitioned_layout(candidate.assignment, layer_costs, anchor), layer_costs)
        memory = layer_costs.memory(graph, num_in_flight)
        if max(rank.total for rank in memory.values()) <= memory_bytes:
            return [None] * len(chains)
        return [recompute_to_fit(chain, in_flight_by_chunk(chain, num_in_flight), memory_bytes) for chain in chains]

    def _partitions_near_anchor(self, chain: LayerChain, recompute: SpanRecompute | None) -> list[ChainPartition]:
        """Return the partitions of one chain that are worth estimating."""
        around = anchor_partition(chain, recompute)
        if around is not None:
            return jittered_partitions(chain, around, recompute, self.budget)
        if chain.vpp > 1 and chain.anchor is not None:  # one chunk of a rank may leave room for another
            return jittered_partitions(chain, chain.anchor, None, self.budget)
        return []

    def _simulate(self, bound_s: float, candidate: Candidate) -> None:
        """Fit an estimated candidate and simulate it, unless another partition of its meshes is as fast."""
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
        simulated = self.evaluator.simulate(fitted)
        if known is None or simulated.step_time_s < known.step_time_s:
            self.best[candidate.id] = simulated

    def _simulate_runner_ups(self) -> None:
        """Simulate the partitions with the next best estimates of the meshes found fastest."""
        if not self.best:
            return
        fastest = min(self.best, key=lambda number: self.best[number].step_time_s)
        for candidate in list(self.runner_ups.get(fastest, [])):
            assert candidate.estimated_step_s is not None
            self._simulate(candidate.estimated_step_s, candidate)

    def _push_runner_up(self, number: int) -> None:
        """Queue the next partition of a mesh assignment whose best one does not fit."""
        if self.runner_ups.get(number):
            candidate = self.runner_ups[number].pop(0)
            assert candidate.estimated_step_s is not None
            self._push(candidate.estimated_step_s, candidate)

    def _try_to_fit(self, candidate: Candidate) -> Candidate | None:
        assert candidate.partition is not None
        fitted = self.evaluator.fit(candidate, self._in_flight(candidate, candidate.partition))
        if isinstance(fitted, Candidate):
            return fitted
        known = self.misfits.get(candidate.id)
        if known is None or (fitted.need_gib or 0.0) < (known.need_gib or 0.0):
            self.misfits[candidate.id] = fitted
        return None

    def _reject_for_memory(self, candidate: Candidate, chains: Sequence[LayerChain]) -> None:
        """Reject meshes of which no partition fits, with what the anchor needs."""
        self._try_to_fit(candidate.partitioned(tuple(chain.anchor or () for chain in chains)))
        self._reject_misfit(candidate.id)

    def _reject_misfit(self, number: int) -> None:
        if number not in self.best and number in self.misfits:
            self.rejected.append(self.misfits[number])

    def _reject_unsearched(self) -> None:
        """Reject what still waits: it cannot be faster, or cannot fit."""
        fastest_s = self._fastest_s()
        explained = set(self.best)
        for node in sorted(self.queue):
            is_enough = len(explained) >= self.evaluator.budget.explanations.max_unsearched
            if node.candidate.id in explained or is_enough:
                continue
            explained.add(node.candidate.id)
            if math.isinf(node.bound_s):
                reason = "does not fit: what its ranks must hold at least is too much"
            else:
                slowest = _slowest_units(node)
                reason = f"at least {node.bound_s / fastest_s:.2f}x slower: {slowest} cannot be done sooner"
            self.rejected.append(Rejected(node.candidate, reason))


def _has_complexity_level(level: int, candidate: Candidate) -> bool:
    return candidate.assignment.complexity_level == level


def _has_placement(placement: Placement, candidate: Candidate) -> bool:
    return candidate.placement == placement


def _slowest_units(node: SearchNode) -> str:
    """Name the units whose work makes the bound, as far as is known."""
    if node.chains is None:
        return "its work"
    return " and ".join(max(node.chains, key=chain_time_lower_bound).units)


def _combine_best(options: Sequence[Sequence[ChainPartition]], limit: int) -> list[LayerPartition]:
    """Combine the first partitions of each chain into at most `limit` partitions of all."""
    num_of_chain = max(1, int(limit ** (1 / len(options))))
    return list(product(*(partitions[:num_of_chain] for partitions in options)))
