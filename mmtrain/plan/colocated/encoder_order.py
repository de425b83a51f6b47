"""From a colocated layout to the order of its program: encoder layers between the LLM's forwards and backwards.

An encoder's replicas lie on blocks of the LLM's ranks: with `pp` dividing the LLM's and `tp` dividing its, every LLM
replica holds m of them. Their microbatches and the LLM's meet in blocks (`StageGraph.sources`): a forward must have
ended when the LLM starts the first microbatch of its block, a backward begins when it has ended the last one's. All
replicas of an encoder thus have the same work to do at the same time, and those on the same pipeline ranks one order.

Gaps are those between the LLM's actions, and layers what fills them. Where the graph's layers are cut into pieces,
gaps are also those inside the LLM's layers, while its ranks sum up what tensor parallelism has split (Optimus,
arXiv 2408.03505, section 4.3), and pieces fill them. What an encoder sums up moves while the LLM computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from mmtrain.costs import Hardware, PieceCost
from mmtrain.plan.colocated.bubble_schedule import EncoderPlan, EncoderSchedule, LlmTimeline, schedule_encoder
from mmtrain.plan.colocated.bubbles import FloatArray, FreeTime
from mmtrain.plan.colocated.emit_order import TimedPass, emit_rank_order
from mmtrain.plan.colocated.latest_forwards import delay_forwards
from mmtrain.plan.colocated.stage_kernels import StageKernels, communication_gaps, segment_costs, stage_kernels
from mmtrain.plan.estimate.evaluate import Candidate, PrecomputedTiming, model_timing, simulate_first_batch
from mmtrain.plan.estimate.layer_costs import LayerCosts, batch_split_of
from mmtrain.program.ir.actions import (
    Backward,
    Compute,
    Direction,
    Forward,
    Pass,
    ReduceGrads,
    ReduceShared,
)
from mmtrain.program.ir.graph import LLM, Microbatch, StageGraph, StageId, UnitMesh, microbatches_per_block
from mmtrain.program.ir.segments import direction
from mmtrain.program.schedules.builder import build_1f1b, in_flight_microbatches
from mmtrain.program.schedules.lower import lower
from mmtrain.program.simulation.simulate import simulate
from mmtrain.program.trace.timeline import Span, Timeline

RankOrders = dict[int, tuple[str, ...]]
StagePass = tuple[StageId, Direction]

MAX_PIECE_SHARE_OF_GAP = 0.5  # of the LLM's longest gap inside a layer: encoder pieces are joined up to that length
_DIRECTIONS: tuple[Direction, Direction] = ("F", "B")


def plan_encoder_order(
    graph: StageGraph,
    layer_costs: LayerCosts,
    machine: Hardware,
    *,
    ahead: int | None = None,
    alone: Timeline | None = None,
) -> RankOrders:
    """Put the encoders of a colocated graph into the bubbles of its LLM, for microbatches of mean cost.

    Args:
        graph: the layout's.
        layer_costs: what its layers cost.
        machine: what they run on.
        ahead: microbatches by which a forward may be ahead of the LLM's, and a backward behind it: fewer hold fewer
            activations, but what finds no bubble then makes the LLM wait in its midst. Default: any number.
        alone: `simulate_llm_alone` of the same LLM, to save its making.
    """
    alone = alone or simulate_llm_alone(graph, layer_costs, machine)
    costs = {
        (stage.id, kind): segment_costs(layer_costs, graph, stage.id, kind)
        for stage in graph.stages
        for kind in _DIRECTIONS
    }
    gaps = {key: communication_gaps(each) for key, each in costs.items() if key[0].unit == LLM}
    spans = _put_off(graph, alone)
    host, tasks = _host(graph, spans, costs), _llm_tasks(graph, spans)
    grain = max((gap.end - gap.start for each in gaps.values() for gap in each), default=0.0) * MAX_PIECE_SHARE_OF_GAP
    for mesh in (m for m in graph.meshes if m.unit != LLM):
        kernels = {key: stage_kernels(each, key[1], grain) for key, each in costs.items() if key[0].unit == mesh.unit}
        found = _schedule(graph, kernels, host, mesh)
        free = list(host.free_times)
        for (pipeline, stage), placed in chain(found.forward.items(), found.backward.items()):
            place = found.plan.place(pipeline, stage)
            free[place] = free[place].without(placed)
        host = replace(host, free_times=tuple(free))
        for rank, task in _encoder_tasks(graph, mesh, found, kernels, ahead):
            tasks[rank].append(task)
    once: dict[tuple[int, ...], tuple[str, ...]] = {}  # ranks of a TP group mostly have the same work
    for todo in tasks.values():
        if (same := tuple(map(id, todo))) not in once:
            once[same] = tuple(emit_rank_order(graph, todo, gaps))
    return {rank: once[tuple(map(id, todo))] for rank, todo in sorted(tasks.items())}


def scheduling_efficiency(judged: Candidate, layer_costs: LayerCosts, machine: Hardware) -> float | None:
    """Share of the encoders' compute that lies inside the LLM's own step, of the first drawn batch; None if apart.

    That step begins with the LLM's first forward and takes what the LLM takes by itself (Optimus' measure).
    """
    if judged.layout.placement != "colocated":
        return None
    graph = judged.graph
    alone = simulate_llm_alone(graph, layer_costs, machine).step_time_s
    work = [
        (span.action.stage.unit, span.start_s, span.duration_s)
        for span in simulate_first_batch(judged, layer_costs, machine).spans
        if isinstance(span.action, Compute)
    ]
    begin = min(start for unit, start, _ in work if unit == LLM)
    inside = total = 0.0
    for start, seconds in ((start, seconds) for unit, start, seconds in work if unit != LLM):
        first, last = max(start, begin), min(start + seconds, begin + alone)
        inside, total = inside + max(0.0, last - first), total + seconds
    return inside / total if total else None


# The LLM by itself -------------------------------------------------------------------------------------------------


def simulate_llm_alone(graph: StageGraph, layer_costs: LayerCosts, machine: Hardware) -> Timeline:
    """The LLM of one replica group without its encoders, every microbatch of mean cost."""
    only = _only_llm(graph)
    seconds = {
        sid: (float(s.forward.mean()), float(s.backward.mean()))
        for sid, s in layer_costs.stage_seconds(graph).items()
        if sid.unit == LLM
    }
    model = model_timing(only, layer_costs, layer_costs.loads(batch_split_of(graph))[0], machine)
    return simulate(lower(build_1f1b(only)), _MeanTiming(model, seconds), 1)


def min_in_flight(graph: StageGraph) -> dict[StageId, int]:
    """Microbatches that each stage holds at least: the LLM's as in 1F1B, an encoder's as long as the LLM holds them."""
    alive, llm = in_flight_microbatches(_only_llm(graph)), graph.mesh(LLM)
    entered = {e.src.unit: e.dst for e in graph.edges if e.crosses_units}
    for stage in (s.id for s in graph.stages if s.id.unit != LLM):
        own, per_block = microbatches_per_block(graph.mesh(stage.unit).num_microbatches, llm.num_microbatches)
        held = alive[entered[stage.unit]] // per_block * own if graph.needs_backward(stage) else 0
        alive[stage] = max(1, held)
    return alive


def _only_llm(graph: StageGraph) -> StageGraph:
    return replace(
        graph,
        meshes=(graph.mesh(LLM),),
        stages=tuple(
            replace(s, trainable=graph.needs_backward(s.id))  # also where only an encoder in front of it trains
            for s in graph.stages
            if s.id.unit == LLM
        ),
        edges=tuple(e for e in graph.edges if {e.src.unit, e.dst.unit} == {LLM}),
    )


@dataclass(frozen=True)
class _MeanTiming(PrecomputedTiming):
    """The same seconds for every microbatch."""

    seconds: Mapping[StageId, tuple[float, float]]  # forward, backward

    def compute(self, action: Compute) -> float:
        """Mean seconds of the stage."""
        forward, backward = self.seconds[action.stage]
        return forward if isinstance(action, Forward) else backward


def _put_off(graph: StageGraph, alone: Timeline) -> list[Span]:
    """What one rank of each place of the LLM's first replica does, its forwards as late as its backwards let them."""
    mesh = graph.mesh(LLM)
    ranks = {mesh.tp_group(place, 0)[0] for place in range(mesh.pp)}
    spans = [s for s in alone.spans if s.rank in ranks and isinstance(s.action, Pass | ReduceGrads | ReduceShared)]
    late = delay_forwards(_only_llm(graph), spans)
    return [s._replace(start_s=late[s.action]) if isinstance(s.action, Pass) else s for s in spans]


