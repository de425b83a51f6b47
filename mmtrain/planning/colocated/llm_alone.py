"""Simulate the LLM of a colocated layout without its encoders, and find the bubbles that encoders may use.

A generator on the LLM's ranks is a part of what is simulated: its passes lie between the LLM's forwards and backwards,
which wait for them, while encoders only have to be done before the LLM or to follow it.

Bubbles lie between the LLM's actions. Where the graph's layers are split into pieces, they also lie inside its layers,
while its tensor-parallel ranks communicate (the TP bubbles of Optimus, arXiv 2408.03505).

`delay_forwards` delays the LLM's forwards as far as its backwards allow, so that encoders before them have more time.
The simulated timeline of the LLM alone has every forward as early as its order lets it. Here each one is delayed until
right before its reader: first in the order of its rank, then also past backwards of its rank where that makes no
forward earlier, which shortens the warm-up (Optimus does so, too: arXiv 2408.03505). Backwards keep their starts, and
so do the passes of a generator, so the step takes no longer.
"""

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter

import numpy as np

from mmtrain.costs import Hardware
from mmtrain.planning.colocated.bubble_schedule import LlmTimeline
from mmtrain.planning.colocated.bubbles import TIME_ROUNDING, FreeTime
from mmtrain.planning.colocated.stage_kernels import DIRECTIONS, CommunicationGap, StagePass
from mmtrain.planning.evaluate.layout_simulation import PrecomputedTiming, model_timing
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.space.sample_batches import batch_split_of
from mmtrain.program.ir.actions import Backward, Compute, Forward, Pass, ReduceShared
from mmtrain.program.ir.graph import LLM, StageGraph, StageId, microbatches_per_block
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.segments import direction
from mmtrain.program.schedules.builder import in_flight_microbatches
from mmtrain.program.schedules.generator_order import order_with_generator
from mmtrain.program.schedules.lower import lower
from mmtrain.program.simulation.rank_equivalence import representative_ranks
from mmtrain.program.simulation.simulate import simulate
from mmtrain.program.trace.timeline import Span, Timeline

Interval = tuple[float, float]


def simulate_llm_alone(graph: StageGraph, layer_costs: LayerCosts, machine: Hardware) -> Timeline:
    """Simulate LLM and generator of one replica group without encoders, every microbatch of mean cost."""
    llm_graph = _without_encoders(graph)
    seconds = {
        stage: (float(stage_seconds.forward.mean()), float(stage_seconds.backward.mean()))
        for stage, stage_seconds in layer_costs.stage_seconds(graph).items()
        if stage.unit not in graph.encoders
    }
    loads = layer_costs.loads.of_group(batch_split_of(graph), 0, 0)
    model = model_timing(llm_graph, layer_costs, loads, machine)
    program = lower(_order_by_seconds(llm_graph, representative_ranks(llm_graph, model.link_class), seconds))
    return simulate(program, _MeanTiming(model, seconds), 1)


def _order_by_seconds(
    llm_graph: StageGraph, ranks: Sequence[int], seconds: Mapping[StageId, tuple[float, float]]
) -> Program:
    """Order the passes of LLM and generator, where these share ranks by what passes take."""
    orders = order_with_generator(llm_graph, ranks, lambda stage, kind: seconds[stage][DIRECTIONS.index(kind)])
    return Program(
        llm_graph,
        {
            rank: tuple(a for a in order if isinstance(a, Forward) or llm_graph.needs_backward(a.stage))
            for rank, order in orders.items()
        },
    )


def min_in_flight(graph: StageGraph) -> dict[StageId, int]:
    """Return the fewest microbatches that each stage must hold at once.

    The stages of LLM and generator hold what 1F1B holds. An encoder's stage holds its microbatches for as long as the
    LLM's stage that reads them.
    """
    counts = in_flight_microbatches(_without_encoders(graph))
    reading_stage = {edge.src.unit: edge.dst for edge in graph.edges if edge.crosses_units}
    for stage in (s.id for s in graph.stages if s.id.unit in graph.encoders):
        per_block, llm_per_block = microbatches_per_block(
            graph.mesh(stage.unit).num_microbatches, graph.mesh(LLM).num_microbatches
        )
        held = counts[reading_stage[stage.unit]] // llm_per_block * per_block if graph.needs_backward(stage) else 0
        counts[stage] = max(1, held)
    return counts


