"""Make the plans that rules of thumb and other systems' rules make, to compare the planner's plan with.

`flops` shares the ranks out among the units. All other rules divide the one pipeline of a `unified` plan. Each baseline
uses the fastest of a few meshes, is fitted into memory and simulated like any plan. `mmtrain plan` lists baselines
among the alternatives, or returns one with `--baseline`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise

import numpy as np

from mmtrain.costs import Hardware, model_flops
from mmtrain.costs.hardware import GIB
from mmtrain.errors import PlanError
from mmtrain.plan.artifact.plan import Alternative
from mmtrain.plan.estimate.evaluate import Candidate, evaluate_layout
from mmtrain.plan.estimate.layer_costs import FORWARD, LayerCosts
from mmtrain.plan.estimate.memory_fit import FittedLayout, fit_memory
from mmtrain.plan.estimate.step_time_estimator import StepTimeEstimator
from mmtrain.plan.estimate.time_lower_bound import unit_time_bound
from mmtrain.plan.search.best_first_search import NUM_ESTIMATED_REPLICA_GROUPS
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.plan.search.layer_partition import LayerChain, LayerPartition, is_partition_allowed, layer_chains
from mmtrain.plan.search.mesh_enumeration import MeshAssignment, assignments_near_shares, split_tp_group_of
from mmtrain.plan.search.min_max_partition import FloatArray, min_max_partition
from mmtrain.program.ir.graph import LLM

MESHES_PER_BASELINE_ROUND = 4  # mesh assignments that are estimated together, in the order of their lower bounds
MAX_BASELINE_ROUNDS = 12  # rounds after which a rule is given up that has found no mesh with a plan that fits
FLOPS_BASELINE = "flops"

# A rule takes a layer chain and (layers,) forward seconds for the mean microbatch of the LLM. It returns the bounds of
# the model chunks, one more than there are chunks, or None where it cannot be applied.
RuleFunction = Callable[[LayerChain, FloatArray], tuple[int, ...] | None]
PartitionedMeshes = tuple[MeshAssignment, tuple[LayerChain, ...], LayerPartition]


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
BASELINES = (*PARTITION_RULES, FLOPS_BASELINE)


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

    assignments: Sequence[tuple[float, MeshAssignment]]  # with lower bounds of their step times
    layer_costs: LayerCosts
    choices: Mapping[str, UnitChoices]
    machine: Hardware

    def plan_all(self, max_step_s: float = math.inf) -> dict[str, Candidate]:
        """Return every baseline that is possible and fits, by name, without those estimated above `max_step_s`."""
        baselines = {name: self.plan_baseline(name, max_step_s) for name in BASELINES}
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
                f"{', '.join(self.plan_all()) or 'none'}. `{FLOPS_BASELINE}` needs units on separate ranks "
                "(`disaggregated`), every other rule a `unified` plan with pp above 1"
            )
        return candidate

    def plan_baseline(self, name: str, max_step_s: float = math.inf) -> Candidate | None:
        """Return the baseline of this name on its fastest mesh, simulated.

        None if it is not possible, does not fit, or its step is estimated to take more than `max_step_s` seconds.
        """
        if name == FLOPS_BASELINE:
            rounds = self._meshes_in_proportion_to_flops()
        else:
            rounds = self._meshes_partitioned_by(PARTITION_RULES[name].partition)
        for meshes in islice(rounds, MAX_BASELINE_ROUNDS):
            estimates = []
            for i, (assignment, chains, partition) in enumerate(meshes):
                step_s = float(self._estimator.estimate(assignment, chains, [partition], [None] * len(chains))[0])
                if step_s <= max_step_s:
                    estimates.append((step_s, i))
            for _, i in sorted(estimates):
                assignment, _, partition = meshes[i]
                in_flight = self._estimator.in_flight(assignment, partition)
                fitted = fit_memory(assignment, self.layer_costs, partition, self.machine, in_flight)
                if isinstance(fitted, FittedLayout):
                    return evaluate_layout(fitted.layout, self.layer_costs, self.machine, memory=fitted.memory)
        return None

    @cached_property
    def _estimator(self) -> StepTimeEstimator:
        """The estimator of all rules: they try the same meshes, whose 1F1B orders it keeps."""
        return StepTimeEstimator(self.layer_costs, self.machine, NUM_ESTIMATED_REPLICA_GROUPS)

    def _meshes_partitioned_by(self, rule: RuleFunction) -> Iterator[list[PartitionedMeshes]]:
        """Return the `unified` meshes with more than one pipeline rank, the lowest bounds first, a few at a time."""
        by_bound = sorted(self.assignments, key=lambda entry: entry[0])
        unified = [assignment for _, assignment in by_bound if assignment.placement == "unified"]
        meshes: list[PartitionedMeshes] = []
        for assignment in unified:
            if assignment.meshes[LLM].pp == 1 or self._splits_tp_group(assignment):
                continue
            (chain,) = layer_chains(assignment, self.layer_costs, self.choices)
            bounds = rule(chain, self._forward_seconds(assignment))
            if bounds is not None and is_partition_allowed(chain, bounds):
                meshes.append((assignment, (chain,), (bounds,)))
            if len(meshes) == MESHES_PER_BASELINE_ROUND:
                yield meshes
                meshes = []
        yield meshes

    def _meshes_in_proportion_to_flops(self) -> Iterator[list[PartitionedMeshes]]:
        """Return `disaggregated` meshes, those first whose ranks are nearest to the units' shares of FLOPs."""
        disaggregated = [assignment for _, assignment in self.assignments if assignment.placement == "disaggregated"]
        if not disaggregated:
            return
        shares = self._rank_shares(max(assignment.ranks for assignment in disaggregated))
        bound = unit_time_bound(self.layer_costs, self.choices, self.machine)
        for assignments in assignments_near_shares(self.choices, shares, bound):
            meshes: list[PartitionedMeshes] = []
            allowed = [assignment for assignment in assignments if not self._splits_tp_group(assignment)]
            for assignment in allowed[:MESHES_PER_BASELINE_ROUND]:
                chains = layer_chains(assignment, self.layer_costs, self.choices)
                partition = tuple(chain.anchor for chain in chains if chain.anchor is not None)
                if len(partition) == len(chains):
                    meshes.append((assignment, chains, partition))
            if meshes:
                yield meshes

    def _rank_shares(self, world_size: int) -> dict[str, float]:
        """Return by unit the ranks in proportion to its FLOPs on the sampled batches."""
        undivided = tuple((unit, 1, self.choices[LLM].batch) for unit in self.choices)
        flops: dict[str, float] = {}
        for unit in self.choices:
            loads = self.layer_costs.microbatch_loads(unit, undivided)
            flops[unit] = sum(
                model_flops(self.layer_costs.shape, {unit: loads.total(batch)})
                for batch in range(len(self.layer_costs.batches.groups))
            )
        return {unit: world_size * unit_flops / sum(flops.values()) for unit, unit_flops in flops.items()}

    def _forward_seconds(self, assignment: MeshAssignment) -> FloatArray:
        """Return (layers,) seconds of each layer's forward per microbatch of the LLM, mean over the batches."""
        per_step = [
            self.layer_costs.unit_times(unit, size.tp, assignment.batch_split).mean[:, FORWARD]
            * assignment.num_microbatches[unit]
            for unit, size in assignment.meshes.items()
        ]
        return np.asarray(np.concatenate(per_step) / assignment.num_microbatches[LLM])

    def _splits_tp_group(self, assignment: MeshAssignment) -> bool:
        return split_tp_group_of(assignment, self.machine.ranks_per_node) is not None


def baseline_alternative(name: str, baseline: Candidate, fastest_s: float) -> Alternative:
    """Return a baseline as a line of the plan's ranking, with its step time relative to the fastest plan's."""
    if name == FLOPS_BASELINE:
        description = "ranks divided among units in proportion to FLOPs"
    else:
        description = PARTITION_RULES[name].description
    return Alternative(
        summary=f"{name} baseline, {baseline.layout.summary}",
        placement=baseline.layout.placement,
        step_time_s=baseline.step_time_s,
        peak_memory_gib=round(baseline.peak_bytes / GIB, 4),
        reason=f"{baseline.step_time_s / fastest_s:.2f}x slower: {description}",
    )
