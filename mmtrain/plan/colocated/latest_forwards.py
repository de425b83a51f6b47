"""How late the LLM's forwards can start where its backwards stay: the later, the more time have encoders before it.

The simulated timeline of the LLM by itself has every forward as early as its order lets it. Here each is put off until
right before what reads it, first in the order of its rank, then also past backwards of its rank (a shorter warm-up
there; Optimus, arXiv 2408.03505, section 4.4) where that makes none earlier. The last backward ends when it did.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from mmtrain.plan.colocated.bubbles import TIME_ROUNDING
from mmtrain.program.ir.actions import Backward, Forward, Pass
from mmtrain.program.ir.graph import StageGraph, StageId
from mmtrain.program.trace.timeline import Span


def delay_forwards(graph: StageGraph, spans: Sequence[Span]) -> dict[Pass, float]:
    """Starts of all forwards and backwards on some ranks of a pipeline, the forwards put off.

    graph: the pipeline's, one unit without others. spans: of one rank of each place, in the order of their start.
    """
    early = {span.action: span for span in spans if isinstance(span.action, Forward | Backward)}
    lags = _lags(graph, early)
    in_order = _put_off(graph, early, lags, past_backwards=False)
    anywhere = _put_off(graph, early, lags, past_backwards=True)
    return anywhere if all(anywhere[one] >= start - TIME_ROUNDING for one, start in in_order.items()) else in_order


def _put_off(
    graph: StageGraph, early: Mapping[Pass, Span], lags: Mapping[StageId, float], past_backwards: bool
) -> dict[Pass, float]:
    """Take the forwards from the last to start on, and each to the latest time that is free.

    What reads a forward, and what follows it on its rank, started after it and so has been dealt with.
    """
    late: dict[Pass, float] = {one: span.start_s for one, span in early.items()}
    free = {rank: [(-float("inf"), float("inf"))] for rank in {span.rank for span in early.values()}}
    if past_backwards:
        for span in early.values():
            if isinstance(span.action, Backward):
                _take(free[span.rank], span.start_s, span.duration_s)
    for one, span in sorted(early.items(), key=lambda item: -item[1].start_s):
        if isinstance(one, Forward):
            reader = _reader(graph, one)
            due = late[reader] - lags[one.stage] if reader in late else span.start_s + span.duration_s
            at = next(k for k in reversed(range(len(free[span.rank]))) if _fits(free[span.rank][k], due, span))
            late[one] = min(free[span.rank][at][1], due) - span.duration_s
            if past_backwards:
                _take(free[span.rank], late[one], span.duration_s)
        if not past_backwards:
            free[span.rank] = [(-float("inf"), late[one])]
    return late


def _fits(gap: tuple[float, float], due: float, span: Span) -> bool:
    return min(gap[1], due) - span.duration_s >= gap[0]


def _take(free: list[tuple[float, float]], start: float, duration: float) -> None:
    """Take a time out of the free intervals that hold it."""
    at = max(k for k, gap in enumerate(free) if gap[0] <= start)
    lo, hi = free[at]
    free[at : at + 1] = [(lo, start), (start + duration, hi)]


def _reader(graph: StageGraph, forward: Forward) -> Pass:
    """What waits for a forward: that of the next stage, or behind the last its own backward."""
    following = [edge.dst for edge in graph.outputs(forward.stage)]
    return Forward(following[0], forward.mb) if following else Backward(forward.stage, forward.mb)


def _lags(graph: StageGraph, early: Mapping[Pass, Span]) -> dict[StageId, float]:
    """Seconds that must lie between a stage's forward and what reads it: the least that do."""
    found: dict[StageId, float] = defaultdict(lambda: float("inf"))
    for one, span in early.items():
        if isinstance(one, Forward) and (reader := early.get(_reader(graph, one))) is not None:
            found[one.stage] = min(found[one.stage], reader.start_s - span.start_s - span.duration_s)
    return found
