"""How much a rank keeps alive: activations between a forward and its backward, counted from the program itself."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mmtrain.program.ir.actions import Action, Backward, Fill, Forward, Partial
from mmtrain.program.ir.graph import Microbatch, StageGraph, StageId
from mmtrain.program.ir.segments import expand, finished_pass, started_pass

BytesOf = Callable[[StageId, Microbatch], int]  # bytes one rank keeps between forward and backward


class ActivationEvent(NamedTuple):
    """A point where the activations of a microbatch start or end to be kept."""

    place: int  # among the rank's actions
    starts: bool
    stage: StageId
    mb: Microbatch


def activation_events(graph: StageGraph, actions: Sequence[Action]) -> list[ActivationEvent]:
    """Return, in order, where a rank starts and ends to keep the activations of each microbatch.

    A microbatch counts in full from the first segment of its forward to the last of its backward. Activations of a
    stage without backward live during its forward only, those of a stage that reruns its forward during its backward.
    """
    events = []
    lives: dict[StageId, tuple[bool, bool]] = {}  # whether the stage reruns its forward, and whether it has a backward
    for index, action in enumerate(actions):
        if isinstance(action, Forward | Backward):  # a short cut for most actions
            stage = action.stage
            if stage not in lives:
                lives[stage] = graph.reruns_forward(stage), graph.needs_backward(stage)
            reruns, needs_backward = lives[stage]
            is_backward = isinstance(action, Backward)
            if is_backward == reruns:
                events.append(ActivationEvent(index, True, stage, action.mb))
            if is_backward or not needs_backward:
                events.append(ActivationEvent(index, False, stage, action.mb))
            continue
        if not isinstance(action, Partial | Fill):
            continue
        for part in expand(graph, action):
            first_pass = Backward if graph.reruns_forward(part.stage) else Forward
            if isinstance(started := started_pass(graph, part), first_pass):
                events.append(ActivationEvent(index, True, started.stage, started.mb))
            finished = finished_pass(graph, part)
            if finished and (isinstance(finished, Backward) or not graph.needs_backward(finished.stage)):
                events.append(ActivationEvent(index, False, finished.stage, finished.mb))
    return events


def peak_of_events(events: Iterable[ActivationEvent], bytes_of: BytesOf) -> tuple[int, int]:
    """Return the most bytes alive at once, and the place among the rank's actions where that first happens."""
    live = peak = peak_at = 0
    for index, starts, stage, mb in events:
        live += bytes_of(stage, mb) if starts else -bytes_of(stage, mb)
        if live > peak:
            peak, peak_at = live, index
    return peak, peak_at


def peak_activation_bytes(graph: StageGraph, actions: Sequence[Action], bytes_of: BytesOf) -> tuple[int, int]:
    """Return the most bytes of activations alive on a rank, and the place in `actions` where that first happens."""
    return peak_of_events(activation_events(graph, actions), bytes_of)


def peak_in_flight_by_stage(graph: StageGraph, actions: Sequence[Action]) -> dict[StageId, int]:
    """Return for each stage of a rank the most microbatches between forward and backward (each stage's own peak)."""
    live: Counter[StageId] = Counter()
    peak: dict[StageId, int] = {}
    for _, starts, stage, _ in activation_events(graph, actions):
        live[stage] += 1 if starts else -1
        peak[stage] = max(peak.get(stage, 0), live[stage])
    return peak
