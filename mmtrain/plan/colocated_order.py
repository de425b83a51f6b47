"""From a colocated layout to the order of its program: encoder layers between the LLM's forwards and backwards.

An encoder's replicas lie on blocks of the LLM's ranks: with `pp` dividing the LLM's and `tp` dividing its, every LLM
replica holds m of them. Their microbatches and the LLM's meet in blocks (`StageGraph.sources`): a forward must have
ended when the LLM starts the first microbatch of its block, a backward begins when it has ended the last one's. All
replicas of an encoder thus have the same work to do at the same time, and those on the same pipeline ranks one order.

The runtime shows a stage as layers, with the communication of tensor parallelism inside them. So gaps are those
between the LLM's actions, and layers what fills them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

import numpy as np

from mmtrain.costs import Hardware
from mmtrain.plan.bubbles import FloatArray, Kernels, Lane
from mmtrain.plan.colocated import EncoderPlan, Host, Schedule, schedule_as_dealt
from mmtrain.plan.judge import Judged, PricedTiming, model_timing, rehearsed
from mmtrain.plan.pricing import AGAIN, BACKWARD, FORWARD, Pricing, sizes_of
from mmtrain.program.actions import (
    Backward,
    Compute,
    Direction,
    Forward,
    Partial,
    Pass,
    ReduceGrads,
    ReduceShared,
)
from mmtrain.program.builder import build_1f1b, in_flight
from mmtrain.program.graph import LLM, Microbatch, StageGraph, StageId, UnitMesh, block_sizes
from mmtrain.program.lower import lower
from mmtrain.program.simulate import simulate
from mmtrain.program.text import action_to_text
from mmtrain.program.timeline import Timeline

Order = dict[int, tuple[str, ...]]


@dataclass(frozen=True)
class _Task:
    """Something a rank does: a whole forward or backward of the LLM, or a layer of an encoder."""

    start: float
    turn: int  # of tasks that start together
    action: Pass
    layer: int | None  # in the stage; all of them if None


def plan_order(
    graph: StageGraph, pricing: Pricing, machine: Hardware, *, ahead: int | None = None, alone: Timeline | None = None
) -> Order:
    """Put the encoders of a colocated graph into the bubbles of its LLM, for microbatches of mean cost.

    Args:
        graph: the layout's.
        pricing: what its layers cost.
        machine: what they run on.
        ahead: microbatches by which a forward may be ahead of the LLM's, and a backward behind it: fewer hold fewer
            activations, but what finds no bubble then makes the LLM wait in its midst. Default: any number.
        alone: `llm_alone` of the same LLM, to save its making.
    """
    alone = alone or llm_alone(graph, pricing, machine)
    host, tasks = _host(graph, alone), _llm_tasks(graph, alone)
    for mesh in (m for m in graph.meshes if m.unit != LLM):
        found = _schedule(graph, pricing, host, mesh)
        free = list(host.lanes)
        for (pipeline, stage), placed in chain(found.forward.items(), found.backward.items()):
            place = found.plan.place(pipeline, stage)
            free[place] = free[place].without(placed)
        host = replace(host, lanes=tuple(free))
        for rank, task in _encoder_tasks(graph, mesh, found, ahead):
            tasks[rank].append(task)
    return {rank: tuple(_lines(graph, todo)) for rank, todo in sorted(tasks.items())}


def scheduling_efficiency(judged: Judged, pricing: Pricing, machine: Hardware) -> float | None:
    """Share of the encoders' compute that lies inside the LLM's own step, of the first drawn batch; None if apart.

    That step begins with the LLM's first forward and takes what the LLM takes by itself (Optimus' measure).
    """
    if judged.layout.placement != "colocated":
        return None
    graph = judged.graph
    alone = llm_alone(graph, pricing, machine).step_time_s
    work = [
        (span.action.stage.unit, span.start_s, span.duration_s)
        for span in rehearsed(judged, pricing, machine).spans
        if isinstance(span.action, Compute)
    ]
    begin = min(start for unit, start, _ in work if unit == LLM)
    inside = total = 0.0
    for start, seconds in ((start, seconds) for unit, start, seconds in work if unit != LLM):
        first, last = max(start, begin), min(start + seconds, begin + alone)
        inside, total = inside + max(0.0, last - first), total + seconds
    return inside / total if total else None


# The LLM by itself -------------------------------------------------------------------------------------------------


def llm_alone(graph: StageGraph, pricing: Pricing, machine: Hardware) -> Timeline:
    """The LLM of one replica group without its encoders, every microbatch of mean cost."""
    only = _only_llm(graph)
    seconds = {
        sid: (float(s.forward.mean()), float(s.backward.mean()))
        for sid, s in pricing.stage_seconds(graph).items()
        if sid.unit == LLM
    }
    model = model_timing(only, pricing, pricing.loads(sizes_of(graph))[0], machine)
    return simulate(lower(build_1f1b(only)), _Typical(model, seconds), 1)


def least_alive(graph: StageGraph) -> dict[StageId, int]:
    """Microbatches that each stage holds at least: the LLM's as in 1F1B, an encoder's as long as the LLM holds them."""
    alive, llm = in_flight(_only_llm(graph)), graph.mesh(LLM)
    entered = {e.src.unit: e.dst for e in graph.edges if e.crosses_units}
    for stage in (s.id for s in graph.stages if s.id.unit != LLM):
        own, per_block = block_sizes(graph.mesh(stage.unit).num_microbatches, llm.num_microbatches)
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
class _Typical(PricedTiming):
    """The same seconds for every microbatch."""

    seconds: Mapping[StageId, tuple[float, float]]  # forward, backward

    def compute(self, action: Compute) -> float:
        """Mean seconds of the stage."""
        forward, backward = self.seconds[action.stage]
        return forward if isinstance(action, Forward) else backward


def _host(graph: StageGraph, alone: Timeline) -> Host:
    """The LLM's gaps, and when it starts and ends each microbatch at the first stage that an encoder enters."""
    mesh = graph.mesh(LLM)
    place = {rank: p for p in range(mesh.pp) for rank in mesh.lane(p, 0)}
    busy: list[set[tuple[float, float]]] = [set() for _ in range(mesh.pp)]
    entered = {e.dst for e in graph.edges if e.crosses_units and e.dst.unit == LLM}
    first = np.full(mesh.num_microbatches, np.inf)
    last = np.full(mesh.num_microbatches, -np.inf)
    for span in alone.spans:
        if span.rank not in place or not isinstance(span.action, Compute | ReduceGrads | ReduceShared):
            continue
        start, end = span.start_s, span.start_s + span.duration_s
        if end > start:
            busy[place[span.rank]].add((start, end))
        if isinstance(span.action, Compute) and span.action.stage in entered:
            index = span.action.mb.index
            if isinstance(span.action, Forward):
                first[index] = min(first[index], start)
            else:
                last[index] = max(last[index], end)
    spans = [np.array(sorted(one)).reshape(-1, 2) for one in busy]
    end = max((float(one[-1, 1]) for one in spans if len(one)), default=0.0)
    none = np.zeros((0, 2))
    return Host(
        tuple(Lane.around(one, none) for one in spans), end, 0.0, 0.0, first, np.where(last < 0, end, last), 0.0
    )


