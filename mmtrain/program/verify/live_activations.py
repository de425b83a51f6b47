"""How much a rank keeps alive: activations between a forward and its backward, counted from the program itself."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from mmtrain.program.ir.actions import Action, Backward, Compute, Forward, Partial, Pass
from mmtrain.program.ir.graph import Microbatch, StageGraph, StageId
from mmtrain.program.ir.segments import expand, finished_pass, pass_of, started_pass

BytesOf = Callable[[StageId, Microbatch], int]  # bytes one rank keeps between forward and backward


class ActivationEvent(NamedTuple):
    """Where activations of a microbatch begin or end to live."""

    at: int  # place among the rank's actions
    begins: bool
    stage: StageId
    mb: Microbatch


def activation_events(graph: StageGraph, actions: Sequence[Action]) -> list[ActivationEvent]:
    """What a rank keeps of its microbatches, and until when.

    A microbatch counts in full from the first segment of its forward to the last of its backward, or of the gradients
    of its weights where these come later. What a stage without backward computes is alive during its forward only.
    """
    return [
        ActivationEvent(at, begins, whole.stage, whole.mb)
        for at, begins, whole in _borders(graph, actions)
        if (isinstance(whole, Forward) if begins else _frees(graph, whole))
    ]


def peak_of_events(alive: Iterable[ActivationEvent], bytes_of: BytesOf) -> tuple[int, int]:
    """Return the most bytes alive at once, and the place where that first happens."""
    live = most = most_at = 0
    for at, begins, stage, mb in alive:
        live += bytes_of(stage, mb) if begins else -bytes_of(stage, mb)
        if live > most:
            most, most_at = live, at
    return most, most_at


def peak_activation_bytes(graph: StageGraph, actions: Sequence[Action], bytes_of: BytesOf) -> tuple[int, int]:
    """Return the most bytes of activations alive on a rank, and the place in `actions` where that first happens."""
    return peak_of_events(activation_events(graph, actions), bytes_of)


def peak_in_flight_by_stage(graph: StageGraph, actions: Sequence[Action]) -> dict[StageId, int]:
    """Return how many microbatches of each stage a rank holds alive at most (each stage's own peak)."""
    live: Counter[StageId] = Counter()
    most: dict[StageId, int] = {}
    for _, begins, stage, _ in activation_events(graph, actions):
        live[stage] += 1 if begins else -1
        most[stage] = max(most.get(stage, 0), live[stage])
    return most


def _borders(graph: StageGraph, actions: Sequence[Action]) -> Iterator[tuple[int, bool, Pass]]:
    """Beginnings (True) and ends (False) of forwards and backwards, with their place in `actions`."""
    later: Counter[Pass] = Counter()  # segments of split backwards whose weights have yet to get their gradients
    for action in actions:
        for part in expand(graph, action):
            if isinstance(part, Partial) and part.kind == "BW":
                later[pass_of(part)] += part.hi - part.lo
    for at, action in enumerate(actions):
        for part in expand(graph, action):
            if isinstance(part, Partial) and part.kind == "BW":
                later[pass_of(part)] -= part.hi - part.lo
                if not later[pass_of(part)]:
                    yield at, False, pass_of(part)
            elif isinstance(part, Compute):
                if begins := started_pass(graph, part):
                    yield at, True, begins
                if (ends := finished_pass(graph, part)) and not later[ends]:
                    yield at, False, ends


def _frees(graph: StageGraph, whole: Pass) -> bool:
    """Whether nothing of the microbatch is kept after it."""
    return isinstance(whole, Backward) or not graph.needs_backward(whole.stage)
