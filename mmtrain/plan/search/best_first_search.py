"""Which layouts there are, and which of them is fastest: best-first, by bounds that grow tighter as work is put in.

A assignment waits with a bound on all its cuts: arithmetic, then the exact optimum of a dynamic program. When its turn
comes its cuts are rated, all of them if the whole search has few, else those near the anchor; and a cut whose rating
comes first is fitted into memory and simulated. What cannot be faster than the best one found is never looked at.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from mmtrain.costs import Hardware
from mmtrain.plan.artifact.plan import Alternative
from mmtrain.plan.estimate.evaluate import Candidate, evaluate_layout
from mmtrain.plan.estimate.layer_costs import LayerCosts
from mmtrain.plan.estimate.memory_fit import FittedLayout, MemoryMisfit, fit_memory
from mmtrain.plan.estimate.step_time_estimator import StepTimeEstimator
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.plan.search.layer_partition import (
    FloatArray,
    LayerChain,
    LayerPartition,
    all_chain_partitions,
    anchor_partition,
    chain_time_lower_bound,
    in_flight_by_chunk,
    jittered_partitions,
    layer_chains,
    layout_graph,
    partitioned_layout,
    recompute_to_fit,
)
from mmtrain.plan.search.mesh_enumeration import MeshAssignment, split_tp_group_of
from mmtrain.program.ir.graph import LLM

EQUAL_STEP_TIME_RATIO = 1.001  # step times within this factor count as equal; the simpler layout then wins
MAX_PARTITIONS_TO_TRY_ALL = 2_000  # cuts of all assignments together up to which all are rated, and compared in full
MAX_JITTERS_PER_ASSIGNMENT = 160  # cuts that are rated of each assignment otherwise
MAX_JITTER_ROUNDS = 8  # of rating what lies near the best so far
MAX_ESTIMATE_RATIO = 1.05  # of the fastest step found: what rates above is not looked at more closely
ANCHOR_ESTIMATE_DISCOUNT = (
    0.95  # of its anchor's rating: what a assignment's best cut may rate, where there are more cuts than a few
)
NUM_RUNNER_UP_PARTITIONS = 2  # more cuts of the assignment found fastest that are simulated then
MAX_MISFITS_TO_TRY = 12  # assignments whose bound says that they cannot fit that are looked at, where no other does
MAX_EXPLAINED_ASSIGNMENTS = 200  # assignments that were not looked at, of which the ranking may tell
NUM_ESTIMATED_REPLICA_GROUPS = 2  # replica groups of a batch that are rated where there are more cuts than a few

Progress = Callable[[int, int], None]  # assignments that were looked at or are settled, of how many


@dataclass(frozen=True)
class SearchResults:
    """Everything the search learned."""

    candidates: tuple[Candidate, ...]  # the chosen one first, then by step time; of each assignment the best
    rejected: tuple[Alternative, ...]  # those never simulated, with the reason

    @property
    def fastest(self) -> float:
        """Seconds of the chosen step; infinity without any."""
        return self.candidates[0].step_time_s if self.candidates else math.inf


def merge_results(*outcomes: SearchResults) -> SearchResults:
    """What several searches learned, ranked together."""
    return SearchResults(
        tuple(_ranked([j for outcome in outcomes for j in outcome.candidates])),
        tuple(loser for outcome in outcomes for loser in outcome.rejected),
    )


@dataclass(order=True)
class _Waiting:
    """Something in the queue; the least bound comes first."""

    bound: float
    number: int
    assignment: MeshAssignment = field(compare=False)
    chains: tuple[LayerChain, ...] = field(compare=False, default=())
    cuts: LayerPartition | None = field(compare=False, default=None)
    is_glanced_at: bool = field(compare=False, default=False)


def best_first_search(
    assignments: Sequence[tuple[float, MeshAssignment]],
    layer_costs: LayerCosts,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    at_least: int,
    progress: Progress | None = None,
) -> SearchResults:
    """Simulate layouts in the order of their lower bounds until no other can be faster than the best one found.

    At least `at_least` assignments are simulated, if so many fit, so that the ranking has figures to show.
    """
    return _Search(layer_costs, choices, machine, at_least, progress).run(assignments)


class _Search:
    def __init__(
        self,
        layer_costs: LayerCosts,
        choices: Mapping[str, UnitChoices],
        machine: Hardware,
        at_least: int,
        progress: Progress | None,
    ) -> None:
        self.layer_costs, self.choices, self.machine = layer_costs, choices, machine
        self.at_least, self.progress = at_least, progress
        self.rejected: list[Alternative] = []
        self.best: dict[int, Candidate] = {}  # by id of the assignment
        self.misfits: dict[int, MemoryMisfit] = {}
        self.others: dict[int, list[tuple[float, MeshAssignment, LayerPartition]]] = {}  # the next best rated cuts
        self.queue: list[_Waiting] = []
        self.num_queued = 0
        self.is_small = False
        self.estimator = StepTimeEstimator(layer_costs, machine, NUM_ESTIMATED_REPLICA_GROUPS)

    def run(self, assignments: Sequence[tuple[float, MeshAssignment]]) -> SearchResults:
        """Work the queue off."""
        self.is_small = self._num_cuts(s for _, s in assignments) <= MAX_PARTITIONS_TO_TRY_ALL
        if self.is_small:
            self.estimator.max_groups = None
        for bound, assignment in assignments:
            if tp_group := split_tp_group_of(assignment, self.machine.ranks_per_node):
                self._lost(assignment, f"the tensor-parallel group of ranks {tp_group} lies on two nodes")
            else:
                self._wait(0.0 if self.is_small else bound, assignment)
        num_seen = 0
        while self.queue and not self._is_settled(self.queue[0]):
            waiting = heapq.heappop(self.queue)
            self._tell(num_seen, len(assignments))
            num_seen += not waiting.chains and waiting.cuts is None
            self._look_at(waiting)
        if not self.is_small:
            self._refine()
        self._give_up()
        self._tell(len(assignments), len(assignments))
        return SearchResults(tuple(_ranked(list(self.best.values()))), tuple(self.rejected))

    def _tell(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)

    def _is_settled(self, first: _Waiting) -> bool:
        """Whether nothing that waits can change the choice."""
        if math.isinf(first.bound):  # then there is nothing to find, only something to say
            return bool(self.best) or len(self.misfits) >= MAX_MISFITS_TO_TRY
        fastest = self._fastest()
        return len(self.best) >= self.at_least and first.bound > fastest * (
            EQUAL_STEP_TIME_RATIO if self.is_small else 1.0
        )

    def _refine(self) -> None:
        """Simulate the next best rated cuts of the assignment found fastest."""
        if not self.best:
            return
        fastest = min(self.best, key=lambda at: self.best[at].step_time_s)
        for bound, assignment, cuts in self.others.get(fastest, [])[:NUM_RUNNER_UP_PARTITIONS]:
            self._simulate(bound, assignment, cuts)

    def _num_cuts(self, assignments: Iterable[MeshAssignment]) -> int:
        """Ways to cut all assignments, counted up to what is not few."""
        layers = {unit.name: len(unit.layers) for unit in self.layer_costs.shape.units}
        total = 0
        for assignment in assignments:
            if assignment.placement == "unified":
                size = assignment.meshes[LLM]
                total += math.comb(sum(layers.values()) - 1, size.pp * size.vpp - 1)
            else:
                total += math.prod(math.comb(layers[n] - 1, s.pp * s.vpp - 1) for n, s in assignment.meshes.items())
            if total > MAX_PARTITIONS_TO_TRY_ALL:
                break
        return total

    def _wait(
        self,
        bound: float,
        assignment: MeshAssignment,
        chains: tuple[LayerChain, ...] = (),
        cuts: LayerPartition | None = None,
        is_glanced_at: bool = False,
    ) -> None:
        self.num_queued += 1
        heapq.heappush(self.queue, _Waiting(bound, self.num_queued, assignment, chains, cuts, is_glanced_at))

    def _look_at(self, waiting: _Waiting) -> None:
        """Put the next piece of work into what comes first."""
        bound, assignment = waiting.bound, waiting.assignment
        if waiting.cuts is not None:
            self._simulate(bound, assignment, waiting.cuts)
        elif waiting.chains and (self.is_small or waiting.is_glanced_at):
            self._rate(bound, assignment, waiting.chains)
        elif waiting.chains:
            self._glance_at(bound, assignment, waiting.chains)
        else:
            chains = layer_chains(assignment, self.layer_costs, self.choices)
            if any(chain.anchor is None for chain in chains):
                self._lost(assignment, "its layers cannot be cut into so many stages under parallel.*.pp")
            else:
                self._wait(max(bound, *map(chain_time_lower_bound, chains)), assignment, chains)

    def _glance_at(self, bound: float, assignment: MeshAssignment, chains: tuple[LayerChain, ...]) -> None:
        """Rate the anchor alone, so that what is far behind others waits until they are settled."""
        extra = self._extra(assignment, chains)
        cuts = tuple(
            anchor_partition(chain, more) or chain.anchor or () for chain, more in zip(chains, extra, strict=True)
        )
        rating = float(self.estimator.estimate(assignment, chains, [cuts], extra)[0])
        self._wait(max(bound, rating * ANCHOR_ESTIMATE_DISCOUNT), assignment, chains, is_glanced_at=True)

    def _rate(self, bound: float, assignment: MeshAssignment, chains: tuple[LayerChain, ...]) -> None:
        """Rate the cuts of a assignment, and let the best wait for the simulator."""
        extra = self._extra(assignment, chains)
        options = [self._options(chain, more) for chain, more in zip(chains, extra, strict=True)]
        if not all(options):
            self._try_to_fit(assignment, tuple(chain.anchor or () for chain in chains))
            self._lost_for_memory(assignment)
            return
        if self.is_small:
            cuts = list(product(*options))
            for rating, one in zip(self.estimator.estimate(assignment, chains, cuts, extra), cuts, strict=True):
                self._wait(max(float(rating), bound), assignment, chains, one)
            return
        rated = self._descend(assignment, chains, options, extra)
        order = sorted(rated, key=lambda one: rated[one])
        least = max(rated[order[0]], bound)
        self.others[id(assignment)] = [(rated[one], assignment, one) for one in order[1 : 1 + NUM_RUNNER_UP_PARTITIONS]]
        if least < self._fastest():  # the sooner a fast one is known, the less of others is looked at
            self._simulate(least, assignment, order[0])
        else:
            self._wait(least, assignment, chains, order[0])

    def _descend(
        self,
        assignment: MeshAssignment,
        chains: Sequence[LayerChain],
        options: Sequence[Sequence[tuple[int, ...]]],
        extra: Sequence[FloatArray | None],
    ) -> dict[LayerPartition, float]:
        """Rate cuts near the anchor, then near the best of these, until none is better."""
        rated: dict[LayerPartition, float] = {}
        best = math.inf
        for _ in range(MAX_JITTER_ROUNDS):
            new = [cuts for cuts in _spread_over(options, MAX_JITTERS_PER_ASSIGNMENT) if cuts not in rated]
            if new:
                rated |= zip(new, self.estimator.estimate(assignment, chains, new, extra).tolist(), strict=True)
            around = min(rated, key=lambda cuts: rated[cuts])
            if rated[around] >= best:
                break
            best = rated[around]
            if best > self._fastest() * MAX_ESTIMATE_RATIO:
                break
            options = [
                jittered_partitions(chain, cuts, MAX_JITTERS_PER_ASSIGNMENT, more) or [cuts]
                for chain, cuts, more in zip(chains, around, extra, strict=True)
            ]
        return rated

    def _fastest(self) -> float:
        return min((j.step_time_s for j in self.best.values()), default=math.inf)

    def _extra(self, assignment: MeshAssignment, chains: Sequence[LayerChain]) -> list[FloatArray | None]:
        """By chain, seconds of recomputation that parts and spans need; None where the anchor needs none."""
        cuts = tuple(chain.anchor or () for chain in chains)
        alive = self.estimator.in_flight(assignment, cuts)
        memory = self.layer_costs.memory(
            layout_graph(partitioned_layout(assignment, self.layer_costs, cuts), self.layer_costs), alive
        )
        if max(m.total for m in memory.values()) <= self.machine.memory_bytes:
            return [None] * len(chains)
        return [
            recompute_to_fit(chain, in_flight_by_chunk(chain, alive), self.machine.memory_bytes) for chain in chains
        ]

    def _options(self, chain: LayerChain, extra: FloatArray | None) -> list[tuple[int, ...]]:
        """Cuts of one chain that are worth rating."""
        if self.is_small:
            return all_chain_partitions(chain)
        around = anchor_partition(chain, extra)
        if around is None and chain.vpp > 1 and chain.anchor is not None:  # parts of a rank may help each other out
            return jittered_partitions(chain, chain.anchor, MAX_JITTERS_PER_ASSIGNMENT)
        return [] if around is None else jittered_partitions(chain, around, MAX_JITTERS_PER_ASSIGNMENT, extra)

    def _simulate(self, bound: float, assignment: MeshAssignment, cuts: LayerPartition) -> None:
        known = self.best.get(id(assignment))
        if known is not None and known.step_time_s <= bound:
            return
        found = self._try_to_fit(assignment, cuts)
        if found is None:
            if not self.is_small:
                self._next_best(assignment)
            if not any(w.assignment is assignment for w in self.queue):
                self._lost_for_memory(assignment)
            return
        judged = evaluate_layout(found.layout, self.layer_costs, self.machine, memory=found.memory)
        if known is None or judged.step_time_s < known.step_time_s:
            self.best[id(assignment)] = judged

    def _next_best(self, assignment: MeshAssignment) -> None:
        """Let the next rated cut wait, where the one before turned out not to fit."""
        left = self.others.get(id(assignment), [])
        if left:
            bound, _, cuts = left.pop(0)
            self._wait(bound, assignment, (), cuts)

    def _try_to_fit(self, assignment: MeshAssignment, cuts: LayerPartition) -> FittedLayout | None:
        found = fit_memory(assignment, self.layer_costs, cuts, self.machine, self.estimator.in_flight(assignment, cuts))
        if isinstance(found, FittedLayout):
            return found
        known = self.misfits.get(id(assignment))
        if known is None or found.need_gib < known.need_gib:
            self.misfits[id(assignment)] = found
        return None

    def _lost_for_memory(self, assignment: MeshAssignment) -> None:
        if id(assignment) not in self.best and id(assignment) in self.misfits:
            misfit = self.misfits[id(assignment)]
            self._lost(assignment, misfit.reason, misfit.need_gib)

    def _give_up(self) -> None:
        """What still waits cannot be faster."""
        fastest = self._fastest()
        seen = {*self.best}
        for waiting in sorted(self.queue):
            if id(waiting.assignment) not in seen and len(seen) < MAX_EXPLAINED_ASSIGNMENTS:
                seen.add(id(waiting.assignment))
                if math.isinf(waiting.bound):
                    self._lost(waiting.assignment, "does not fit: what its ranks must hold at least is too much")
                    continue
                unit = _slowest(waiting)
                self._lost(
                    waiting.assignment, f"at least {waiting.bound / fastest:.2f}x slower: {unit} cannot be done sooner"
                )

    def _lost(self, assignment: MeshAssignment, reason: str, peak_gib: float | None = None) -> None:
        self.rejected.append(
            Alternative(
                summary=str(assignment),
                placement=assignment.placement,
                step_time_s=None,
                peak_memory_gib=peak_gib,
                reason=reason,
            )
        )


def _slowest(waiting: _Waiting) -> str:
    """Whose work asks for the bound, as far as is known."""
    if not waiting.chains:
        return "its work"
    return " and ".join(max(waiting.chains, key=chain_time_lower_bound).units)


def _spread_over(options: Sequence[Sequence[tuple[int, ...]]], limit: int) -> list[LayerPartition]:
    """Combine the best few of each chain."""
    few = max(1, int(limit ** (1 / len(options))))
    return list(product(*(cuts[:few] for cuts in options)))


def _ranked(judged: list[Candidate]) -> list[Candidate]:
    """Fastest first; of those as fast as the fastest, the simplest is chosen and leads."""
    ordered = sorted(judged, key=lambda j: (j.step_time_s, j.layout.complexity))
    if not ordered:
        return []
    equal = [j for j in ordered if j.step_time_s <= ordered[0].step_time_s * EQUAL_STEP_TIME_RATIO]
    chosen = min(equal, key=lambda j: (j.layout.complexity, j.step_time_s))
    return [chosen, *(j for j in ordered if j is not chosen)]
