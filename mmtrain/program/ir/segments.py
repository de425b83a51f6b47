"""Segments: a stage's forward or backward in parts, and which part begins and which ends it.

Rules about data speak of whole forwards and backwards. A part that begins one waits for all that enters it, the part
that ends it gives all that leaves; the parts between touch nothing but their own stage.
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
    """Segments of a stage: its layers, or the pieces of them."""
    (lo, hi), pieces = graph.stage(stage).layers, graph.stage(stage).pieces
    return sum(pieces) if pieces else hi - lo


def segment_layers(graph: StageGraph, stage: StageId) -> Sequence[tuple[int, int]]:
    """Of each segment the layer that it belongs to, counted from the stage's first, and the piece of it that it is."""
    lo, hi = graph.stage(stage).layers
    pieces = graph.stage(stage).pieces or (1,) * (hi - lo)
    return [(layer, piece) for layer, count in enumerate(pieces) for piece in range(count)]


@overload
def expand(graph: StageGraph, action: ComputeTask) -> tuple[Compute, ...]: ...
@overload
def expand(graph: StageGraph, action: Action) -> tuple[AtomicAction, ...]: ...
def expand(graph: StageGraph, action: Action) -> tuple[AtomicAction, ...]:
    """What a rank does for an action, one thing after another: a `Fill` is its host in two parts around the gap.

    Raises:
        ProgramError: the gap of a `Fill` is not between two segments of its host.
    """
    if not isinstance(action, Fill):
        return (action,)
    host, gap = action.host, action.gap
    lo, hi = (host.lo, host.hi) if isinstance(host, Partial) else (0, num_segments(graph, host.stage))
    if not lo < gap < hi:
        allowed = f"{lo + 1} to {hi - 1}" if lo + 1 < hi else "none, it has one segment"
        raise ProgramError(f"gap {gap} of {direction(host)} {host.stage} {host.mb}: allowed are {allowed}")
    kind = host.kind if isinstance(host, Partial) else direction(host)
    below, above = Partial(host.stage, host.mb, kind, lo, gap), Partial(host.stage, host.mb, kind, gap, hi)
    first, second = (below, above) if kind == "F" else (above, below)
    return (first, *action.partials, second)


def expand_all(graph: StageGraph, actions: Iterable[Action]) -> tuple[AtomicAction, ...]:
    """Everything a rank does, one thing after another; see `expand`."""
    return tuple(part for action in actions for part in expand(graph, action))


def direction(action: Compute) -> Direction:
    """Whether an action goes forward or backward."""
    if isinstance(action, Partial):
        return "F" if action.kind == "F" else "B"
    return "F" if isinstance(action, Forward) else "B"


def started_pass(graph: StageGraph, action: Compute) -> Pass | None:
    """The forward or backward that the action begins, or is; None for a later part of one."""
    if not isinstance(action, Partial):
        return action
    begins = action.lo == 0 if action.kind == "F" else action.hi == num_segments(graph, action.stage)
    return pass_of(action) if begins and action.kind != "BW" else None


def finished_pass(graph: StageGraph, action: Compute) -> Pass | None:
    """The forward or backward that the action ends, or is; None for an earlier part of one."""
    if not isinstance(action, Partial):
        return action
    ends = action.hi == num_segments(graph, action.stage) if action.kind == "F" else action.lo == 0
    return pass_of(action) if ends and action.kind != "BW" else None


def pass_of(part: Compute) -> Pass:
    """The forward or backward that the action is a part of, or is."""
    if not isinstance(part, Partial):
        return part
    return (Forward if part.kind == "F" else Backward)(part.stage, part.mb)
