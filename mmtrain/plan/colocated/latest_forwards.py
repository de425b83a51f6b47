"""Delay the LLM's forwards as far as its backwards allow, so that encoders before them have more time.

The simulated timeline of the LLM alone has every forward as early as its order lets it. Here each one is delayed until
right before its reader: first in the order of its rank, then also past backwards of its rank where that makes no
forward earlier, which shortens the warm-up (Optimus does so, too: arXiv 2408.03505). Backwards keep their starts, so
the step takes no longer.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter

from mmtrain.plan.colocated.bubbles import TIME_ROUNDING
from mmtrain.program.ir.actions import Backward, Forward, Pass
from mmtrain.program.ir.graph import StageGraph, StageId
from mmtrain.program.trace.timeline import Span

Interval = tuple[float, float]


def delay_forwards(graph: StageGraph, spans: Sequence[Span]) -> dict[Pass, float]:
    """Return the starts of all forwards, delayed, and backwards on some ranks of a pipeline.

    Args:
        graph: the pipeline: one unit without others.
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
    free: dict[int, list[Interval]] = {span.rank: [(-float("inf"), float("inf"))] for span in simulated.values()}
    if past_backwards:
        for span in simulated.values():
            if isinstance(span.action, Backward):
                _use(free[span.rank], span.start_s, span.duration_s)
    for action, span in sorted(simulated.items(), key=lambda item: -item[1].start_s):
        if isinstance(action, Forward):
            reader = _reader(graph, action)
            due = starts[reader] - lags[action.stage] if reader in starts else span.start_s + span.duration_s
            intervals = free[span.rank]
            num_before = bisect_right(intervals, due, key=itemgetter(0))  # no interval that starts later holds it
            latest = next(intervals[i] for i in range(num_before - 1, -1, -1) if _fits(intervals[i], due, span))
            starts[action] = min(latest[1], due) - span.duration_s
            if past_backwards:
                _use(intervals, starts[action], span.duration_s)
        if not past_backwards:
            free[span.rank] = [(-float("inf"), starts[action])]
    return starts


def _fits(interval: Interval, due: float, span: Span) -> bool:
    """Return whether a span can run in an interval and end when it is due."""
    return min(interval[1], due) - span.duration_s >= interval[0]


def _use(free: list[Interval], start: float, duration: float) -> None:
    """Remove a time from the free interval that holds it."""
    i = bisect_right(free, start, key=itemgetter(0)) - 1
    lo, hi = free[i]
    free[i : i + 1] = [(lo, start), (start + duration, hi)]


def _reader(graph: StageGraph, forward: Forward) -> Pass:
    """Return what waits for a forward: the next stage's forward, or behind the last stage its own backward."""
    next_stages = [edge.dst for edge in graph.outputs(forward.stage)]
    return Forward(next_stages[0], forward.mb) if next_stages else Backward(forward.stage, forward.mb)


def _min_lags(graph: StageGraph, simulated: Mapping[Pass, Span]) -> dict[StageId, float]:
    """Return the least seconds between a stage's forward and its reader, over all microbatches.

    Other microbatches wait for the rank as well; the least lag is that of the message alone.
    """
    lags: dict[StageId, float] = defaultdict(lambda: float("inf"))
    for action, span in simulated.items():
        if isinstance(action, Forward):
            reader = simulated.get(_reader(graph, action))
            if reader is not None:
                lag = reader.start_s - span.start_s - span.duration_s
                lags[action.stage] = min(lags[action.stage], lag)
    return lags