def _llm_tasks(graph: StageGraph, alone: Timeline) -> dict[int, list[_Task]]:
    """The LLM's forwards and backwards on each rank of its first replica."""
    mesh = graph.mesh(LLM)
    found: dict[StageId, dict[Pass, float]] = {}
    for span in alone.spans:
        if isinstance(span.action, Forward | Backward):
            found.setdefault(span.action.stage, {})[span.action] = span.start_s
    tasks: dict[int, list[_Task]] = {}
    for stage, starts in found.items():
        for rank in mesh.lane(stage.index, 0):
            tasks.setdefault(rank, []).extend(_Task(start, 1, action, None) for action, start in starts.items())
    return tasks


# The encoders ------------------------------------------------------------------------------------------------------


def _schedule(graph: StageGraph, pricing: Pricing, host: Host, mesh: UnitMesh) -> Schedule:
    """Place the encoder's layers, for one of its replicas on each block of the LLM's pipeline ranks."""
    own, llm = block_sizes(mesh.num_microbatches, graph.mesh(LLM).num_microbatches)
    begins = host.first_forwards.reshape(-1, llm).min(axis=1).repeat(own)
    ends = host.last_backwards.reshape(-1, llm).max(axis=1).repeat(own)
    stages = [s for s in graph.stages if s.id.unit == mesh.unit]
    plan = EncoderPlan(
        mesh.tp,
        mesh.pp,
        1,
        tuple(_kernels(pricing, graph, s.id, "F") for s in stages),
        tuple(_kernels(pricing, graph, s.id, "B") for s in stages),
    )
    blocks = len(host.lanes) // mesh.pp
    per_block = replace(host, first_forwards=begins.repeat(blocks), last_backwards=ends.repeat(blocks))
    return schedule_as_dealt(per_block, plan, np.arange(mesh.num_microbatches * blocks) % blocks)


