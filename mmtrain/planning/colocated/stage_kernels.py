"""Cost a stage's segments, and make kernels of them that can be placed in bubbles.

A segment computes and may end with a collective of tensor parallelism. An encoder's segments become kernels to place;
the collectives of the LLM's segments are gaps in which encoder kernels compute.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mmtrain.costs import ComputeKind, PieceCost, TokenLoad
from mmtrain.costs.block_pieces import scale_pieces
from mmtrain.costs.cost_model import LayerWork
from mmtrain.planning.colocated.bubbles import KernelSequence
from mmtrain.planning.layer_costs.layer_costs import BACKWARD, FORWARD, RECOMPUTE, LayerCosts
from mmtrain.planning.space.sample_batches import batch_split_of
from mmtrain.program.ir.actions import Direction
from mmtrain.program.ir.graph import LLM, StageGraph, StageId
from mmtrain.program.ir.segments import segment_layers

StagePass = tuple[StageId, Direction]  # all forwards, or all backwards, of a stage
DIRECTIONS: tuple[Direction, Direction] = ("F", "B")
_COMPUTE_KINDS: tuple[ComputeKind, ComputeKind] = ("forward", "backward")


@dataclass(frozen=True)
class StageKernels:
    """A stage's forward or backward as kernels, in the order in which they run."""

    kernels: KernelSequence
    segments: tuple[tuple[int, int], ...]  # by kernel: the stage's segments [lo, hi) that it runs; (0, 0) if collective


@dataclass(frozen=True)
class CommunicationGap:
    """A time in which a rank communicates inside a pass and computes nothing, from the start of the pass on."""

    start: float
    end: float
    num_segments_before: int  # that the pass has run when the gap starts


@dataclass(frozen=True)
class GraphSegments:
    """What the segments of a colocated graph's stages cost, and where the LLM's leave room for kernels."""

    costs: Mapping[StagePass, tuple[PieceCost, ...]]
    gaps: Mapping[StagePass, tuple[CommunicationGap, ...]]  # of the LLM's passes; a generator's are () each
    max_kernel_s: float  # of a kernel of the encoders, so that it fits into a gap

    @classmethod
    def of(cls, graph: StageGraph, layer_costs: LayerCosts) -> "GraphSegments":
        """Cost the segments of all stages."""
        costs = {
            (stage.id, kind): segment_costs(layer_costs, graph, stage.id, kind)
            for stage in graph.stages
            for kind in DIRECTIONS
        }
        cut_s = layer_costs.costs.cut()
        gaps = {
            key: communication_gaps(segments, cut_s) if key[0].unit == LLM else ()
            for key, segments in costs.items()
            if key[0].unit not in graph.encoders
        }
        longest_gap_s = max((gap.end - gap.start for in_pass in gaps.values() for gap in in_pass), default=0.0)
        return cls(costs, gaps, longest_gap_s * layer_costs.budget.colocated.max_kernel_share_of_gap)


def segment_costs(layer_costs: LayerCosts, graph: StageGraph, stage: StageId, kind: Direction) -> tuple[PieceCost, ...]:
    """Return mean seconds of a stage's segments for a microbatch, in the order in which they run."""
    node, tp, split = graph.stage(stage), graph.mesh(stage.unit).tp, batch_split_of(graph)
    mean = layer_costs.unit_times(stage.unit, tp, split).mean
    layers, input_grad = layer_costs.shape.unit(stage.unit).layers, layer_costs.input_grad[stage.unit]
    load = layer_costs.loads.of_unit(stage.unit, split).mean() if node.pieces else None
    segments: list[PieceCost] = []
    for i in range(*node.layers):
        total_s = float(mean[i, FORWARD])
        if kind == "B":
            total_s = float(mean[i, BACKWARD] + (mean[i, RECOMPUTE] if i in node.recompute else 0.0))
        if load is None or node.pieces[i - node.layers[0]] == 1:
            segments.append(PieceCost(total_s, 0.0))
            continue
        pieces = layer_costs.costs.pieces(
            LayerWork(
                layers[i],
                tp,
                load,
                "forward" if kind == "F" else "backward",
                input_grad=input_grad[i],
                split=layer_costs.token_split(stage.unit, tp),
            )
        )
        segments += scale_pieces(pieces, total_s)
    assert len(segments) == len(segment_layers(graph, stage))
    return tuple(segments if kind == "F" else segments[::-1])


def compute_share(layer_costs: LayerCosts, unit: str, tp: int, load: TokenLoad) -> float:
    """Return the share of a unit's passes of such a microbatch that is not spent on collectives inside its layers."""
    token_split = layer_costs.token_split(unit, tp)
    layers = zip(layer_costs.shape.unit(unit).layers, layer_costs.input_grad[unit], strict=True)
    counted_pieces = [
        (count, piece)
        for (layer, input_grad), count in Counter(layers).items()
        for kind in _COMPUTE_KINDS
        for piece in layer_costs.costs.pieces(LayerWork(layer, tp, load, kind, input_grad, token_split))
    ]
    total_s = sum(count * piece.total_s for count, piece in counted_pieces)
    return sum(count * piece.compute_s for count, piece in counted_pieces) / total_s if total_s else 1.0


def communication_gaps(segments: Sequence[PieceCost], cut_s: float) -> tuple[CommunicationGap, ...]:
    """Return the gaps between the segments of a pass, in the order of time.

    A pass that stops for other work loses `cut_s`, and what its own compute would hide of the collective. So there is a
    gap only where more is left than is lost.
    """
    gaps: list[CommunicationGap] = []
    clock = 0.0
    for i, segment in enumerate(segments[:-1]):
        clock += segment.compute_s
        gap_s = segment.collective_s - segment.hidden_s
        if gap_s > segment.hidden_s + cut_s:
            gaps.append(CommunicationGap(clock, clock + gap_s, i + 1))
        clock += gap_s
    return tuple(gaps)


def stage_kernels(segments: Sequence[PieceCost], kind: Direction, max_kernel_s: float) -> StageKernels:
    """Join segments with no collective between them to kernels of at most `max_kernel_s` seconds.

    A single segment that is longer stays a kernel of its own.
    """
    durations: list[float] = []
    computes: list[bool] = []
    ranges: list[tuple[int, int]] = []
    for lo, hi, compute_s, collective_s in _joined_segments(segments, max_kernel_s):
        durations.append(compute_s)
        computes.append(True)
        ranges.append((lo, hi) if kind == "F" else (len(segments) - hi, len(segments) - lo))
        if collective_s:
            durations.append(collective_s)
            computes.append(False)
            ranges.append((0, 0))
    return StageKernels(KernelSequence(tuple(durations), tuple(computes)), tuple(ranges))


def _joined_segments(segments: Sequence[PieceCost], max_kernel_s: float) -> Iterator[tuple[int, int, float, float]]:
    """Return runs [lo, hi) of segments, their compute seconds, and those of the collective at their end."""
    lo, total_s = 0, 0.0
    for i, segment in enumerate(segments):
        compute_s, collective_s = segment.compute_s, segment.collective_s
        if i > lo and total_s + compute_s > max_kernel_s:
            yield lo, i, total_s, 0.0
            lo, total_s = i, 0.0
        total_s += compute_s
        if collective_s or i == len(segments) - 1:
            yield lo, i + 1, total_s, collective_s
            lo, total_s = i + 1, 0.0
