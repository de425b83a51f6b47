"""Plans by folklore: baselines that stand in the ranking beside what the planner found, or are asked for.

All but `flops` cut the one pipeline of a `unified` plan by a rule. Each is taken at the fastest of a few sizes, fits
into memory as any plan does, and is simulated as any.
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

MESHES_PER_BASELINE_ROUND = 4  # meshes of which the fastest is taken, in the order of their lower bounds
MAX_BASELINE_ROUNDS = 12  # how often, until one of them fits
FLOPS_BASELINE = "flops"  # the rule that shares ranks out, instead of cutting a pipeline
# From a line of layers and the seconds of each one's forward on the mean microbatch to its bounds; None: impossible.
PartitionRule = Callable[[LayerChain, FloatArray], tuple[int, ...] | None]
PartitionedMeshes = tuple[MeshAssignment, tuple[LayerChain, ...], LayerPartition]


def megatron(chain: LayerChain, forward: FloatArray) -> tuple[int, ...] | None:
    """The LLM's layers evenly over all ranks, encoders in front of the first stage, a generator behind the last."""
    begin, end = _llm(chain)
    return _even(chain.num_chunks, begin, end, first=0, last=chain.bounds[-1])


def megatron_extra(chain: LayerChain, forward: FloatArray) -> tuple[int, ...] | None:
    """The encoders as a first stage of their own, the LLM's layers evenly over the others."""
    begin, end = _llm(chain)
    if begin == 0 or chain.num_chunks < 2:
        return None
    rest = _even(chain.num_chunks - 1, begin, end, first=begin, last=chain.bounds[-1])
    return None if rest is None else (0, *rest)


def balanced(chain: LayerChain, forward: FloatArray) -> tuple[int, ...] | None:
    """Forward and backward of the mean microbatch as even as can be over all chunks (Optimus' baseline)."""
    return min_max_partition(chain.costs.seconds.tolist(), chain.num_chunks)


def equal_parameters(chain: LayerChain, forward: FloatArray) -> tuple[int, ...] | None:
    """As many trained parameters in every part."""
    return min_max_partition((chain.costs.parameters + 1e-6).tolist(), chain.num_chunks)


def equal_layers(chain: LayerChain, forward: FloatArray) -> tuple[int, ...] | None:
    """As many layers in every part."""
    return min_max_partition([1.0] * len(chain.costs.seconds), chain.num_chunks)


def profile_only(chain: LayerChain, forward: FloatArray) -> tuple[int, ...] | None:
    """Measured forwards as even as can be: no backward, no recomputation, no messages (OmniBal's baseline)."""
    return min_max_partition(forward.tolist(), chain.num_chunks)


PARTITION_RULES: Mapping[str, PartitionRule] = {
    "megatron": megatron,
    "megatron-extra": megatron_extra,
    "balanced": balanced,
    "equal-parameters": equal_parameters,
    "equal-layers": equal_layers,
    "profile-only": profile_only,
}
BASELINES = (*PARTITION_RULES, FLOPS_BASELINE)


def _llm(chain: LayerChain) -> tuple[int, int]:
    at = chain.units.index(LLM)
    return chain.bounds[at], chain.bounds[at + 1]


def _even(parts: int, begin: int, end: int, first: int, last: int) -> tuple[int, ...] | None:
    """Cut [begin, end) into parts of as many layers; the outer ones also have what lies from `first`, and to `last`."""
    if end - begin < parts:
        return None
    inner = np.linspace(begin, end, parts + 1).round().astype(int).tolist()
    return (first, *inner[1:-1], last) if all(a < b for a, b in pairwise(inner)) else None


