"""What a stage's segments take, and the kernels that are made of them to be put into bubbles.

A segment computes and may end with a collective of tensor parallelism. In an encoder these are kernels to be placed; in
the LLM the collectives are gaps, in which the encoders' compute.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmtrain.costs import ComputeKind, PieceCost, TokenLoad
from mmtrain.costs.block_pieces import scale_pieces
from mmtrain.plan.colocated.bubbles import KernelSequence
from mmtrain.plan.estimate.layer_costs import BACKWARD, FORWARD, RECOMPUTE, BatchSplit, LayerCosts, batch_split_of
from mmtrain.program.ir.actions import Direction
from mmtrain.program.ir.graph import StageGraph, StageId
from mmtrain.program.ir.segments import segment_layers


@dataclass(frozen=True)
class StageKernels:
    """A stage's forward or backward as kernels, in the order in which they run."""

    kernels: KernelSequence
    segments: tuple[tuple[int, int], ...]  # of each that computes, what it is of the stage: [lo, hi); (0, 0) if none


@dataclass(frozen=True)
class CommunicationGap:
    """A time in a pass in which its rank computes nothing, from its begin on."""

    start: float
    end: float
    after: int  # segments that have been run by then


def segment_costs(layer_costs: LayerCosts, graph: StageGraph, stage: StageId, kind: Direction) -> tuple[PieceCost, ...]:
    """Mean seconds of a stage's segments for a microbatch, in the order in which they run."""
    held, mesh, spread = graph.stage(stage), graph.mesh(stage.unit), batch_split_of(graph)
    mean = layer_costs.unit_times(stage.unit, mesh.tp, spread).mean
    layers, needed = layer_costs.shape.unit(stage.unit).layers, layer_costs.input_grad[stage.unit]
    load = _mean_load(layer_costs, stage.unit, spread) if held.pieces else None
    found: list[PieceCost] = []
    for i in range(*held.layers):
        total = float(mean[i, FORWARD])
        if kind == "B":
            total = float(mean[i, BACKWARD] + (mean[i, RECOMPUTE] if i in held.recompute else 0.0))
        if load is None or held.pieces[i - held.layers[0]] == 1:
            found.append(PieceCost(total, 0.0))
            continue
        name: ComputeKind = "forward" if kind == "F" else "backward"
        pieces = layer_costs.costs.pieces(
            layers[i],
            mesh.tp,
            load,
            name,
            input_grad=needed[i],
            sp=held.sp,
        )
        found += scale_pieces(pieces, total)
    assert len(found) == len(segment_layers(graph, stage))
    return tuple(found if kind == "F" else found[::-1])


def compute_share(layer_costs: LayerCosts, unit: str, tp: int, spread: BatchSplit) -> float:
    """Share of a unit's forwards and backwards that is not spent on collectives between pieces of its layers."""
    load = _mean_load(layer_costs, unit, spread)
    layers = zip(layer_costs.shape.unit(unit).layers, layer_costs.input_grad[unit], strict=True)
    ways: tuple[ComputeKind, ComputeKind] = ("forward", "backward")
    each = [
        (count, piece)
        for (layer, needed), count in Counter(layers).items()
        for way in ways
        for piece in layer_costs.costs.pieces(layer, tp, load, way, input_grad=needed)
    ]
    total = sum(count * sum(piece) for count, piece in each)
    return sum(count * piece.compute_s for count, piece in each) / total if total else 1.0


def communication_gaps(costs: Sequence[PieceCost]) -> tuple[CommunicationGap, ...]:
    """The gaps between the segments of a pass."""
    found, clock = [], 0.0
    for at, (compute_s, collective_s) in enumerate(costs[:-1]):
        clock += compute_s
        if collective_s:
            found.append(CommunicationGap(clock, clock + collective_s, at + 1))
        clock += collective_s
    return tuple(found)


def stage_kernels(costs: Sequence[PieceCost], kind: Direction, grain_s: float) -> StageKernels:
    """Kernels of at most `grain_s` seconds each, where they are several segments with no collective between them."""
    durations: list[float] = []
    computes: list[bool] = []
    ranges: list[tuple[int, int]] = []
    for lo, hi, compute_s, collective_s in _joined(costs, grain_s):
        durations.append(compute_s)
        computes.append(True)
        ranges.append((lo, hi) if kind == "F" else (len(costs) - hi, len(costs) - lo))
        if collective_s:
            durations.append(collective_s)
            computes.append(False)
            ranges.append((0, 0))
    return StageKernels(KernelSequence.of(durations, computes), tuple(ranges))


def _joined(costs: Sequence[PieceCost], grain_s: float) -> Iterator[tuple[int, int, float, float]]:
    """Runs [lo, hi) of segments, what they compute, and the collective at their end."""
    lo, total = 0, 0.0
    for at, (compute_s, collective_s) in enumerate(costs):
        if at > lo and total + compute_s > grain_s:
            yield lo, at, total, 0.0
            lo, total = at, 0.0
        total += compute_s
        if collective_s or at == len(costs) - 1:
            yield lo, at + 1, total, collective_s
            lo, total = at + 1, 0.0


def _mean_load(layer_costs: LayerCosts, unit: str, spread: BatchSplit) -> TokenLoad:
    loads = layer_costs.microbatch_loads(unit, spread)
    columns = (loads.tokens, loads.sum_sq, loads.max_len, loads.num_sequences)
    return TokenLoad(*(round(float(np.mean(column))) for column in columns))
