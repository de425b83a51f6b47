"""Write the order of a colocated layout's program: encoder layers between the LLM's forwards and backwards.

An encoder's pp and tp divide the LLM's, so every LLM replica has m encoder replicas on blocks of its ranks. Their
microbatches and the LLM's meet in blocks (`StageGraph.sources`): a forward must end before the LLM starts the first
microbatch of its block, a backward starts when the LLM has ended the last one. So all replicas of an encoder do the
same work at the same time, and replicas on the same pipeline ranks have one order.

A generator on the LLM's ranks is a part of the LLM's work here: `simulate_llm_alone` orders its passes, since the LLM
waits for them.

Encoder layers fill the gaps between the LLM's actions. Where the graph's layers are split into pieces, encoder pieces
also fill the gaps inside the LLM's layers, and an encoder communicates while the LLM computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from mmtrain.costs import Hardware
from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.planning.colocated.bubble_schedule import (
    EncoderPlan,
    EncoderSchedule,
    EncoderWork,
    LlmTimeline,
    schedule_encoders,
)
from mmtrain.planning.colocated.bubbles import FloatArray
from mmtrain.planning.colocated.emit_order import TimedPass, emit_rank_order
from mmtrain.planning.colocated.llm_alone import find_bubbles, simulate_llm_alone, with_delayed_forwards
from mmtrain.planning.colocated.stage_kernels import DIRECTIONS, GraphSegments, StageKernels, StagePass, stage_kernels
from mmtrain.planning.evaluate.layout_simulation import simulate_first_batch
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.program.ir.actions import Backward, Compute, Forward
from mmtrain.program.ir.graph import LLM, Microbatch, StageGraph, StageId, UnitMesh, microbatches_per_block
from mmtrain.program.trace.timeline import Span, Timeline

RankOrders = dict[int, tuple[str, ...]]  # by rank, its forwards and backwards as text


@dataclass(frozen=True)
class _RankPasses:
    """The passes of all ranks; ranks of a TP group mostly share theirs."""

    passes: list[TimedPass] = field(default_factory=list)
    by_rank: dict[int, list[int]] = field(default_factory=dict)  # indices of `passes`

    def add(self, timed_pass: TimedPass, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.by_rank.setdefault(rank, []).append(len(self.passes))
        self.passes.append(timed_pass)


def plan_encoder_order(
    graph: StageGraph,
    layer_costs: LayerCosts,
    machine: Hardware,
    *,
    max_ahead: int | None = None,
    llm_alone: Timeline | None = None,
) -> RankOrders:
    """Put the encoders of a colocated graph into the bubbles of its LLM, for microbatches of mean cost.

    Args:
        graph: the layout's stage graph, with layers or pieces of layers as segments.
        layer_costs: costs of the model on the sampled batches.
        machine: the hardware.
        max_ahead: microbatches by which an encoder's forward may be ahead of the LLM's forward, and its backward behind
            the LLM's backward. A smaller number holds fewer activations, but the LLM waits for work that finds no
            bubble so close to it. None: any number.
        llm_alone: what `simulate_llm_alone` returns for the same LLM, to save simulating it again.
    """
    llm_alone = llm_alone or simulate_llm_alone(graph, layer_costs, machine)
    segments = GraphSegments.of(graph, layer_costs)
    spans = with_delayed_forwards(graph, llm_alone)
    llm = find_bubbles(graph, spans, segments.gaps)
    passes = _RankPasses()
    _add_llm_passes(passes, graph, spans)
    kernels = {
        (stage, kind): stage_kernels(costs, kind, segments.max_kernel_s)
        for (stage, kind), costs in segments.costs.items()
        if stage.unit in graph.encoders
    }
    encoders = [graph.mesh(unit) for unit in graph.encoders]
    schedules = schedule_encoders([_encoder_work(graph, kernels, llm, mesh) for mesh in encoders])
    for mesh, schedule in zip(encoders, schedules, strict=True):
        for timed_pass, ranks in _encoder_passes(graph, mesh, schedule, kernels, max_ahead):
            passes.add(timed_pass, ranks)
    order_of: dict[tuple[int, ...], tuple[str, ...]] = {}
    orders: RankOrders = {}
    for rank, indices in sorted(passes.by_rank.items()):
        key = tuple(indices)
        if key not in order_of:
            order_of[key] = tuple(emit_rank_order(graph, [passes.passes[i] for i in indices], segments.gaps))
        orders[rank] = order_of[key]
    return orders


def max_ahead_choices(llm_pp: int) -> tuple[int | None, ...]:
    """Return the values of `max_ahead` to try: fewer microbatches ahead hold fewer activations and take more time."""
    return None, 2 * llm_pp, 0


def scheduling_efficiency(
    graph: StageGraph, schedule: SchedulePlan, layer_costs: LayerCosts, machine: Hardware
) -> float | None:
    """Return the share of the encoders' compute that lies inside the LLM's own step; None if they compute nothing.

    That step takes as long as the LLM alone (Optimus' measure), and its first forward, before which parameters are
    gathered, starts when the LLM's does. It is taken of the first sampled batch.
    """
    alone = simulate_llm_alone(graph, layer_costs, machine)
    gather_s = min(span.start_s for span in alone.spans if isinstance(span.action, Compute))
    computes = [
        (span.action.stage.unit, span.start_s, span.duration_s)
        for span in simulate_first_batch(graph, schedule, layer_costs, machine).spans
        if isinstance(span.action, Compute)
    ]
    llm_start = min(start for unit, start, _ in computes if unit == LLM) - gather_s
    inside = total = 0.0
    for unit, start, seconds in computes:
        if unit in graph.encoders:
            overlap = min(start + seconds, llm_start + alone.step_time_s) - max(start, llm_start)
            inside += max(0.0, overlap)
            total += seconds
    return inside / total if total else None


def _add_llm_passes(passes: _RankPasses, graph: StageGraph, spans: Sequence[Span]) -> None:
    """Add the passes of LLM and generator on the ranks of the LLM's first replica, stage by stage."""
    by_rank_and_stage: dict[tuple[int, StageId], list[TimedPass]] = {}
    for span in spans:
        if isinstance(span.action, Forward | Backward):
            timed_pass = TimedPass(span.start_s, span.action, None)
            by_rank_and_stage.setdefault((span.rank, span.action.stage), []).append(timed_pass)
    mesh = graph.mesh(LLM)
    ranks_of_first = {tp_group[0]: tp_group for tp_group in (mesh.tp_group(p, 0) for p in range(mesh.pp))}
    for (first_rank, stage), of_stage in by_rank_and_stage.items():
        ranks_by_replica: dict[int, list[int]] = {}
        for rank in ranks_of_first[first_rank]:
            ranks_by_replica.setdefault(dict(graph.held_by(rank))[stage], []).append(rank)
        for timed_pass, (replica, ranks) in product(of_stage, ranks_by_replica.items()):
            mb = timed_pass.action.mb._replace(replica=replica)
            passes.add(timed_pass._replace(action=replace(timed_pass.action, mb=mb)), ranks)


def _encoder_work(
    graph: StageGraph, kernels: Mapping[StagePass, StageKernels], llm: LlmTimeline, mesh: UnitMesh
) -> EncoderWork:
    """Return what an encoder has to do, for one of its replicas on each block of the LLM's pipeline ranks."""
    per_block, llm_per_block = microbatches_per_block(mesh.num_microbatches, graph.mesh(LLM).num_microbatches)
    block_starts = llm.first_forwards.reshape(-1, llm_per_block).min(axis=1).repeat(per_block)
    block_ends = llm.last_backwards.reshape(-1, llm_per_block).max(axis=1).repeat(per_block)
    stages = [s.id for s in graph.stages if s.id.unit == mesh.unit]
    plan = EncoderPlan(
        pp=mesh.pp,
        forward=tuple((kernels[stage, "F"].kernels,) for stage in stages),
        backward=tuple((kernels[stage, "B"].kernels,) if graph.needs_backward(stage) else () for stage in stages),
    )
    num_pipelines = plan.num_pipelines(llm)
    deadlines = replace(
        llm, first_forwards=block_starts.repeat(num_pipelines), last_backwards=block_ends.repeat(num_pipelines)
    )
    return EncoderWork(deadlines, plan, np.arange(mesh.num_microbatches * num_pipelines) % num_pipelines)


def _encoder_passes(
    graph: StageGraph,
    mesh: UnitMesh,
    schedule: EncoderSchedule,
    kernels: Mapping[StagePass, StageKernels],
    max_ahead: int | None,
) -> Iterator[tuple[TimedPass, tuple[int, ...]]]:
    """Return what the ranks of the first LLM replica do for an encoder, within `max_ahead`, and the ranks of each."""
    num_pipelines = schedule.plan.num_pipelines(schedule.llm)
    replicas_per_pipeline = mesh.dp // graph.num_groups // num_pipelines
    llm_starts = schedule.llm.first_forwards[::num_pipelines]
    llm_ends = schedule.llm.last_backwards[::num_pipelines]
    for kind, placed_by_stage in zip(DIRECTIONS, (schedule.forward, schedule.backward), strict=True):
        for (pipeline, stage_index), placed in placed_by_stage.items():
            stage = StageId(mesh.unit, stage_index)
            # The stages of an encoder work on different microbatches at a time, too: earlier ones are further ahead.
            distance = None if max_ahead is None else max_ahead + mesh.pp - 1 - stage_index
            earliest = _times_before(llm_starts, distance)
            latest = -_times_before(-llm_ends[::-1], distance)[::-1]
            computes = placed.computes
            numbers, starts = placed.labels[computes] // num_pipelines, placed.spans[computes, 0]
            limited = np.maximum(starts, earliest[numbers]) if kind == "F" else np.minimum(starts, latest[numbers])
            rows = list(zip(limited.tolist(), numbers.tolist(), placed.kernel_index[computes].tolist(), strict=True))
            segments = kernels[stage, kind].segments
            for k in range(replicas_per_pipeline):
                replica = pipeline * replicas_per_pipeline + k
                ranks = mesh.tp_group(stage_index, replica)
                microbatches = [Microbatch(mesh.unit, replica, index) for index in range(mesh.num_microbatches)]
                actions = [Forward(stage, mb) if kind == "F" else Backward(stage, mb) for mb in microbatches]
                for start, index, kernel in rows:
                    yield TimedPass(start, actions[index], segments[kernel]), ranks


def _times_before(times: FloatArray, distance: int | None) -> FloatArray:
    """Return for each microbatch the time of the one `distance` before it; -inf where there is none, or no limit."""
    num_without = len(times) if distance is None else distance
    return np.concatenate([np.full(num_without, -np.inf), times])[: len(times)]