@dataclass(frozen=True)
class BaselinePlanner:
    """Makes baselines of the sizes that are searched, `assignments` with their bounds."""

    assignments: Sequence[tuple[float, MeshAssignment]]
    layer_costs: LayerCosts
    choices: Mapping[str, UnitChoices]
    machine: Hardware

    def all(self, within: float = math.inf) -> dict[str, Candidate]:
        """Every baseline that is possible and fits, by name, but for those that surely take more seconds a step."""
        found = {name: self.find(name, within) for name in BASELINES}
        return {name: judged for name, judged in found.items() if judged is not None}

    def asked(self, name: str) -> Candidate:
        """One baseline; PlanError where it is not possible or does not fit."""
        found = self.find(name)
        if found is None:
            raise PlanError(
                f"--baseline {name}: no plan by this rule is possible and fits; possible here: "
                f"{', '.join(self.all()) or 'none'}. Rules that cut a pipeline need `unified` plans with pp above 1, "
                f"`{FLOPS_BASELINE}` units on ranks of their own"
            )
        return found

    def find(self, name: str, within: float = math.inf) -> Candidate | None:
        """The baseline of this name at its fastest size, simulated.

        None where it is not possible or does not fit, or by its rating takes more than `within` seconds.
        """
        looks = self._in_proportion() if name == FLOPS_BASELINE else self._cut_by(PARTITION_RULES[name])
        for look in islice(looks, MAX_BASELINE_ROUNDS):
            rated = []
            for at, (assignment, chains, cuts) in enumerate(look):
                rating = float(self._estimator.estimate(assignment, chains, [cuts], [None] * len(chains))[0])
                if rating <= within:
                    rated.append((rating, at, assignment, cuts))
            for _, _, assignment, cuts in sorted(rated):
                found = fit_memory(
                    assignment, self.layer_costs, cuts, self.machine, self._estimator.in_flight(assignment, cuts)
                )
                if isinstance(found, FittedLayout):
                    return evaluate_layout(found.layout, self.layer_costs, self.machine, memory=found.memory)
        return None

    @cached_property
    def _estimator(self) -> StepTimeEstimator:
        """Rules share it, as they share sizes and with them orders."""
        return StepTimeEstimator(self.layer_costs, self.machine, NUM_ESTIMATED_REPLICA_GROUPS)

    def _cut_by(self, rule: PartitionRule) -> Iterator[list[PartitionedMeshes]]:
        """The `unified` sizes that look quickest, a few at a time; those of one pipeline rank have nothing to cut."""
        pipelines = [s for _, s in sorted(self.assignments, key=lambda entry: entry[0]) if s.placement == "unified"]
        found: list[PartitionedMeshes] = []
        for assignment in (s for s in pipelines if s.meshes[LLM].pp > 1 and not self._is_split(s)):
            (chain,) = layer_chains(assignment, self.layer_costs, self.choices)
            cuts = rule(chain, self._forward(assignment))
            if cuts is not None and is_partition_allowed(chain, cuts):
                found.append((assignment, (chain,), (cuts,)))
            if len(found) == MESHES_PER_BASELINE_ROUND:
                yield found
                found = []
        yield found

    def _in_proportion(self) -> Iterator[list[PartitionedMeshes]]:
        """Units on ranks of their own, as nearly as many as their FLOPs ask for as sizes come and fit."""
        apart = [s for _, s in self.assignments if s.placement == "disaggregated"]
        if not apart:
            return
        world_size = max(assignment.ranks for assignment in apart)
        bound = unit_time_bound(self.layer_costs, self.choices, self.machine)
        for assignments in assignments_near_shares(self.choices, self._shares(world_size), bound):
            found: list[PartitionedMeshes] = []
            for assignment in [s for s in assignments if not self._is_split(s)][:MESHES_PER_BASELINE_ROUND]:
                chains = layer_chains(assignment, self.layer_costs, self.choices)
                cuts = tuple(chain.anchor for chain in chains if chain.anchor is not None)
                if len(cuts) == len(chains):
                    found.append((assignment, chains, cuts))
            if found:
                yield found

    def _shares(self, world_size: int) -> dict[str, float]:
        """Ranks of each unit in proportion to its FLOPs on the drawn batches."""
        alone = tuple((name, 1, self.choices[LLM].batch) for name in self.choices)
        batches = range(len(self.layer_costs.batches.groups))
        flops = {
            name: sum(
                model_flops(self.layer_costs.shape, {name: self.layer_costs.microbatch_loads(name, alone).total(batch)})
                for batch in batches
            )
            for name in self.choices
        }
        return {name: world_size * own / sum(flops.values()) for name, own in flops.items()}

    def _forward(self, assignment: MeshAssignment) -> FloatArray:
        """(L,) seconds of each layer's forward for one microbatch of the LLM, mean over the batches."""
        own = [
            self.layer_costs.unit_times(name, size.tp, assignment.batch_split).mean[:, FORWARD]
            * assignment.num_microbatches[name]
            for name, size in assignment.meshes.items()
        ]
        return np.asarray(np.concatenate(own) / assignment.num_microbatches[LLM])

    def _is_split(self, assignment: MeshAssignment) -> bool:
        return split_tp_group_of(assignment, self.machine.ranks_per_node) is not None


def baseline_alternative(name: str, baseline: Candidate, fastest: float) -> Alternative:
    """A baseline in the ranking, under its name."""
    rule = "ranks shared out by FLOPs" if name == FLOPS_BASELINE else "cut by rule, whatever layers cost"
    return Alternative(
        summary=f"{name} baseline, {baseline.layout.summary}",
        placement=baseline.layout.placement,
        step_time_s=baseline.step_time_s,
        peak_memory_gib=round(baseline.peak_bytes / GIB, 4),
        reason=f"{baseline.step_time_s / fastest:.2f}x slower: {rule}",
    )
