"""Delay the LLM's forwards as far as its backwards allow, so that encoders before them have more time.

The simulated timeline of the LLM alone has every forward as early as its order lets it. Here each one is delayed until
right before its reader: first in the order of its rank, then also past backwards of its rank where that makes no
forward earlier, which shortens the warm-up (Optimus does so, too: arXiv 2408.03505). Backwards keep their starts, and
so do the passes of a generator, so the step takes no longer.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf
from operator import itemgetter

from mmtrain.planning.colocated.bubbles import TIME_ROUNDING
from mmtrain.program.ir.actions import Backward, Forward, Pass
from mmtrain.program.ir.graph import LLM, StageGraph, StageId
from mmtrain.program.trace.timeline import Span

Interval = tuple[float, float]


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
