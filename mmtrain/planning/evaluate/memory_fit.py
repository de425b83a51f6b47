"""Layouts that fit into memory: where the recipe leaves recompute open, as few layers are recomputed as that takes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mmtrain.costs import RankMemory
from mmtrain.costs.hardware import GIB
from mmtrain.costs.rank_memory import MEMORY_MARGIN
from mmtrain.planning.artifact.graph_memory import MemoryPhase, memory_phases
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.layer_partition import layout_graph, partitioned_layout
from mmtrain.planning.layer_costs.recompute import least_recompute
from mmtrain.planning.space.budget import DEFAULT_BUDGET, EvaluationBudget
from mmtrain.planning.space.candidate import FittedLayout, LayerPartition, MeshAssignment
from mmtrain.planning.space.sample_batches import batch_split_of
from mmtrain.program.ir.graph import Stage, StageGraph, StageId

NOTHING_KNOWN: Mapping[int, float] = {}


class RankLimits(NamedTuple):
    """What ranks may hold, if a rank holds so many times what is counted for it (1 where that is not known)."""

    memory_bytes: float
    ratio_by_rank: Mapping[int, float]

    def counted_bytes(self, rank: int) -> float:
        """Return the bytes that may be counted for a rank."""
        return self.memory_bytes / self.ratio_by_rank.get(rank, 1.0)

    def fullest_share(self, memory: Mapping[int, RankMemory]) -> float:
        """Return what the fullest rank needs of what it may hold; above 1 it does not fit."""
        return max(of_rank.total / self.counted_bytes(rank) for rank, of_rank in memory.items())


@dataclass(frozen=True)
class MemoryMisfit:
    """Why a layout does not fit, whatever is recomputed."""

    need_gib: float | None  # of the fullest rank on its device; None where host memory is too small
    reason: str


def fit_memory(
    assignment: MeshAssignment,
    partition: LayerPartition,
    layer_costs: LayerCosts,
    memory_bytes: float,
    num_in_flight: Mapping[StageId, int],
    budget: EvaluationBudget = DEFAULT_BUDGET.evaluation,
    ratio_by_rank: Mapping[int, float] = NOTHING_KNOWN,
) -> FittedLayout | MemoryMisfit:
    """Recompute the layers that memory demands, on each rank in the least time; or say why the layout cannot fit.

    memory_bytes: of a rank. num_in_flight: microbatches of each stage between forward and backward, at most.
    ratio_by_rank: what a rank holds beside what is counted for it; 1 where it is not known.

    Buffers of whole units take the room of what later layers kept, so recomputation rarely adds to them. We first try
    without adding them.
    """
    limits = RankLimits(memory_bytes, ratio_by_rank)
    arguments = (assignment, partition, layer_costs, limits, num_in_flight, budget)
    if assignment.placement == "replicated":
        fit = _fit_memory(*arguments, recompute_adds_buffers=False)
        if isinstance(fit, FittedLayout):
            return fit
    return _fit_memory(*arguments, recompute_adds_buffers=True)


def _fit_memory(
    assignment: MeshAssignment,
    partition: LayerPartition,
    layer_costs: LayerCosts,
    limits: RankLimits,
    num_in_flight: Mapping[StageId, int],
    budget: EvaluationBudget,
    recompute_adds_buffers: bool,
) -> FittedLayout | MemoryMisfit:
    """Do as `fit_memory`; `recompute_adds_buffers`: whether recomputed layers are taken to need larger buffers."""
    recompute: dict[str, frozenset[int]] = {}
    # By phase and by the first rank of each pipeline rank, whose other ranks hold as much.
    to_save: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for _ in range(budget.max_fit_rounds):
        layout = partitioned_layout(assignment, layer_costs, partition, recompute)
        graph = layout_graph(layout, layer_costs)
        phases = memory_phases(graph, num_in_flight)
        of_phases = [layer_costs.phase_memory(graph, phase) for phase in phases]
        memory = max(of_phases, key=limits.fullest_share)
        if limits.fullest_share(memory) <= 1:
            return within_host_memory(FittedLayout(layout, graph, memory), layer_costs.host_memory_bytes)
        if not any(layer_costs.recompute[mesh.unit] == "auto" for mesh in graph.meshes):
            break
        for phase, of_phase in enumerate(of_phases):
            for first_rank in dict.fromkeys(stage.tp_groups[0][0] for stage in graph.stages):
                excess_bytes = of_phase[first_rank].total - limits.counted_bytes(first_rank)
                if excess_bytes > 0:
                    to_save[phase][first_rank] += excess_bytes / (1 + MEMORY_MARGIN)
        enough = [
            _layers_to_recompute(graph, layer_costs, of_phase, phases[phase], budget, recompute_adds_buffers)
            for phase, of_phase in to_save.items()
        ]
        if None in enough:
            recomputing_layout = partitioned_layout(assignment, layer_costs, partition, _all_free_layers(layer_costs))
            least_memory = layer_costs.memory(layout_graph(recomputing_layout, layer_costs), num_in_flight)
            memory = min(memory, least_memory, key=limits.fullest_share)
            break
        recompute = _joined(layers for layers in enough if layers is not None)
    return explain_misfit(layer_costs, memory, limits.memory_bytes)


def within_host_memory(fitted: FittedLayout, host_memory_bytes: float) -> FittedLayout | MemoryMisfit:
    """Return the layout if its activations, and copies of its state, have room in host memory."""
    rank = max(fitted.memory, key=lambda r: fitted.memory[r].on_host)
    fullest = fitted.memory[rank]
    need_bytes = fullest.on_host
    if need_bytes <= host_memory_bytes:
        return fitted
    return MemoryMisfit(
        None,
        f"rank {rank} keeps {need_bytes / GIB:.3g} GiB of {fullest.on_host_text} in host memory, of which it may use "
        f"{host_memory_bytes / GIB:.3g} GiB (cluster.host_memory_gib)",
    )


def _joined(layers_of_phases: Iterable[Mapping[str, frozenset[int]]]) -> dict[str, frozenset[int]]:
    """Return by unit the layers that any phase of a step needs recomputed."""
    joined: dict[str, frozenset[int]] = {}
    for of_phase in layers_of_phases:
        for unit, layers in of_phase.items():
            joined[unit] = joined.get(unit, frozenset()) | layers
    return joined


def explain_misfit(layer_costs: LayerCosts, memory: Mapping[int, RankMemory], memory_bytes: float) -> MemoryMisfit:
    """Return what a layout that is too large needs, and for what."""
    rank = max(memory, key=lambda r: memory[r].total)
    need_gib, margin_gib = memory[rank].total / GIB, memory[rank].margin / GIB
    kind = memory[rank].binding
    kind_gib = memory[rank].by_kind()[kind] / GIB
    condition = " with all layers recomputed that may be" if "auto" in layer_costs.recompute.values() else ""
    return MemoryMisfit(
        need_gib,
        f"does not fit{condition}: rank {rank} needs {need_gib - margin_gib:.3g} counted + {margin_gib:.3g} margin of "
        f"{memory_bytes / GIB:.3g} GiB, most of it {kind} ({kind_gib:.3g} GiB)",
    )


def _all_free_layers(layer_costs: LayerCosts) -> dict[str, frozenset[int]]:
    """Return every layer that the recipe lets the planner recompute, by unit."""
    free = (unit for unit in layer_costs.shape.units if layer_costs.recompute[unit.name] == "auto")
    return {unit.name: frozenset(range(len(unit.layers))) for unit in free}


def _layers_to_recompute(
    graph: StageGraph,
    layer_costs: LayerCosts,
    to_save: Mapping[int, float],
    phase: MemoryPhase,
    budget: EvaluationBudget,
    adds_buffers: bool,
) -> dict[str, frozenset[int]] | None:
    """Return layers by unit whose recomputation saves what each rank must; None where one cannot save enough.

    to_save: bytes by the first rank of each pipeline rank.
    adds_buffers: whether recomputed layers are taken to need larger buffers than others.
    """
    chosen: defaultdict[str, set[int]] = defaultdict(set)
    for first_rank, nbytes in to_save.items():
        kinds: list[tuple[Stage, list[int]]] = []  # layers of one stage and kind
        saved_bytes, seconds = [], []
        working = recompute_working = 0.0
        for stage in graph.stages:
            if stage.tp_groups[0][0] != first_rank:
                continue
            mesh = graph.mesh(stage.id.unit)
            costs = layer_costs.unit_costs(stage.id.unit, mesh.tp, batch_split_of(graph))
            held = slice(*stage.layers)
            if stage.id in phase.computed and adds_buffers:
                working = max(working, costs.working_bytes[held].max())
                recompute_working = max(recompute_working, costs.recompute_working_bytes[held].max())
            by_kind: defaultdict[int, list[int]] = defaultdict(list)
            for layer in range(*stage.layers):
                by_kind[int(costs.kind[layer])].append(layer)
            for layers in by_kind.values():
                kinds.append((stage, layers))
                saved_bytes.append(float(costs.saved_bytes[layers[0]]) * phase.num_in_flight[stage.id])
                seconds.append(float(costs.recompute_seconds[layers[0]]) * mesh.num_microbatches)
        numbers = least_recompute(
            saved_bytes,
            seconds,
            [len(layers) for _, layers in kinds],
            nbytes + recompute_working - working,
            budget.max_recompute_combinations,
        )
        if numbers is None:
            return None
        for (stage, layers), number in zip(kinds, numbers, strict=True):
            chosen[stage.id.unit].update(layers[:number])  # the first layers' activations live longest
    return {unit: frozenset(layers) for unit, layers in chosen.items()}