def _host(graph: StageGraph, spans: Sequence[Span], costs: Mapping[StagePass, Sequence[PieceCost]]) -> LlmTimeline:
    """The LLM's gaps, and when it starts and ends each microbatch at the first stage that an encoder enters."""
    mesh = graph.mesh(LLM)
    place = {mesh.tp_group(p, 0)[0]: p for p in range(mesh.pp)}
    busy: list[set[tuple[float, float]]] = [set() for _ in range(mesh.pp)]
    link: list[set[tuple[float, float]]] = [set() for _ in range(mesh.pp)]
    entered = {e.dst for e in graph.edges if e.crosses_units and e.dst.unit == LLM}
    first = np.full(mesh.num_microbatches, np.inf)
    last = np.full(mesh.num_microbatches, -np.inf)
    for span in spans:
        start, end = span.start_s, span.start_s + span.duration_s
        at = place[span.rank]
        if isinstance(span.action, Compute):
            inside = communication_gaps(costs[span.action.stage, direction(span.action)])
            link[at].update((start + gap.start, start + gap.end) for gap in inside)
            ends = [start, *(start + t for gap in inside for t in (gap.start, gap.end)), end]
            busy[at].update(pair for pair in zip(ends[::2], ends[1::2], strict=True) if pair[1] > pair[0])
        elif end > start:
            busy[at].add((start, end))
        if isinstance(span.action, Compute) and span.action.stage in entered:
            index = span.action.mb.index
            if isinstance(span.action, Forward):
                first[index] = min(first[index], start)
            else:
                last[index] = max(last[index], end)
    works, links = ([np.array(sorted(one)).reshape(-1, 2) for one in each] for each in (busy, link))
    end = max((float(one[-1, 1]) for one in works if len(one)), default=0.0)
    return LlmTimeline(
        tuple(FreeTime.around(*pair) for pair in zip(works, links, strict=True)),
        end,
        0.0,
        0.0,
        first,
        np.where(last < 0, end, last),
        0.0,
    )