def with_delayed_forwards(graph: StageGraph, alone: Timeline) -> list[Span]:
    """Return what the first LLM replica does on one rank of each pipeline rank, its forwards as late as they can be."""
    mesh = graph.mesh(LLM)
    ranks = {mesh.tp_group(pipeline_rank, 0)[0] for pipeline_rank in range(mesh.pp)}
    spans = [s for s in alone.spans if s.rank in ranks and isinstance(s.action, Pass | ReduceShared)]
    start = delay_forwards(_without_encoders(graph), spans)
    return [s._replace(start_s=start[s.action]) if isinstance(s.action, Pass) else s for s in spans]


def find_bubbles(
    graph: StageGraph, spans: Sequence[Span], gaps_of: Mapping[StagePass, Sequence[CommunicationGap]]
) -> LlmTimeline:
    """Return the LLM's free times, and when it starts and ends each microbatch at the first stage an encoder enters.

    Ranks are free while the LLM's parameters are gathered, before its first forward, and while its gradients are
    reduced, behind its last backward.

    Args:
        graph: the layout's stage graph.
        spans: what `with_delayed_forwards` returns.
        gaps_of: when a rank communicates inside each of the LLM's passes.
    """
    mesh = graph.mesh(LLM)
    pipeline_rank = {mesh.tp_group(p, 0)[0]: p for p in range(mesh.pp)}
    busy: list[set[Interval]] = [set() for _ in range(mesh.pp)]
    link_busy: list[set[Interval]] = [set() for _ in range(mesh.pp)]
    for span in spans:
        start, end = span.start_s, span.start_s + span.duration_s
        p = pipeline_rank[span.rank]
        if isinstance(span.action, Compute):
            gaps = gaps_of[span.action.stage, direction(span.action)]  # none of a generator
            link_busy[p].update((start + gap.start, start + gap.end) for gap in gaps)
            bounds = [start, *(start + t for gap in gaps for t in (gap.start, gap.end)), end]
            busy[p].update((lo, hi) for lo, hi in zip(bounds[::2], bounds[1::2], strict=True) if hi > lo)
        elif end > start:
            busy[p].add((start, end))
    busy_arrays = [np.array(sorted(intervals)).reshape(-1, 2) for intervals in busy]
    link_arrays = [np.array(sorted(intervals)).reshape(-1, 2) for intervals in link_busy]
    end = max((float(intervals[-1, 1]) for intervals in busy_arrays if len(intervals)), default=0.0)
    first_forwards, last_backwards = _entry_times(graph, spans)
    return LlmTimeline(
        free_times=tuple(itertools.starmap(FreeTime.around, zip(busy_arrays, link_arrays, strict=True))),
        end=end,
        first_forwards=first_forwards,
        last_backwards=np.where(last_backwards < 0, end, last_backwards),
    )


