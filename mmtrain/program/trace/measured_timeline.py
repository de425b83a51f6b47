"""Turn the records of a step into its timeline, with spans and bubbles like those of a simulated step."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from mmtrain.program.ir.actions import Action, AsyncCollective, Collective, Compute, Recv, Send
from mmtrain.program.ir.data_dependencies import awaits_result, covered_buckets, participants
from mmtrain.program.ir.graph import StageGraph
from mmtrain.program.trace.bubble_accounting import BubbleAccount, Interval
from mmtrain.program.trace.step_record import StepRecord
from mmtrain.program.trace.timeline import BubbleKind, Span, Timeline, chrome_trace

BytesMoved = Callable[[int, Collective], int]  # (rank, collective) -> bytes
_GroupCollective = tuple[Collective, tuple[int, ...]]  # a collective and the ranks that run it


def measured_timeline(graph: StageGraph, records: Mapping[int, StepRecord], bytes_moved: BytesMoved) -> Timeline:
    """Return the timeline of one step of the given ranks, whose records share a clock; it starts with the first rank.

    Compute starts when its messages have come. A collective starts on all its ranks when the last of them has reached
    it; the wait of the others is a bubble. An asynchronous one, a reduction of gradients or the gathering of
    parameters, is shown from then until its rank has waited for it, which is an upper bound: it does not hold the rank.
    A message is shown on its sender from when both
    its ends were posted to when the receiver knew of it, which is an upper bound: the receiver knows of it when it
    waits for it. Spans of either end early if the next one of their stream starts, since records do not say which of
    them moved when.

    Memory is not in the records: `peak_memory_bytes` stays empty.
    """
    zero = min(record.start_s for record in records.values())
    records = {rank: record.shifted(-zero) for rank, record in records.items()}
    step_time = max(record.end_s for record in records.values())
    complete_s = _complete_times(graph, records)
    messages = _messages(records)
    spans: list[Span] = []
    bubbles: dict[int, Mapping[BubbleKind, float]] = {}
    for rank, record in records.items():
        timed = list(_timed_actions(graph, rank, record, complete_s))
        account = BubbleAccount.for_actions(entry.action for entry in timed)
        asynchronous = list(_asynchronous(graph, rank, record, complete_s))
        awaited: defaultdict[Action, list[Interval]] = defaultdict(list)
        for entry in asynchronous:
            awaited[entry.reader].append((entry.start_s, entry.end_s))
        collectives: list[Span] = []
        for action, start_s, end_s in timed:
            start = max(start_s, account.clock)  # the clocks of two ranks agree to some microseconds only
            end = max(end_s, start)
            account.add(action, start, end - start, awaited[action])
            if isinstance(action, Compute):
                spans.append(Span(rank, start, end - start, action))
            elif not isinstance(action, AsyncCollective):
                collectives.append(Span(rank, start, end - start, action, bytes_moved(rank, action)))
        account.close(step_time)
        bubbles[rank] = account.bubbles
        spans += without_overlaps(collectives, messages.get(rank, []))
        spans += without_overlaps(
            [Span(rank, start, end - start, done, bytes_moved(rank, done)) for done, start, end, _ in asynchronous], []
        )
    return Timeline(
        spans=tuple(sorted(spans, key=lambda s: (s.start_s, s.rank))),
        step_time_s=step_time,
        bubbles=bubbles,
        peak_memory_bytes={},
        simulated=False,
        pipeline_ranks={mesh.unit: mesh.pp for mesh in graph.meshes},
    )


class _TimedAction(NamedTuple):
    action: Compute | Collective
    start_s: float
    end_s: float


class _TimedAsync(NamedTuple):
    action: AsyncCollective
    start_s: float
    end_s: float
    reader: Action  # which has waited for its end


def _timed_actions(
    graph: StageGraph, rank: int, record: StepRecord, complete_s: Mapping[_GroupCollective, float]
) -> Iterator[_TimedAction]:
    """Yield the compute actions and collectives of a rank; a collective starts when its group is complete.

    Of an asynchronous collective this is what its rank did to start it.
    """
    for action, start, end, waited in record.actions:
        if isinstance(action, Compute | AsyncCollective):
            yield _TimedAction(action, start + waited, end)
        elif isinstance(action, Collective):
            yield _TimedAction(action, min(complete_s[action, participants(graph, rank, action)], end), end)


def _asynchronous(
    graph: StageGraph, rank: int, record: StepRecord, complete_s: Mapping[_GroupCollective, float]
) -> Iterator[_TimedAsync]:
    """Yield a rank's asynchronous collectives, each from when its group was complete to when the rank knew of its end.

    A forward waits for the gathering of its parameters first, and then for messages.
    """
    started: list[AsyncCollective] = []
    covered = covered_buckets(graph, rank)
    for action, start, end, waited in record.actions:
        if isinstance(action, AsyncCollective):
            started.append(action)
            continue
        for collective in [c for c in started if awaits_result(graph, action, c, covered)]:
            started.remove(collective)
            for_messages = sum(m.wait_s for m in record.messages if start < m.done_s < end)
            start_s = complete_s[collective, participants(graph, rank, collective)]
            yield _TimedAsync(collective, start_s, max(start + waited - for_messages, start_s), action)


def _complete_times(graph: StageGraph, records: Mapping[int, StepRecord]) -> dict[_GroupCollective, float]:
    """Return when the last rank reached each collective; a group runs each of its collectives once in a step."""
    last: defaultdict[_GroupCollective, float] = defaultdict(float)
    for rank, record in records.items():
        for action, start, _, waited in record.actions:
            if isinstance(action, Collective):
                key = (action, participants(graph, rank, action))
                last[key] = max(last[key], start + waited)
    return last


def _messages(records: Mapping[int, StepRecord]) -> dict[int, list[Span]]:
    """Return the spans of all messages by sender."""
    received = {
        (m.message.peer, Send(m.message.edge, m.message.src, m.message.dst, rank, m.message.payload)): m
        for rank, record in records.items()
        for m in record.messages
        if isinstance(m.message, Recv)
    }
    spans: dict[int, list[Span]] = {}
    for rank, record in records.items():
        for sent in record.messages:
            if isinstance(sent.message, Send):
                receive = received[rank, sent.message]
                start = max(sent.posted_s, receive.posted_s)
                span = Span(rank, start, max(receive.done_s - start, 0.0), sent.message, sent.nbytes)
                spans.setdefault(rank, []).append(span)
    return spans


def without_overlaps(collectives: Sequence[Span], messages: Sequence[Span]) -> Iterator[Span]:
    """Return a rank's communication as spans that do not overlap, since trace viewers drop one of two that do.

    Collectives keep their start. A message that starts while a collective runs starts when it has ended, and every span
    ends at the latest when the next one starts.
    """
    ends = [(c.start_s, c.start_s + c.duration_s) for c in sorted(collectives, key=_start)]
    spans = list(collectives)
    for message in messages:
        before = bisect_right(ends, (message.start_s, math.inf)) - 1
        start = max(message.start_s, ends[before][1]) if before >= 0 else message.start_s
        spans.append(message._replace(start_s=start, duration_s=max(0.0, message.start_s + message.duration_s - start)))
    spans.sort(key=_start)
    for span, after in zip_longest(spans, spans[1:]):
        until_next = math.inf if after is None else after.start_s - span.start_s
        yield span._replace(duration_s=min(span.duration_s, until_next))


def _start(span: Span) -> float:
    return span.start_s


@dataclass(frozen=True)
class MeasuredStep:
    """One recorded step of a run."""

    number: int  # counts from 1
    start_s: float  # on the clock that all steps of the run share
    timeline: Timeline
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)  # unit -> of each microbatch of each replica


def run_trace(steps: Sequence[MeasuredStep], plan_sha256: str, clock_error_s: float) -> dict[str, Any]:
    """Return recorded steps as one Chrome trace, on one time axis that starts with the first of them.

    `otherData` holds the mean step time, and in addition to what every trace has: `steps` (of each its number, `ts` and
    `dur` in microseconds, `bubbles`, the idle time by kind as shares, and `tokens`, by unit those of each microbatch)
    and `clock_error_us`, how far the clocks of two ranks may differ.
    """
    first = steps[0].start_s
    shifted: list[Span] = []
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
                "tokens": {unit: list(tokens) for unit, tokens in s.tokens.items()},
            }
            for s in steps
        ],
        "clock_error_us": clock_error_s * 1e6,
    }
    return trace
