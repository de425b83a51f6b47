"""Write the timed work of a rank as lines of an explicit order; work in a gap of an LLM pass becomes its fill.

A fill is atomic: what its partials wait for must be there before the host, and what they give leaves after it. So only
partials that neither start nor end their forward or backward are written into a fill. Other work in a gap stands
between two parts of the host.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from mmtrain.planning.colocated.bubbles import TIME_ROUNDING
from mmtrain.planning.colocated.stage_kernels import CommunicationGap
from mmtrain.program.ir.actions import Compute, Direction, Fill, Forward, Partial, Pass
from mmtrain.program.ir.graph import StageGraph, StageId
from mmtrain.program.ir.segments import direction, num_segments
from mmtrain.program.ir.serialize import action_to_text

_MAX_EARLY_START_S = 2 * TIME_ROUNDING  # by which rounding may let work start before the gap that it is in


class TimedPass(NamedTuple):
    """Work of a rank in time: a whole forward or backward of the LLM, or some segments of an encoder's."""

    start: float
    action: Pass
    segments: tuple[int, int] | None  # [lo, hi) of an encoder's stage; None for the LLM, which runs all of them

    @property
    def is_host(self) -> bool:
        """Whether the work is the LLM's, with gaps that encoders may fill."""
        return self.segments is None


def emit_rank_order(
    graph: StageGraph,
    timed_passes: Sequence[TimedPass],
    gaps: Mapping[tuple[StageId, Direction], Sequence[CommunicationGap]],
) -> Iterator[str]:
    """Return the lines of one rank's order.

    Args:
        graph: the layout's stage graph.
        timed_passes: all work of the rank, in any order.
        gaps: of each forward and backward of the LLM, in the order of time.
    """
    ordered = sorted(timed_passes, key=_order_key)
    hosts = [i for i, timed_pass in enumerate(ordered) if timed_pass.is_host]
    before_first_host = ordered[: hosts[0]] if hosts else ordered
    actions: list[Compute | Fill] = [*_joined(graph, before_first_host)]
    for i, next_host in zip(hosts, [*hosts[1:], len(ordered)], strict=True):
        host, guests = ordered[i], ordered[i + 1 : next_host]
        inside, after = _split_by_gap(host, guests, gaps[host.action.stage, direction(host.action)])
        actions += _host_with_guests(graph, host.action, inside)
        actions += _joined(graph, after)
    yield from map(action_to_text, actions)


def _order_key(timed_pass: TimedPass) -> tuple[float, int, int, str, int]:
    """Order by start; of work that starts together, encoder forwards come before the LLM, encoder backwards after."""
    start, action, segments = timed_pass
    if segments is None:
        return start, 1, action.mb.index, action.stage.unit, 0
    if isinstance(action, Forward):
        return start, 0, action.mb.index, action.stage.unit, segments[0]
    return start, 2, action.mb.index, action.stage.unit, -segments[0]


def _split_by_gap(
    host: TimedPass, guests: Sequence[TimedPass], gaps: Sequence[CommunicationGap]
) -> tuple[dict[int, list[TimedPass]], list[TimedPass]]:
    """Return the guests that start in the host's gaps, by the segments it has run by then, and those after it."""
    inside: dict[int, list[TimedPass]] = {}
    gaps_left = list(gaps)
    for i, guest in enumerate(guests):
        start = guest.start - host.start + _MAX_EARLY_START_S
        while gaps_left and gaps_left[0].end <= start:
            gaps_left.pop(0)
        if not gaps_left or gaps_left[0].start > start:
            return inside, list(guests[i:])
        inside.setdefault(gaps_left[0].num_segments_before, []).append(guest)
    return inside, []


def _host_with_guests(
    graph: StageGraph, host: Pass, inside: Mapping[int, Sequence[TimedPass]]
) -> Iterator[Compute | Fill]:
    """Return the host in parts, with the guests in its gaps; `inside` is by the segments that run before the gap."""
    total = num_segments(graph, host.stage)
    num_done = 0
    for num_before in sorted(inside):
        guests = list(_joined(graph, inside[num_before]))
        partials = tuple(guest for guest in guests if isinstance(guest, Partial) and _is_inner(graph, guest))
        if num_done < num_before and len(partials) == len(guests):
            has_later_gap = any(other > num_before for other in inside)
            end = num_before + 1 if has_later_gap else total
            gap = num_before if isinstance(host, Forward) else total - num_before
            yield Fill(_part(graph, host, num_done, end), gap, partials)
            num_done = end
            continue
        if num_done < num_before:
            yield _part(graph, host, num_done, num_before)
            num_done = num_before
        yield from guests
    if num_done < total:
        yield _part(graph, host, num_done, total)


def _is_inner(graph: StageGraph, partial: Partial) -> bool:
    """Return whether a partial neither starts nor ends its forward or backward."""
    return partial.lo > 0 and partial.hi < num_segments(graph, partial.stage)


def _part(graph: StageGraph, action: Pass, num_done: int, end: int) -> Compute:
    """Return the part of a pass that runs segments [num_done, end), counted in the order in which they run."""
    total = num_segments(graph, action.stage)
    if (num_done, end) == (0, total):
        return action
    lo, hi = (num_done, end) if isinstance(action, Forward) else (total - end, total - num_done)
    return Partial(action.stage, action.mb, direction(action), lo, hi)


def _joined(graph: StageGraph, guests: Sequence[TimedPass]) -> Iterator[Compute]:
    """Join neighbouring segments of one pass to one partial, or to the whole pass."""
    for action, run in groupby(guests, key=lambda guest: guest.action):
        ranges = [guest.segments for guest in run if guest.segments is not None]
        lo, hi = min(lo for lo, _ in ranges), max(hi for _, hi in ranges)
        if hi - lo == num_segments(graph, action.stage):
            yield action
        else:
            yield Partial(action.stage, action.mb, direction(action), lo, hi)
