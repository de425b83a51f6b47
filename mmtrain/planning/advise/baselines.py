"""Make the plans that rules of thumb and other systems' rules make, to compare the planner's plan with.

`flops` shares the ranks out among the units, `megatron-stages` puts each unit into stages of its own, and `fsdp` and
`ddp` run all units on every rank (`sharded_baselines.py`). All other rules divide the one pipeline of a `unified` plan.
Each baseline uses the fastest of a few meshes, is fitted into memory and simulated like any plan. `mmtrain plan` lists
baselines among the alternatives, or returns one with `--baseline`.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product, starmap

import numpy as np

from mmtrain.costs import model_flops
from mmtrain.errors import PlanError
from mmtrain.planning.advise.sharded_baselines import DDP_BASELINE, FSDP_BASELINE, SHARDED_RULES, plan_sharded_baseline
from mmtrain.planning.advise.why_slower import explain_measured_slower, slower_text
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.artifact.plan import Placement
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.step_time_estimator import StepTimeEstimator
from mmtrain.planning.layer_costs.layer_costs import FORWARD
from mmtrain.planning.layer_costs.layer_partition import LayerChain, is_partition_allowed, partition_time_lower_bound
from mmtrain.planning.layer_costs.min_max_partition import FloatArray, min_max_partition
from mmtrain.planning.search.mesh_enumeration import assignments_near_shares
from mmtrain.planning.space.candidate import Candidate, MeshAssignment, Rejected
from mmtrain.program.ir.graph import LLM

FLOPS_BASELINE = "flops"
STAGES_BASELINE = "megatron-stages"
MEGATRON_TP = 8  # of the LLM in `megatron-stages`: a node's GPUs, as in the baseline of MMScale (arXiv 2408.04275)

# A rule takes a layer chain and (layers,) forward seconds for the mean microbatch of the LLM. It returns the bounds of
# the model chunks, one more than there are chunks, or None where it cannot be applied.
RuleFunction = Callable[[LayerChain, FloatArray], tuple[int, ...] | None]
PartitionedCandidate = tuple[Candidate, tuple[LayerChain, ...]]


@dataclass(frozen=True)
class PartitionRule:
    """A rule that divides a layer chain into model chunks, and how the ranking describes it."""

    description: str
    partition: RuleFunction


def _partition_megatron(chain: LayerChain, forward: FloatArray) -> tuple[int, ...] | None:
    """Divide the LLM's layers evenly; encoders go into the first chunk, a generator into the last."""
    start, end = _llm_bounds(chain)
    return _even_bounds(chain.num_chunks, start, end, first=0, last=chain.bounds[-1])


def _partition_megatron_extra(chain: LayerChain, forward: FloatArray) -> tuple[int, ...] | None:
    """Give encoders a first chunk of their own and divide the LLM's layers evenly over the other chunks."""
    start, end = _llm_bounds(chain)
    if start == 0 or chain.num_chunks < 2:
        return None
    rest = _even_bounds(chain.num_chunks - 1, start, end, first=start, last=chain.bounds[-1])
    return None if rest is None else (0, *rest)


def _partition_balanced(chain: LayerChain, forward: FloatArray) -> tuple[int, ...] | None:
    """Minimize the longest forward and backward of a chunk, like the balanced Megatron-LM baseline of Optimus."""
    return min_max_partition(chain.costs.seconds.tolist(), chain.num_chunks)


def _partition_equal_parameters(chain: LayerChain, forward: FloatArray) -> tuple[int, ...] | None:
    """Minimize the most trained parameters of a chunk."""
    # A frozen layer counts as almost nothing, so that chains without a trained layer can be divided, too.
    return min_max_partition((chain.costs.parameters + 1e-6).tolist(), chain.num_chunks)


def _partition_equal_layers(chain: LayerChain, forward: FloatArray) -> tuple[int, ...] | None:
    """Minimize the most layers of a chunk."""
    return min_max_partition([1.0] * len(chain.costs.seconds), chain.num_chunks)


def _partition_profile_only(chain: LayerChain, forward: FloatArray) -> tuple[int, ...] | None:
    """Minimize the longest forward of a chunk: no backward, recomputation or messages (a baseline of OmniBal)."""
    return min_max_partition(forward.tolist(), chain.num_chunks)