def _entry_times(graph: StageGraph, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    """Return (microbatches,) when the LLM's stages that encoders enter first start, and last end, each microbatch.

    Infinite where there is no forward, or no backward.
    """
    entered = {edge.dst for edge in graph.edges if edge.crosses_units and edge.dst.unit == LLM}
    first = np.full(graph.mesh(LLM).num_microbatches, np.inf)
    last = np.full(graph.mesh(LLM).num_microbatches, -np.inf)
    for span in spans:
        if isinstance(span.action, Compute) and span.action.stage in entered:
            index = span.action.mb.index
            if isinstance(span.action, Forward):
                first[index] = min(first[index], span.start_s)
            else:
                last[index] = max(last[index], span.start_s + span.duration_s)
    return first, last


@dataclass(frozen=True)
class _MeanTiming(PrecomputedTiming):
    """Timing with the same seconds for every microbatch of a stage."""

    seconds: Mapping[StageId, tuple[float, float]]  # forward, backward

    def compute(self, action: Compute) -> float:
        """Return the mean seconds of the stage."""
        forward, backward = self.seconds[action.stage]
        return forward if isinstance(action, Forward) else backward


def _without_encoders(graph: StageGraph) -> StageGraph:
    """Return a graph without encoders; its stages keep their backwards where only an encoder before them trains.

    Its passes are whole: none is cut between buckets of layers.
    """
    rest = graph.only({mesh.unit for mesh in graph.meshes}.difference(graph.encoders))
    stages = (replace(s, trainable=graph.needs_backward(s.id), bucket_starts=(0,)) for s in rest.stages)
    return replace(rest, stages=tuple(stages))


def delay_forwards(graph: StageGraph, spans: Sequence[Span]) -> dict[Pass, float]:
    """Return the starts of all forwards, delayed, and backwards on some ranks of a pipeline.

    Args:
        graph: the LLM's pipeline, with a generator on its ranks or without.
        spans: of one rank for each pipeline rank, in the order of their start.
    """
    simulated = {span.action: span for span in spans if isinstance(span.action, Forward | Backward)}
    lags = _min_lags(graph, simulated)
    in_order = _delayed_starts(graph, simulated, lags, past_backwards=False)
    out_of_order = _delayed_starts(graph, simulated, lags, past_backwards=True)
    none_is_earlier = all(out_of_order[action] >= start - TIME_ROUNDING for action, start in in_order.items())
    return out_of_order if none_is_earlier else in_order


def _delayed_starts(
    graph: StageGraph, simulated: Mapping[Pass, Span], lags: Mapping[StageId, float], *, past_backwards: bool
) -> dict[Pass, float]:
    """Move every forward to the latest time that is free on its rank, from the last forward to the first.

    The reader of a forward, and what follows it on its rank, started later, so their final starts are already known.
    """
    starts: dict[Pass, float] = {action: span.start_s for action, span in simulated.items()}
    free: dict[int, list[Interval]] = {span.rank: [(-inf, inf)] for span in simulated.values()}
    if past_backwards:
        for action, span in simulated.items():
            if not _may_move(action):
                _use(free[span.rank], span.start_s, span.duration_s)
    for action, span in sorted(simulated.items(), key=lambda item: -item[1].start_s):
        if _may_move(action):
            read_s = _first_read(graph, action, starts)
            due = span.start_s + span.duration_s if read_s is None else read_s - lags[action.stage]
            intervals = free[span.rank]
            num_before = bisect_right(intervals, due, key=itemgetter(0))  # no interval that starts later holds it
            latest = next(intervals[i] for i in range(num_before - 1, -1, -1) if _fits(intervals[i], due, span))
            starts[action] = min(latest[1], due) - span.duration_s
            if past_backwards:
                _use(intervals, starts[action], span.duration_s)
        if not past_backwards:
            free[span.rank] = [(-inf, starts[action])]
    return starts


def _fits(interval: Interval, due: float, span: Span) -> bool:
    """Return whether a span can run in an interval and end when it is due."""
    return min(interval[1], due) - span.duration_s >= interval[0]


def _use(free: list[Interval], start: float, duration: float) -> None:
    """Remove a time from the free interval that holds it."""
    i = bisect_right(free, start, key=itemgetter(0)) - 1
    lo, hi = free[i]
    free[i : i + 1] = [(lo, start), (start + duration, hi)]


def _may_move(action: Pass) -> bool:
    return isinstance(action, Forward) and action.stage.unit == LLM


def _first_read(graph: StageGraph, forward: Pass, starts: Mapping[Pass, float]) -> float | None:
    """Return when the first pass starts that waits for a forward; None if there is none.

    That is the next stage's forward, behind the LLM's last stage the generator's, or the stage's own backward.
    """
    edges = graph.outputs(forward.stage)
    readers: list[Pass] = [Forward(edge.dst, mb) for edge in edges for mb in graph.destinations(edge, forward.mb)]
    readers = readers or [Backward(forward.stage, forward.mb)]
    return min((starts[reader] for reader in readers if reader in starts), default=None)


def _min_lags(graph: StageGraph, simulated: Mapping[Pass, Span]) -> dict[StageId, float]:
    """Return the least seconds between a stage's forward and its reader, over all microbatches.

    Other microbatches wait for the rank as well; the least lag is that of the message alone.
    """
    starts = {action: span.start_s for action, span in simulated.items()}
    lags: dict[StageId, float] = defaultdict(lambda: inf)
    for action, span in simulated.items():
        read_s = _first_read(graph, action, starts) if _may_move(action) else None
        if read_s is not None:
            lags[action.stage] = min(lags[action.stage], read_s - span.start_s - span.duration_s)
    return lags
