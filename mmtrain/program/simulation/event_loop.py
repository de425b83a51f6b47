"""The simulator's event loop: when every task of a `SimGraph` starts and ends, given how long each takes.

An event is (time, order, task, is_assembled). Either the task ends, or it is a collective whose members have all come
and which may still wait for their streams. A task is given its start as soon as the last thing it waits
for has a time, so a forward or backward is one event however many ranks run it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from mmtrain.program.simulation.sim_graph import SimGraph

NEVER = -1.0  # the time of what did not happen; all other times are at least 0


@dataclass(frozen=True)
class EventTimes:
    """When tasks started and ended and messages left and arrived, in seconds since the start of the step."""

    started: list[float]  # by task, the start of the step last; NEVER for a task that some rank never reached
    ended: list[float]
    departed: list[float]  # by message
    arrived: list[float]
    stream_order: list[list[int]]  # by stream (see `SimGraph`): nodes that occupied it
    under_way: Mapping[int, float]  # by task: seconds of the collective that it left under way
    reached: dict[int, float]  # by collective that waited for stragglers: when the ranks simulated had reached it
    met: list[float]  # when all replica groups went on together, the start of the step first


@dataclass(frozen=True)
class Meetings:
    """Collectives for which all replica groups must come, and how late the slowest of them is."""

    tasks: Collection[int] = ()
    lateness: float = 0.0  # over the time since the groups last went on together


class Durations(NamedTuple):
    """What everything in a step takes.

    seconds: of each task.
    transit: seconds of each message; None where there is nothing to send.
    under_way: for how long each task of `SimGraph.resumed_by` keeps the task that resumes it waiting after its end.
    meetings: collectives that wait for slower replica groups than the simulated ones.
    """

    seconds: Sequence[float]
    transit: Sequence[float | None]
    under_way: Mapping[int, float]
    meetings: Meetings = Meetings()


def run_events(graph: SimGraph, durations: Durations) -> EventTimes:
    """Run all sim ranks from the start of the step until none can go on."""
    seconds, transit, under_way, _ = durations
    participations, participations_of, is_compute = graph.participations, graph.participations_of, graph.is_compute
    sender, reader, resumed_by, awaited_by = graph.sender, graph.reader, graph.resumed_by, graph.awaited_by
    num_missing, first_message_node = list(graph.num_dependencies), graph.first_message_node
    times = _before_start(graph, under_way)
    started, ended, departed, arrived = times.started, times.ended, times.departed, times.arrived
    ready = [0.0] * len(graph.tasks)  # the latest time of what each task waits for, as far as it is known
    is_posted = [False] * len(sender)  # by message: whether one of its ends is posted
    stream_free = [0.0] * (2 * len(graph.ranks))  # by stream: when it has nothing left to do
    events, num_events = [(0.0, 0, graph.start, False)], 0
    while events:
        now, _, task, is_assembled = heappop(events)
        if is_assembled:
            _run_collective(graph, task, now, durations, stream_free, times)
            num_events += 1
            heappush(events, (ended[task], num_events, task, False))
            continue
        releases: list[tuple[int | None, float]] = [(waiting, now) for waiting in awaited_by.get(task, ())]
        if task in resumed_by:
            releases.append((resumed_by[task], now + under_way[task]))
        for number in participations_of[task]:
            for message in participations[number].posts:
                if not is_posted[message]:
                    is_posted[message] = True
                    continue
                duration = transit[message]
                departed[message] = arrived[message] = now
                if duration is not None:
                    stream = sender[message]
                    start = departed[message] = max(now, stream_free[stream])
                    stream_free[stream] = arrived[message] = start + duration
                    times.stream_order[stream].append(first_message_node + message)
                if (reading := reader[message]) is not None:
                    releases.append((participations[reading].task, arrived[message]))
            releases.append((participations[number + 1].task, now))
        releases += [(launched, now) for launched in graph.launched_after.get(task, ())]
        for released, when in releases:  # tasks that miss one thing less, and when it came
            if released is None:
                continue
            if when > ready[released]:
                ready[released] = when
            num_missing[released] -= 1
            if num_missing[released] == 0:
                start = ready[released]
                num_events += 1
                if is_compute[released]:
                    started[released], ended[released] = start, start + seconds[released]
                    heappush(events, (ended[released], num_events, released, False))
                else:
                    heappush(events, (start, num_events, released, True))
    return times


def _before_start(graph: SimGraph, under_way: Mapping[int, float]) -> EventTimes:
    """Return the times of a step of which nothing but the start has happened."""
    num_tasks, num_messages = len(graph.tasks), len(graph.messages)
    return EventTimes(
        started=[*[NEVER] * num_tasks, 0.0],
        ended=[*[NEVER] * num_tasks, 0.0],
        departed=[NEVER] * num_messages,
        arrived=[NEVER] * num_messages,
        stream_order=[[] for _ in range(2 * len(graph.ranks))],
        under_way=under_way,
        reached={},
        met=[0.0],
    )


def _run_collective(
    graph: SimGraph, task: int, now: float, durations: Durations, stream_free: list[float], times: EventTimes
) -> None:
    """Start a collective when all the streams that it occupies are free, and the slowest replica group has come."""
    streams = graph.streams_of[task]
    start = max([now, *[stream_free[stream] for stream in streams]])
    is_meeting = task in durations.meetings.tasks
    if is_meeting:
        reached = _own_work_done(graph, task, now, times)
        late = reached + durations.meetings.lateness * (reached - times.met[-1])
        if late > start:
            start = late
            times.reached[task] = reached
    end = start + durations.seconds[task]
    times.started[task], times.ended[task] = start, end
    for stream in streams:
        stream_free[stream] = end
        times.stream_order[stream].append(task)
    if is_meeting and graph.participations_of[task]:  # others do not hold the ranks
        times.met.append(end)


def _own_work_done(graph: SimGraph, task: int, now: float, times: EventTimes) -> float:
    """Return when the simulated ranks had done what comes before a collective in their own order.

    Reductions that they wait for besides have waited for slower replica groups already.
    """
    before = [graph.participations[number - 1].task for number in graph.participations_of[task]]
    return max([times.ended[other] for other in before if other is not None], default=now)