PARTITION_RULES: Mapping[str, PartitionRule] = {
    "megatron": PartitionRule("LLM layers divided evenly, encoders in the first stage", _partition_megatron),
    "megatron-extra": PartitionRule("encoders in a stage of their own in front", _partition_megatron_extra),
    "balanced": PartitionRule("forward and backward time divided evenly over all chunks", _partition_balanced),
    "equal-parameters": PartitionRule("trained parameters divided evenly", _partition_equal_parameters),
    "equal-layers": PartitionRule("layers divided evenly by their number", _partition_equal_layers),
    "profile-only": PartitionRule("forward time alone divided evenly", _partition_profile_only),
}
DISAGGREGATED_RULES: Mapping[str, str] = {
    FLOPS_BASELINE: "ranks divided among units in proportion to FLOPs",
    STAGES_BASELINE: "encoders and generator in stages of their own, a replica on each rank of the LLM's TP groups",
}
BASELINES = (*PARTITION_RULES, *DISAGGREGATED_RULES, *SHARDED_RULES)


def _llm_bounds(chain: LayerChain) -> tuple[int, int]:
    """Return the LLM's layers [start, end) in a chain."""
    i = chain.units.index(LLM)
    return chain.bounds[i], chain.bounds[i + 1]


def _even_bounds(num_chunks: int, start: int, end: int, first: int, last: int) -> tuple[int, ...] | None:
    """Divide layers [start, end) evenly; the outer chunks also hold the layers from `first` on, and up to `last`."""
    if end - start < num_chunks:
        return None
    bounds = np.linspace(start, end, num_chunks + 1).round().astype(int).tolist()
    if any(lo >= hi for lo, hi in pairwise(bounds)):
        return None
    return (first, *bounds[1:-1], last)


