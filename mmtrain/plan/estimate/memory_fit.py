"""Layouts within memory: recompute is turned on for as few layers as that takes, where the recipe leaves it open."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from mmtrain.costs import Hardware, RankMemory
from mmtrain.costs.hardware import GIB
from mmtrain.costs.rank_memory import MARGIN
from mmtrain.plan.artifact.layout import Layout
from mmtrain.plan.estimate.layer_costs import Line, Pricing, sizes_of
from mmtrain.plan.estimate.recompute import least_recompute
from mmtrain.plan.search.layer_partition import Cuts, graph_for, laid_out
from mmtrain.plan.search.mesh_enumeration import Sizing
from mmtrain.program.ir.graph import Stage, StageGraph, StageId

TRIES = 4  # rounds: what a recomputed layer's backward needs for a while may take the place of what was saved


@dataclass(frozen=True)
class Fitted:
    """A layout that fits."""

    layout: Layout
    graph: StageGraph
    memory: Mapping[int, RankMemory]  # ranks of the first replica


@dataclass(frozen=True)
class Misfit:
    """Why a layout does not fit, whatever is recomputed."""

    need_gib: float
    reason: str


def fitted(
    sizing: Sizing, pricing: Pricing, cuts: Cuts, machine: Hardware, alive: Mapping[StageId, int]
) -> Fitted | Misfit:
    """Lay out one cut and recompute what memory demands, on each rank in the least time; or say why it cannot fit.

    alive: microbatches that each stage holds.
    """
    again: dict[str, frozenset[int]] = {}
    demanded: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for _ in range(TRIES):
        layout = laid_out(sizing, pricing, cuts, again)
        graph = graph_for(layout, pricing)
        memory = pricing.memory(graph, alive)
        over = {s.tp_groups[0]: memory[s.tp_groups[0][0]].total - machine.memory_bytes for s in graph.stages}
        if max(over.values()) <= 0:
            return Fitted(layout, graph, memory)
        if not any(pricing.recompute[m.unit] == "auto" for m in graph.meshes):
            break
        for tp_group, excess in over.items():
            if excess > 0:
                demanded[tp_group] += excess / (1 + MARGIN)
        found = _recomputed(graph, pricing, demanded, alive)
        if found is None:
            least = pricing.memory(graph_for(laid_out(sizing, pricing, cuts, _all_layers(pricing)), pricing), alive)
            memory = min(memory, least, key=lambda held: max(m.total for m in held.values()))
            break
        again = found
    return misfit(pricing, memory, machine)


def _all_layers(pricing: Pricing) -> dict[str, frozenset[int]]:
    """All that may be recomputed, by unit."""
    free = (unit for unit in pricing.shape.units if pricing.recompute[unit.name] == "auto")
    return {unit.name: frozenset(range(len(unit.layers))) for unit in free}


def _recomputed(
    graph: StageGraph, pricing: Pricing, demanded: Mapping[tuple[int, ...], float], alive: Mapping[StageId, int]
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
            line = _line(graph, pricing, stage)
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


def _line(graph: StageGraph, pricing: Pricing, stage: Stage) -> Line:
    return pricing.line(stage.id.unit, graph.mesh(stage.id.unit).tp, sizes_of(graph))


def misfit(pricing: Pricing, memory: Mapping[int, RankMemory], machine: Hardware) -> Misfit:
    """What a layout that is too large needs, and for what."""
    rank = max(memory, key=lambda r: memory[r].total)
    need, limit, binding = memory[rank].total / GIB, machine.memory_bytes / GIB, memory[rank].binding
    share = memory[rank].by_kind()[binding] / GIB
    most = " with all layers recomputed that may be" if "auto" in pricing.recompute.values() else ""
    return Misfit(
        need,
        f"does not fit{most}: rank {rank} needs {need:.3g} of {limit:.3g} GiB, most of it {binding} ({share:.3g} GiB)",
    )
