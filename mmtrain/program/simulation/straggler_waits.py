"""What a step loses because ranks of one kind are not equally fast, as expected maxima over those that wait.

Nothing is drawn. Every rank of the simulator computes like the slowest of those that it meets at every microbatch: the
ranks of its replica group, and for single layers those with which it shares them. Where replica groups meet, the step
waits until the slowest of them has come.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mmtrain.costs.time_spread import TimeSpread, expected_maximum
from mmtrain.program.ir.graph import LLM, StageGraph

# Collectives of a block in each direction under tensor parallelism (Megatron-LM, arXiv 1909.08053), at each of which
# the ranks of a TP group wait for each other.
TP_WAITS_PER_LAYER = 2
# What a pipeline waits at each microbatch, over the expected maximum of its stages: a rank may be late where it was
# early before. Drawn steps of 1F1B have 0.32 to 0.75, for 2 to 32 ranks and 8 to 128 microbatches (measurements of
# 2026-11-29).
PIPELINE_WAIT_SHARE = 0.5


@dataclass(frozen=True)
class StragglerWaits:
    """Ratios of expected times to those of a rank with mean speed."""

    passes: Mapping[str, float]  # by unit: of the seconds of a forward or backward
    groups: float  # of the time at which the slowest replica group reaches a collective of all of them

    @property
    def has_any(self) -> bool:
        """Return whether anything waits."""
        return self.groups > 1 or any(ratio != 1 for ratio in self.passes.values())


def straggler_waits(
    graph: StageGraph, spread: TimeSpread, slowest_rank_ratio: float = 1.0, *, costs_hold_tp_waits: bool = False
) -> StragglerWaits:
    """Return what the ranks of a stage graph wait for.

    Differences between ranks cost every placement the same in all: the slowest rank of all keeps the step waiting. What
    the ranks of a replica group wait for each other is part of their passes, the rest is waited for by replica groups.

    Args:
        graph: the stages.
        spread: of the ranks' times.
        slowest_rank_ratio: by which the seconds of layers are multiplied already (`Hardware.slowest_rank_ratio`).
        costs_hold_tp_waits: the seconds of layers were measured on ranks of a TP group that waited for each other.
    """
    num_ranks, num_groups = graph.world_size, graph.num_groups
    num_together = num_ranks if graph.is_sharded else num_ranks // num_groups
    ratio_in_group = 1 + spread.ranks * expected_maximum(num_together)
    ratio_of_all = 1 + spread.ranks * expected_maximum(num_ranks)
    passes = {}
    for mesh in graph.meshes:
        in_layers = _wait_in_layers(graph, mesh.unit, spread, costs_hold_tp_waits)
        passes[mesh.unit] = ratio_in_group * (1 + in_layers + _wait_in_pipeline(graph, mesh.unit, spread))
    across = 0.0 if graph.is_sharded else _wait_of_replicas(graph, spread, num_groups)
    return StragglerWaits(
        {unit: ratio / slowest_rank_ratio for unit, ratio in passes.items()},
        ratio_of_all / ratio_in_group * (1 + across),
    )


def _wait_in_layers(graph: StageGraph, unit: str, spread: TimeSpread, costs_hold_tp_waits: bool) -> float:
    """Return the share of a pass that ranks wait which compute every layer together.

    Those that share weights (FSDP) gather a layer's while they compute the one before, so that a rank may be most of a
    layer behind the others before they wait: only what its layers are late in sum counts, beside what the ranks of its
    TP group wait for each other.
    """
    mesh = graph.mesh(unit)
    tp = 1 if costs_hold_tp_waits else mesh.tp
    num_waits = TP_WAITS_PER_LAYER if tp > 1 else 1
    in_group = spread.layers * math.sqrt(num_waits) * expected_maximum(tp * mesh.cp)
    return in_group if mesh.shard is None else in_group + _wait_of_replicas(graph, spread, mesh.num_replicas)


def _wait_in_pipeline(graph: StageGraph, unit: str, spread: TimeSpread) -> float:
    """Return the share of a pass that the stages of a pipeline wait for each other's microbatches.

    Ranks meet at every microbatch, but not while the pipeline fills and drains.
    """
    mesh = graph.mesh(unit)
    if mesh.shard is not None:
        return 0.0
    num_places = len({stage.tp_groups[0] for stage in graph.stages})
    deviation = spread.layers / math.sqrt(_layers_per_stage(graph, unit))
    steady_share = mesh.num_microbatches / (mesh.num_microbatches + num_places - 1)
    return PIPELINE_WAIT_SHARE * steady_share * deviation * expected_maximum(num_places)


def _wait_of_replicas(graph: StageGraph, spread: TimeSpread, count: int) -> float:
    """Return the share of the time between two meetings of so many replicas by which the slowest comes later."""
    mesh = graph.mesh(LLM)
    num_microbatches = 1 if graph.dispatches_items else mesh.num_microbatches
    num_layers = _layers_per_stage(graph, LLM) * mesh.vpp
    num_passes = 2 * num_layers * num_microbatches  # of layers, on one rank, forward and backward
    return spread.layers / math.sqrt(num_passes) * expected_maximum(count)


def _layers_per_stage(graph: StageGraph, unit: str) -> float:
    stages = [stage for stage in graph.stages if stage.id.unit == unit]
    return sum(hi - lo for lo, hi in (stage.layers for stage in stages)) / len(stages)