def _llm_tasks(graph: StageGraph, spans: Sequence[Span]) -> dict[int, list[TimedPass]]:
    """The LLM's forwards and backwards on each rank of its first replica."""
    mesh = graph.mesh(LLM)
    found: dict[StageId, dict[Pass, TimedPass]] = {}
    for span in spans:
        if isinstance(span.action, Forward | Backward):
            work = TimedPass(span.start_s, 1, span.action, None, span.start_s + span.duration_s)
            found.setdefault(span.action.stage, {})[span.action] = work
    tasks: dict[int, list[TimedPass]] = {}
    for stage, works in found.items():
        for rank in mesh.tp_group(stage.index, 0):
            tasks.setdefault(rank, []).extend(works.values())
    return tasks


# The encoders ------------------------------------------------------------------------------------------------------


def _schedule(
    graph: StageGraph, kernels: Mapping[StagePass, StageKernels], host: LlmTimeline, mesh: UnitMesh
) -> EncoderSchedule:
    """Place the encoder's kernels, for one of its replicas on each block of the LLM's pipeline ranks."""
    own, llm = microbatches_per_block(mesh.num_microbatches, graph.mesh(LLM).num_microbatches)
    begins = host.first_forwards.reshape(-1, llm).min(axis=1).repeat(own)
    ends = host.last_backwards.reshape(-1, llm).max(axis=1).repeat(own)
    stages = [s for s in graph.stages if s.id.unit == mesh.unit]
    plan = EncoderPlan(
        mesh.tp,
        mesh.pp,
        1,
        tuple((kernels[s.id, "F"].kernels,) for s in stages),
        tuple((kernels[s.id, "B"].kernels,) if graph.needs_backward(s.id) else () for s in stages),
    )
    blocks = len(host.free_times) // mesh.pp
    per_block = replace(host, first_forwards=begins.repeat(blocks), last_backwards=ends.repeat(blocks))
    return schedule_encoder(per_block, plan, np.arange(mesh.num_microbatches * blocks) % blocks)


def _encoder_tasks(
    graph: StageGraph,
    mesh: UnitMesh,
    found: EncoderSchedule,
    kernels: Mapping[StagePass, StageKernels],
    ahead: int | None,
) -> Iterator[tuple[int, TimedPass]]:
    """What each rank of the first LLM replica does for an encoder, and when, within what `ahead` allows."""
    per_group = mesh.dp // graph.num_groups
    llm = graph.mesh(LLM)
    blocks = llm.pp // mesh.pp
    slices = per_group // blocks
    due, back = found.host.first_forwards[::blocks], found.host.last_backwards[::blocks]
    for half in (found.forward, found.backward):
        for (block, stage), placed in half.items():
            sid = StageId(mesh.unit, stage)
            segments = kernels[sid, "F" if half is found.forward else "B"].segments
            # So the encoder's stages, too, work on different microbatches at a time.
            reach = None if ahead is None else ahead + mesh.pp - 1 - stage
            earliest, latest = _shifted(due, reach), -_shifted(-back[::-1], reach)[::-1]
            computes = placed.computes
            rows = zip(placed.spans[computes], placed.chains[computes], placed.kernels[computes], strict=True)
            for (start, _), name, kernel in rows:
                index = int(name) // blocks
                is_forward = half is found.forward
                when = max(start, earliest[index]) if is_forward else min(start, latest[index])
                for replica in range(block * slices, (block + 1) * slices):
                    mb = Microbatch(mesh.unit, replica, index)
                    action = Forward(sid, mb) if is_forward else Backward(sid, mb)
                    task = TimedPass(float(when), 0 if is_forward else 2, action, segments[kernel])
                    for rank in mesh.tp_group(stage, replica):
                        yield rank, task


def _shifted(times: FloatArray, reach: int | None) -> FloatArray:
    """For each microbatch the time of the one `reach` before it; without one, or a reach, no time is too early."""
    before = len(times) if reach is None else reach
    return np.concatenate([np.full(before, -np.inf), times])[: len(times)]
