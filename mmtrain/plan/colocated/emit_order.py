"""Work in time on a rank becomes lines of an explicit order: what falls into a gap of the LLM's is written as its fill.

Fills are atomic: what they wait for must be there before the host, and what they give leaves after it. So only work
that neither begins nor ends its forward or backward is written into one; other work in a gap stands between two parts
of the host.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from mmtrain.plan.colocated.bubbles import TIME_ROUNDING
from mmtrain.plan.colocated.stage_kernels import CommunicationGap
from mmtrain.program.ir.actions import Compute, Direction, Fill, Forward, Partial, Pass
from mmtrain.program.ir.graph import StageGraph, StageId
from mmtrain.program.ir.segments import direction, num_segments
from mmtrain.program.ir.serialize import action_to_text

_ROUNDING_S = 2 * TIME_ROUNDING  # by which work may begin before the gap that it is in


@dataclass(frozen=True)
class TimedPass:
    """Something a rank does: a whole forward or backward of the LLM, or some segments of an encoder's."""

    start: float
    turn: int  # of work that starts together
    action: Pass
    segments: tuple[int, int] | None  # [lo, hi) of the stage; all of them if None
    end: float = 0.0  # of the LLM's


def emit_rank_order(
    graph: StageGraph, works: Sequence[TimedPass], gaps: Mapping[tuple[StageId, Direction], Sequence[CommunicationGap]]
) -> Iterator[str]:
    """Lines of one rank's order. `gaps`: those inside the LLM's passes, from a pass's begin on."""
    ordered = sorted(works, key=_in_order)
    hosts = [at for at, work in enumerate(ordered) if work.segments is None]
    actions: list[Compute | Fill] = [*_joined(graph, ordered[: hosts[0]] if hosts else ordered)]
    for at, following in zip(hosts, [*hosts[1:], len(ordered)], strict=True):
        host, rest = ordered[at], ordered[at + 1 : following]
        inside, after = _sorted_out(host, rest, gaps[host.action.stage, direction(host.action)])
        actions += [*_hosted(graph, host.action, inside), *_joined(graph, after)]
    yield from map(action_to_text, actions)


def _in_order(work: TimedPass) -> tuple[float, int, int, str, int]:
    lo = 0 if work.segments is None else work.segments[0]
    turn = lo if direction(work.action) == "F" else -lo
    return work.start, work.turn, work.action.mb.index, work.action.stage.unit, turn


def _sorted_out(
    host: TimedPass, rest: Sequence[TimedPass], gaps: Sequence[CommunicationGap]
) -> tuple[dict[int, list[TimedPass]], list[TimedPass]]:
    """What begins in the host's gaps, by the segments that it has run by then, and what comes after it."""
    inside: dict[int, list[TimedPass]] = {}
    left = list(gaps)
    for at, work in enumerate(rest):
        when = work.start - host.start + _ROUNDING_S
        while left and left[0].end <= when:
            left.pop(0)
        if not left or left[0].start > when:
            return inside, list(rest[at:])
        inside.setdefault(left[0].after, []).append(work)
    return inside, []


def _hosted(graph: StageGraph, host: Pass, inside: Mapping[int, Sequence[TimedPass]]) -> Iterator[Compute | Fill]:
    """The host in parts, with the work in its gaps."""
    total, done = num_segments(graph, host.stage), 0
    for after in sorted(inside):
        guests = list(_joined(graph, inside[after]))
        inner = tuple(guest for guest in guests if isinstance(guest, Partial) and _in_the_middle(graph, guest))
        if done < after and len(inner) == len(guests):
            end = after + 1 if any(other > after for other in inside) else total
            gap = after if isinstance(host, Forward) else total - after
            yield Fill(_part(graph, host, done, end), gap, inner)
            done = end
            continue
        if done < after:
            yield _part(graph, host, done, after)
            done = after
        yield from guests
    if done < total:
        yield _part(graph, host, done, total)


def _in_the_middle(graph: StageGraph, part: Partial) -> bool:
    return part.lo > 0 and part.hi < num_segments(graph, part.stage)


def _part(graph: StageGraph, action: Pass, done: int, end: int) -> Compute:
    """The action from the segment that is `done`-th to be run up to the `end`-th."""
    total = num_segments(graph, action.stage)
    if (done, end) == (0, total):
        return action
    lo, hi = (done, end) if isinstance(action, Forward) else (total - end, total - done)
    return Partial(action.stage, action.mb, direction(action), lo, hi)


def _joined(graph: StageGraph, works: Sequence[TimedPass]) -> Iterator[Compute]:
    """Segments of a stage that follow each other as one part of it, or the whole."""
    for action, run in groupby(works, key=lambda work: work.action):
        spans = [work.segments for work in run if work.segments is not None]
        lo, hi = min(span[0] for span in spans), max(span[1] for span in spans)
        if hi - lo == num_segments(graph, action.stage):
            yield action
        else:
            yield Partial(action.stage, action.mb, direction(action), lo, hi)