def _kernels(pricing: Pricing, graph: StageGraph, stage: StageId, kind: Direction) -> tuple[Kernels, ...]:
    """Mean seconds of a stage's layers, in the order in which they run."""
    if kind == "B" and not graph.needs_backward(stage):
        return ()
    lo, hi = graph.stage(stage).layers
    mean = pricing.prices(stage.unit, graph.mesh(stage.unit).tp, sizes_of(graph)).mean
    again = [i in graph.stage(stage).recompute for i in range(lo, hi)]
    backward = mean[lo:hi, BACKWARD] + np.where(again, mean[lo:hi, AGAIN], 0.0)
    each = mean[lo:hi, FORWARD].tolist() if kind == "F" else backward[::-1].tolist()
    return (Kernels.of(each, [True] * len(each)),)


def _encoder_tasks(
    graph: StageGraph, mesh: UnitMesh, found: Schedule, ahead: int | None
) -> Iterator[tuple[int, _Task]]:
    """What each rank of the first LLM replica does for an encoder, and when, within what `ahead` allows."""
    per_group = mesh.dp // graph.num_groups
    llm = graph.mesh(LLM)
    blocks = llm.pp // mesh.pp
    slices = per_group // blocks
    due, back = found.host.first_forwards[::blocks], found.host.last_backwards[::blocks]
    for half in (found.forward, found.backward):
        for (block, stage), placed in half.items():
            sid = StageId(mesh.unit, stage)
            lo, hi = graph.stage(sid).layers
            # So the encoder's stages, too, work on different microbatches at a time.
            reach = None if ahead is None else ahead + mesh.pp - 1 - stage
            earliest, latest = _shifted(due, reach), -_shifted(-back[::-1], reach)[::-1]
            for (start, _), name, kernel in zip(placed.spans, placed.chains, placed.kernels, strict=True):
                index = int(name) // blocks
                is_forward = half is found.forward
                layer = int(kernel) if is_forward else hi - lo - 1 - int(kernel)
                when = max(start, earliest[index]) if is_forward else min(start, latest[index])
                for replica in range(block * slices, (block + 1) * slices):
                    mb = Microbatch(mesh.unit, replica, index)
                    action = Forward(sid, mb) if is_forward else Backward(sid, mb)
                    task = _Task(float(when), 0 if is_forward else 2, action, layer)
                    for rank in mesh.lane(stage, replica):
                        yield rank, task


def _shifted(times: FloatArray, reach: int | None) -> FloatArray:
    """For each microbatch the time of the one `reach` before it; without one, or a reach, no time is too early."""
    before = len(times) if reach is None else reach
    return np.concatenate([np.full(before, -np.inf), times])[: len(times)]


def _lines(graph: StageGraph, tasks: Sequence[_Task]) -> Iterator[str]:
    """One rank's order as text: layers of a stage that follow each other are one part of it, or the whole."""
    ordered = sorted(tasks, key=lambda task: (task.start, task.turn, task.action.mb.index, task.action.stage.unit))
    for (action, is_whole), run in groupby(ordered, key=lambda task: (task.action, task.layer is None)):
        layers = [task.layer for task in run if task.layer is not None]
        lo, hi = graph.stage(action.stage).layers
        if is_whole or len(layers) == hi - lo:
            yield action_to_text(action)
        else:
            kind: Direction = "F" if isinstance(action, Forward) else "B"
            yield action_to_text(Partial(action.stage, action.mb, kind, min(layers), max(layers) + 1))
