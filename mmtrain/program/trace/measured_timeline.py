"""From what the ranks recorded of a step to its timeline, drawn and booked like a simulated one."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from mmtrain.program.ir.actions import Collective, Compute, Recv, Send
from mmtrain.program.ir.data_dependencies import participants
from mmtrain.program.ir.graph import StageGraph
from mmtrain.program.trace.bubble_accounting import BubbleAccount
from mmtrain.program.trace.step_record import StepRecord
from mmtrain.program.trace.timeline import BubbleKind, Span, Timeline, chrome_trace

BytesMoved = Callable[[int, Collective], int]  # (rank, collective) -> bytes


def measured_timeline(graph: StageGraph, records: Mapping[int, StepRecord], bytes_moved: BytesMoved) -> Timeline:
    """Draw one step of the given ranks, whose records are on one clock; it starts when the first of them does.

    Compute begins when its messages have come. A collective begins on all its ranks when the last of them is there;
    what the others wait is a bubble. A message is drawn on its sender from when both ends were posted to when the
    receiver knew of it, which is when it was waited for: at most so long. It ends in the drawing when the next message
    or collective of its sender begins, since it cannot be told which moved when.

    Memory is not in the records: `peak_memory_bytes` stays empty.
    """
    zero = min(record.start_s for record in records.values())
    records = {rank: record.shifted(-zero) for rank, record in records.items()}
    step_time = max(record.end_s for record in records.values())
    together = _together(graph, records)
    messages = _messages(records)
    spans: list[Span] = []
    bubbles: dict[int, Mapping[BubbleKind, float]] = {}
    for rank, record in records.items():
        works = list(_works(graph, rank, record, together))
        account = BubbleAccount.for_actions(work.action for work in works)
        collectives: list[Span] = []
        for work in works:
            start = max(work.start_s, account.clock)  # clocks agree to some microseconds only
            end = max(work.end_s, start)
            account.add(work.action, start, end - start)
            if isinstance(work.action, Compute):
                spans.append(Span(rank, start, end - start, work.action))
            else:
                collectives.append(Span(rank, start, end - start, work.action, bytes_moved(rank, work.action)))
        account.close(step_time)
        bubbles[rank] = account.bubbles
        spans += without_overlaps(collectives, messages.get(rank, []))
    return Timeline(
        spans=tuple(sorted(spans, key=lambda s: (s.start_s, s.rank))),
        step_time_s=step_time,
        bubbles=bubbles,
        peak_memory_bytes={},
        simulated=False,
        pipeline_ranks={mesh.unit: mesh.pp for mesh in graph.meshes},
    )


class _Work(NamedTuple):
    action: Compute | Collective
    start_s: float
    end_s: float


def _works(
    graph: StageGraph, rank: int, record: StepRecord, together: Mapping[tuple[Collective, tuple[int, ...]], float]
) -> Iterator[_Work]:
    """What held the rank, in order; a collective starts when its group is complete."""
    for action, begin, end, waited in record.actions:
        if isinstance(action, Compute):
            yield _Work(action, begin + waited, end)
        elif isinstance(action, Collective):
            yield _Work(action, min(together[action, participants(graph, rank, action)], end), end)


def _together(graph: StageGraph, records: Mapping[int, StepRecord]) -> dict[tuple[Collective, tuple[int, ...]], float]:
    """When the last rank came to each collective; a group runs each of its collectives once in a step."""
    last: defaultdict[tuple[Collective, tuple[int, ...]], float] = defaultdict(float)
    for rank, record in records.items():
        for action, begin, _, waited in record.actions:
            if isinstance(action, Collective):
                key = (action, participants(graph, rank, action))
                last[key] = max(last[key], begin + waited)
    return last


def _messages(records: Mapping[int, StepRecord]) -> dict[int, list[Span]]:
    """Every message on its sender."""
    ends = {
        (m.message.peer, Send(m.message.edge, m.message.src, m.message.dst, rank, m.message.payload)): m
        for rank, record in records.items()
        for m in record.messages
        if isinstance(m.message, Recv)
    }
    found: dict[int, list[Span]] = {}
    for rank, record in records.items():
        for sent in record.messages:
            if isinstance(sent.message, Send):
                received = ends[rank, sent.message]
                start = max(sent.posted_s, received.posted_s)
                span = Span(rank, start, max(received.done_s - start, 0.0), sent.message, sent.nbytes)
                found.setdefault(rank, []).append(span)
    return found


def without_overlaps(collectives: Sequence[Span], messages: Sequence[Span]) -> Iterator[Span]:
    """Draw a rank's communication without overlaps, of which viewers drop one: collectives where they were.

    A message begins when a collective that ran has ended, and ends at the latest when something else begins.
    """
    ends = [(c.start_s, c.start_s + c.duration_s) for c in sorted(collectives, key=_start)]
    spans = list(collectives)
    for message in messages:
        at = bisect_right(ends, (message.start_s, math.inf)) - 1
        start = max(message.start_s, ends[at][1]) if at >= 0 else message.start_s
        spans.append(message._replace(start_s=start, duration_s=max(0.0, message.start_s + message.duration_s - start)))
    spans.sort(key=_start)
    for span, after in pairwise([*spans, None]):
        assert span is not None
        left = math.inf if after is None else after.start_s - span.start_s
        yield span._replace(duration_s=min(span.duration_s, left))


def _start(span: Span) -> float:
    return span.start_s


@dataclass(frozen=True)
class MeasuredStep:
    """One recorded step of a run."""

    number: int  # counts from 1
    start_s: float  # on the clock that all steps of the run share
    timeline: Timeline


def run_trace(steps: Sequence[MeasuredStep], plan_sha256: str, clock_error_s: float) -> dict[str, Any]:
    """Return recorded steps as one Chrome trace, on one axis that begins with the first of them.

    `otherData` holds their mean step time, and beside what every trace has `steps` (number, `ts` and `dur` in
    microseconds of each, and `bubbles`, its idle time by kind as shares) and how far the clocks of two ranks may be
    apart.
    """
    first, shifted = steps[0].start_s, []
    for step in steps:
        by_s = step.start_s - first
        shifted += [span._replace(start_s=span.start_s + by_s) for span in step.timeline.spans]
    mean_s = sum(step.timeline.step_time_s for step in steps) / len(steps)
    joined = replace(steps[0].timeline, spans=tuple(shifted), step_time_s=mean_s)
    trace = chrome_trace(joined, plan_sha256)
    trace["otherData"] |= {
        "steps": [
            {
                "step": s.number,
                "ts": (s.start_s - first) * 1e6,
                "dur": s.timeline.step_time_s * 1e6,
                "bubbles": s.timeline.bubble_shares(),
            }
            for s in steps
        ],
        "clock_error_us": clock_error_s * 1e6,
    }
    return trace