@dataclass(frozen=True)
class BaselinePlanner:
    """Plans baselines on the mesh assignments that the planner searches."""

    evaluator: Evaluator
    enumerated: Sequence[Candidate]  # with lower bounds of their step times

    def plan_all(self, max_step_s: Mapping[Placement, float] | None = None) -> dict[str, Candidate]:
        """Return every baseline that is possible and fits, by name, without those estimated above `max_step_s`.

        max_step_s: seconds by placement; no limit where a placement is left out.
        """
        baselines = {
            name: self.plan_baseline(name, (max_step_s or {}).get(_placement_of(name), math.inf)) for name in BASELINES
        }
        return {name: candidate for name, candidate in baselines.items() if candidate is not None}

    def plan_requested(self, name: str) -> Candidate:
        """Return the baseline that the user asked for.

        Raises:
            PlanError: it is not possible or does not fit.
        """
        candidate = self.plan_baseline(name)
        if candidate is None:
            raise PlanError(
                f"--baseline {name}: no plan by this rule is possible and fits; possible here: "
                f"{', '.join(self.plan_all()) or 'none'}. `{FLOPS_BASELINE}` and `{STAGES_BASELINE}` "
                f"need units on separate ranks (`disaggregated`), the latter also tp {MEGATRON_TP} for the LLM; "
                f"`{FSDP_BASELINE}` and `{DDP_BASELINE}` need several ranks that run the whole model (`replicated`) "
                "without dispatch; every other rule needs a `unified` plan with pp above 1"
            )
        return candidate

    def plan_baseline(self, name: str, max_step_s: float = math.inf) -> Candidate | None:
        """Return the baseline of this name on its fastest mesh, simulated.

        The meshes are tried in rounds of a few, in the order of their bounds, until one of a round fits. None if it is
        not possible, does not fit, or its step is estimated to take more than `max_step_s` seconds. `fsdp` and `ddp`
        have one mesh and no estimate.
        """
        if name in SHARDED_RULES:
            return plan_sharded_baseline(name, self.evaluator)
        if name == FLOPS_BASELINE:
            rounds = self._in_proportion_to_flops()
        elif name == STAGES_BASELINE:
            rounds = self._in_stages_of_their_own()
        else:
            rounds = self._partitioned_by(PARTITION_RULES[name].partition, max_step_s)
        others: list[Candidate] = []  # of the rounds so far, those too slow to be tried
        for partitioned in islice(rounds, self.evaluator.budget.baselines.max_rounds):
            bounds_s = list(starmap(_time_lower_bound, partitioned))
            if min(bounds_s, default=math.inf) <= max_step_s:
                # Meshes of a later round are taken only where none of the rounds before fits.
                if any(isinstance(self._fit(candidate), Candidate) for candidate in others):
                    break
                others = []
            misfits: set[int] = set()
            for candidate in self._by_estimate(partitioned, bounds_s, max_step_s):
                fitted = self._fit(candidate)
                if isinstance(fitted, Candidate):
                    return self.evaluator.simulate(fitted)
                misfits.add(candidate.id)
            others += [candidate for candidate, _ in partitioned if candidate.id not in misfits]
        return None

    def _by_estimate(
        self, partitioned: Sequence[PartitionedCandidate], bounds_s: Sequence[float], max_step_s: float
    ) -> Iterator[Candidate]:
        """Yield the candidates of a round in the order of their estimates, up to `max_step_s` seconds.

        None is estimated before its lower bound comes first.
        """
        waiting = [(bound_s, number, False) for number, bound_s in enumerate(bounds_s)]
        heapq.heapify(waiting)
        estimated: dict[int, Candidate] = {}
        while waiting and waiting[0][0] <= max_step_s:
            bound_s, number, is_estimated = heapq.heappop(waiting)
            if is_estimated:
                yield estimated[number]
                continue
            estimated[number] = self._estimate(*partitioned[number])
            heapq.heappush(waiting, (max(bound_s, _estimate_of(estimated[number])), number, True))

    def _fit(self, candidate: Candidate) -> Candidate | Rejected:
        assert candidate.partition is not None
        in_flight = self._estimator.in_flight(candidate.assignment, candidate.partition)
        return self.evaluator.fit(candidate, in_flight)

    @property
    def _estimator(self) -> StepTimeEstimator:
        """The estimator of all rules: they try the same meshes, whose 1F1B orders it keeps."""
        return self.evaluator.estimator(self.evaluator.budget.partitions.num_estimated_replica_groups)

    def _estimate(self, candidate: Candidate, chains: tuple[LayerChain, ...]) -> Candidate:
        assert candidate.partition is not None
        no_recompute = [None] * len(chains)
        [step_s] = self._estimator.estimate(candidate.assignment, chains, [candidate.partition], no_recompute)
        return candidate.estimated(float(step_s))

    def _partitioned_by(self, rule: RuleFunction, max_step_s: float) -> Iterator[list[PartitionedCandidate]]:
        """Yield the `unified` meshes with more than one pipeline rank, the lowest bounds first, a few at a time.

        Those whose bounds are above `max_step_s` are left out.
        """
        by_bound = sorted(self.enumerated, key=lambda candidate: candidate.time_lower_bound_s)
        partitioned: list[PartitionedCandidate] = []
        for candidate in by_bound:
            assignment = candidate.assignment
            if candidate.time_lower_bound_s > max_step_s:
                break
            if assignment.placement != "unified" or assignment.meshes[LLM].pp == 1 or self._splits_tp_group(assignment):
                continue
            (chain,) = self.evaluator.layer_chains(candidate)
            bounds = rule(chain, self._forward_seconds(assignment))
            if bounds is not None and is_partition_allowed(chain, bounds):
                partitioned.append((candidate.partitioned((bounds,)), (chain,)))
            if len(partitioned) == self.evaluator.budget.baselines.meshes_per_round:
                yield partitioned
                partitioned = []
        yield partitioned

    def _in_stages_of_their_own(self) -> Iterator[list[PartitionedCandidate]]:
        """Yield, all at once, the `disaggregated` meshes of MMScale's Megatron-LM baseline.

        The LLM has tp 8 and its layers divided evenly. Each encoder, and a generator, is one more pipeline stage. Every
        rank of that stage holds a replica and takes its share of each microbatch.
        """
        evaluator = self.evaluator
        partitioned: list[PartitionedCandidate] = []
        for assignment in self._assignments_in_stages():
            candidate = evaluator.enumerated(assignment)
            chains = evaluator.layer_chains(candidate)
            num_layers = {chain.units[0]: chain.bounds[-1] for chain in chains}
            llm_chunks = assignment.meshes[LLM].pp * assignment.meshes[LLM].vpp
            llm_bounds = _even_bounds(llm_chunks, 0, num_layers[LLM], first=0, last=num_layers[LLM])
            if llm_bounds is None or self._splits_tp_group(assignment):
                continue
            bounds = tuple(llm_bounds if unit == LLM else (0, num) for unit, num in num_layers.items())
            if all(starmap(is_partition_allowed, zip(chains, bounds, strict=True))):
                partitioned.append((candidate.partitioned(bounds), chains))
        yield partitioned

    def _assignments_in_stages(self) -> Iterator[MeshAssignment]:
        """List the mesh assignments of `_in_stages_of_their_own` that the recipe allows."""
        choices, num_ranks = self.evaluator.problem.choices, self._disaggregated_ranks
        llm = choices[LLM]
        others = [unit for unit in choices.values() if unit.name != LLM]
        if num_ranks is None or MEGATRON_TP not in llm.tp:
            return
        for dp, vpp in product(llm.dp, llm.vpp):
            num_stages, rest = divmod(num_ranks, MEGATRON_TP * dp)
            meshes = dict.fromkeys(choices, MeshSize(1, 1, MEGATRON_TP * dp))
            meshes[LLM] = MeshSize(MEGATRON_TP, num_stages - len(others), dp, vpp, ep=llm.ep)
            is_allowed = all(1 in unit.tp and 1 in unit.pp and MEGATRON_TP * dp in unit.dp for unit in others)
            if rest or dp % llm.ep or not is_allowed or meshes[LLM].pp not in llm.pp:
                continue
            num_llm = llm.global_batch // dp
            num_microbatches = {name: unit.fixed_microbatches or num_llm for name, unit in choices.items()}
            yield MeshAssignment("disaggregated", meshes, num_microbatches | {LLM: num_llm})

    @property
    def _disaggregated_ranks(self) -> int | None:
        """The most ranks that a `disaggregated` plan may use; None where there is none."""
        rank_counts = (c.assignment.ranks for c in self.enumerated if c.placement == "disaggregated")
        return max(rank_counts, default=None)

    def _in_proportion_to_flops(self) -> Iterator[list[PartitionedCandidate]]:
        """Yield `disaggregated` meshes, those first whose ranks are nearest to the units' shares of FLOPs."""
        evaluator, num_ranks = self.evaluator, self._disaggregated_ranks
        if num_ranks is None:
            return
        choices, shares = evaluator.problem.choices, self._rank_shares(num_ranks)
        bound, budget = evaluator.time_lower_bound, evaluator.budget
        for assignments in assignments_near_shares(choices, shares, bound, budget.meshes):
            partitioned: list[PartitionedCandidate] = []
            allowed = [assignment for assignment in assignments if not self._splits_tp_group(assignment)]
            for assignment in allowed[: budget.baselines.meshes_per_round]:
                candidate = evaluator.enumerated(assignment)
                chains = evaluator.layer_chains(candidate)
                anchors = tuple(chain.anchor for chain in chains if chain.anchor is not None)
                if len(anchors) == len(chains):
                    partitioned.append((candidate.partitioned(anchors), chains))
            if partitioned:
                yield partitioned

    def _rank_shares(self, world_size: int) -> dict[str, float]:
        """Return by unit the ranks in proportion to its FLOPs on the sampled batches."""
        problem, layer_costs = self.evaluator.problem, self.evaluator.layer_costs
        flops: dict[str, float] = {}
        for unit in problem.choices:
            loads = layer_costs.loads.of_unit(unit, layer_costs.loads.undivided)
            totals = (loads.total(batch) for batch in range(len(problem.batches.groups)))
            flops[unit] = sum(model_flops(problem.shape, {unit: total}) for total in totals)
        return {unit: world_size * unit_flops / sum(flops.values()) for unit, unit_flops in flops.items()}

    def _forward_seconds(self, assignment: MeshAssignment) -> FloatArray:
        """Return (layers,) seconds of each layer's forward per microbatch of the LLM, mean over the batches."""
        per_step = []
        for unit, mesh in assignment.meshes.items():
            times = self.evaluator.layer_costs.unit_times(unit, mesh.tp, assignment.batch_split)
            per_step.append(times.mean[:, FORWARD] * assignment.num_microbatches[unit])
        return np.asarray(np.concatenate(per_step) / assignment.num_microbatches[LLM])

    def _splits_tp_group(self, assignment: MeshAssignment) -> bool:
        return assignment.tp_group_across_nodes(self.evaluator.problem.hardware.ranks_per_node) is not None


def _placement_of(name: str) -> Placement:
    if name in SHARDED_RULES:
        return "replicated"
    return "disaggregated" if name in DISAGGREGATED_RULES else "unified"


def reject_baseline(name: str, baseline: Candidate, chosen: Candidate) -> Rejected:
    """Return why a baseline was not chosen; the ranking shows it under its name."""
    descriptions = {**DISAGGREGATED_RULES, **SHARDED_RULES}
    description = descriptions[name] if name in descriptions else PARTITION_RULES[name].description
    if baseline.measured_step_s is None:
        slower = slower_text(baseline.step_time_s / chosen.step_time_s)
    else:
        slower = explain_measured_slower(baseline, chosen)
    reason = f"{slower}: {description}"
    return Rejected(baseline, reason, label=baseline_label(name))


def baseline_label(name: str) -> str:
    """Return what the ranking calls a baseline."""
    return f"{name} baseline"


def _time_lower_bound(candidate: Candidate, chains: tuple[LayerChain, ...]) -> float:
    assert candidate.partition is not None
    return max(starmap(partition_time_lower_bound, zip(chains, candidate.partition, strict=True)))


def _estimate_of(candidate: Candidate) -> float:
    assert candidate.estimated_step_s is not None
    return candidate.estimated_step_s
