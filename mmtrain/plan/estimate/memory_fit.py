"""Layouts within memory: recompute is turned on for as few layers as that takes, where the recipe leaves it open."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from mmtrain.costs import Hardware, RankMemory
from mmtrain.costs.hardware import GIB
from mmtrain.costs.rank_memory import MEMORY_MARGIN
from mmtrain.plan.artifact.layout import Layout
from mmtrain.plan.estimate.layer_costs import LayerCosts, UnitLayerCosts, batch_split_of
from mmtrain.plan.estimate.recompute import least_recompute
from mmtrain.plan.search.layer_partition import LayerPartition, layout_graph, partitioned_layout
from mmtrain.plan.search.mesh_enumeration import MeshAssignment
from mmtrain.program.ir.graph import Stage, StageGraph, StageId

MAX_FIT_ROUNDS = 4  # rounds: what a recomputed layer's backward needs for a while may take the place of what was saved


@dataclass(frozen=True)
class FittedLayout:
    """A layout that fits."""

    layout: Layout
    graph: StageGraph
    memory: Mapping[int, RankMemory]  # ranks of the first replica


@dataclass(frozen=True)
class MemoryMisfit:
    """Why a layout does not fit, whatever is recomputed."""

    need_gib: float
    reason: str


def fit_memory(
    assignment: MeshAssignment,
    layer_costs: LayerCosts,
    cuts: LayerPartition,
    machine: Hardware,
    alive: Mapping[StageId, int],
) -> FittedLayout | MemoryMisfit:
    """Lay out one cut and recompute what memory demands, on each rank in the least time; or say why it cannot fit.

    alive: microbatches that each stage holds.
    """
    again: dict[str, frozenset[int]] = {}
    demanded: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for _ in range(MAX_FIT_ROUNDS):
        layout = partitioned_layout(assignment, layer_costs, cuts, again)
        graph = layout_graph(layout, layer_costs)
        memory = layer_costs.memory(graph, alive)
        over = {s.tp_groups[0]: memory[s.tp_groups[0][0]].total - machine.memory_bytes for s in graph.stages}
        if max(over.values()) <= 0:
            return FittedLayout(layout, graph, memory)
        if not any(layer_costs.recompute[m.unit] == "auto" for m in graph.meshes):
            break
        for tp_group, excess in over.items():
            if excess > 0:
                demanded[tp_group] += excess / (1 + MEMORY_MARGIN)
        found = _recomputed(graph, layer_costs, demanded, alive)
        if found is None:
            least = layer_costs.memory(
                layout_graph(partitioned_layout(assignment, layer_costs, cuts, _all_layers(layer_costs)), layer_costs),
                alive,
            )
            memory = min(memory, least, key=lambda held: max(m.total for m in held.values()))
            break
        again = found
    return explain_misfit(layer_costs, memory, machine)


def _all_layers(layer_costs: LayerCosts) -> dict[str, frozenset[int]]:
    """All that may be recomputed, by unit."""
    free = (unit for unit in layer_costs.shape.units if layer_costs.recompute[unit.name] == "auto")
    return {unit.name: frozenset(range(len(unit.layers))) for unit in free}


def _recomputed(
    graph: StageGraph, layer_costs: LayerCosts, demanded: Mapping[tuple[int, ...], float], alive: Mapping[StageId, int]
) -> dict[str, frozenset[int]] | None:
    """Layers by unit whose recomputation saves what each TP group demands; None where one cannot."""
    chosen: defaultdict[str, set[int]] = defaultdict(set)
    for tp_group, nbytes in demanded.items():
        lots: list[tuple[Stage, list[int]]] = []
        saved, seconds = [], []
        working = working_again = 0.0
        for stage in graph.stages:
            if stage.tp_groups[0] != tp_group:
                continue
            line = _line(graph, layer_costs, stage)
            here = slice(*stage.layers)
            working = max(working, line.working_bytes[here].max())
            working_again = max(working_again, line.working_again[here].max())
            by_kind: defaultdict[int, list[int]] = defaultdict(list)
            for at in range(*stage.layers):
                by_kind[int(line.kind[at])].append(at)
            for layers in by_kind.values():
                lots.append((stage, layers))
                saved.append(float(line.saved_bytes[layers[0]]) * alive[stage.id])
                share = graph.mesh(stage.id.unit).num_microbatches
                seconds.append(float(line.again[layers[0]]) * share)
        excess = nbytes + working_again - working
        counts = least_recompute(saved, seconds, [len(layers) for _, layers in lots], excess)
        if counts is None:
            return None
        for (stage, layers), count in zip(lots, counts, strict=True):
            chosen[stage.id.unit].update(layers[:count])
    return {unit: frozenset(layers) for unit, layers in chosen.items()}


def _line(graph: StageGraph, layer_costs: LayerCosts, stage: Stage) -> UnitLayerCosts:
    return layer_costs.unit_costs(stage.id.unit, graph.mesh(stage.id.unit).tp, batch_split_of(graph))


def explain_misfit(layer_costs: LayerCosts, memory: Mapping[int, RankMemory], machine: Hardware) -> MemoryMisfit:
    """What a layout that is too large needs, and for what."""
    rank = max(memory, key=lambda r: memory[r].total)
    need, limit, binding = memory[rank].total / GIB, machine.memory_bytes / GIB, memory[rank].binding
    share = memory[rank].by_kind()[binding] / GIB
    most = " with all layers recomputed that may be" if "auto" in layer_costs.recompute.values() else ""
    return MemoryMisfit(
        need,
        f"does not fit{most}: rank {rank} needs {need:.3g} of {limit:.3g} GiB, most of it {binding} ({share:.3g} GiB)",
    )
