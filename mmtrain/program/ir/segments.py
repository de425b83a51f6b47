"""Segments: a forward or backward pass in parts, and which part starts and which finishes it.

Data rules apply to whole passes. The part that starts a pass waits for all its inputs, and the outputs leave after the
part that finishes it. Parts in between touch nothing but their own stage.
"""

from collections.abc import Iterable, Sequence
from typing import overload

from mmtrain.errors import ProgramError
from mmtrain.program.ir.actions import (
    Action,
    AtomicAction,
    Backward,
    Compute,
    ComputeTask,
    Direction,
    Fill,
    Forward,
    Partial,
    Pass,
)
from mmtrain.program.ir.graph import StageGraph, StageId


def num_segments(graph: StageGraph, stage: StageId) -> int:
    """Return the number of segments of a stage: its layers, or the pieces of them."""
    lo, hi = graph.stage(stage).layers
    pieces = graph.stage(stage).pieces
    return sum(pieces) if pieces else hi - lo


def segment_layers(graph: StageGraph, stage: StageId) -> Sequence[tuple[int, int]]:
    """Return for each segment its layer, counted from the stage's first, and which piece of the layer it is."""
    lo, hi = graph.stage(stage).layers
    pieces = graph.stage(stage).pieces or (1,) * (hi - lo)
    return [(layer, piece) for layer, count in enumerate(pieces) for piece in range(count)]


def layer_range(graph: StageGraph, action: Compute) -> tuple[int, int]:
    """Return the layers [lo, hi) that an action runs, or pieces of them, counted from the stage's first."""
    lo, hi = graph.stage(action.stage).layers
    if not isinstance(action, Partial):
        return 0, hi - lo
    if not graph.stage(action.stage).pieces:
        return action.lo, action.hi
    layers = segment_layers(graph, action.stage)
    return layers[action.lo][0], layers[action.hi - 1][0] + 1


@overload
def expand(graph: StageGraph, action: ComputeTask) -> tuple[Compute, ...]: ...
@overload
def expand(graph: StageGraph, action: Action) -> tuple[AtomicAction, ...]: ...
def expand(graph: StageGraph, action: Action) -> tuple[AtomicAction, ...]:
    """Return the atomic actions that make up an action: a `Fill` is its host in two parts with the partials between.

    Raises:
        ProgramError: the gap of a `Fill` is not between two segments of its host.
    """
    if not isinstance(action, Fill):
        return (action,)
    host, gap = action.host, action.gap
    all_segments = (0, num_segments(graph, host.stage))
    lo, hi = (host.lo, host.hi) if isinstance(host, Partial) else all_segments
    if not lo < gap < hi:
        allowed = f"{lo + 1} to {hi - 1}" if lo + 1 < hi else "none, it has one segment"
        raise ProgramError(f"gap {gap} of {direction(host)} {host.stage} {host.mb}: allowed are {allowed}")
    kind = direction(host)
    below = Partial(host.stage, host.mb, kind, lo, gap)
    above = Partial(host.stage, host.mb, kind, gap, hi)
    first, second = (below, above) if kind == "F" else (above, below)
    return (first, *action.partials, second)


def expand_all(graph: StageGraph, actions: Iterable[Action]) -> tuple[AtomicAction, ...]:
    """Return the atomic actions that make up all of `actions`, in order; see `expand`."""
    atomic: list[AtomicAction] = []
    for action in actions:
        if isinstance(action, Fill):
            atomic.extend(expand(graph, action))
        else:
            atomic.append(action)
    return tuple(atomic)


def direction(action: Compute) -> Direction:
    """Return whether an action goes forward or backward."""
    if isinstance(action, Partial):
        return action.kind
    return "F" if isinstance(action, Forward) else "B"


def started_pass(graph: StageGraph, action: Compute) -> Pass | None:
    """Return the forward or backward that the action starts, or is; None for a later part of one."""
    if not isinstance(action, Partial):
        return action
    starts = action.lo == 0 if action.kind == "F" else action.hi == num_segments(graph, action.stage)
    return pass_of(action) if starts else None


def finished_pass(graph: StageGraph, action: Compute) -> Pass | None:
    """Return the forward or backward that the action finishes, or is; None for an earlier part of one."""
    if not isinstance(action, Partial):
        return action
    finishes = action.hi == num_segments(graph, action.stage) if action.kind == "F" else action.lo == 0
    return pass_of(action) if finishes else None


def pass_of(action: Compute) -> Pass:
    """Return the forward or backward that the action is a part of, or is."""
    if not isinstance(action, Partial):
        return action
    kind = Forward if action.kind == "F" else Backward
    return kind(action.stage, action.mb)
