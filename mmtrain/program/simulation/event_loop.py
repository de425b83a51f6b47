"""The simulator's event loop: when everything on some tracks begins, given how long it takes."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmtrain.program.simulation.sim_graph import SimGraph


@dataclass(frozen=True)
class EventTimes:
    """When jobs and parcels began and ended, in seconds; -1 for a job that never began.

    `stream_order` has, for each track, what its communication stream did, in order: a parcel p as p, a job j as -1 - j.
    """

    started: Sequence[float]  # by job, the begin of the step last
    ended: Sequence[float]
    departed: Sequence[float]  # by parcel
    arrived: Sequence[float]
    stream_order: Sequence[Sequence[int]]
    under_way: Mapping[int, float]  # by job: seconds of the collective that it left


def run_events(
    tracks: SimGraph, seconds: Sequence[float], transit: Sequence[float | None], under_way: Mapping[int, float]
) -> EventTimes:
    """Run all tracks from the begin of the step until none can go on.

    seconds: of each job. transit: seconds of each parcel, none where there is nothing to send. under_way: seconds for
    which the jobs in `sim_graphs.resumed_by` keep those that resume them waiting.

    Events are (time, tie-breaker, job): a job that ends, or as -1 - job a collective whose members are there and may
    have to wait for their communication streams. A job is known to begin as soon as the last thing it waits for has a
    time, so a forward or backward is one event however many ranks run it.
    """
    num_jobs, visits, visits_of = len(tracks.tasks), tracks.participations, tracks.participations_of
    sender, reader = tracks.sender, tracks.reader
    missing, computes, resumed = list(tracks.num_dependencies), tracks.is_compute, tracks.resumed_by
    ready = [0.0] * num_jobs  # the latest time of what a job waits for, as far as it is known
    began, ended = [-1.0] * (num_jobs + 1), [-1.0] * (num_jobs + 1)
    left, arrived = [-1.0] * len(sender), [-1.0] * len(sender)
    posted = [False] * len(sender)
    free = [0.0] * len(tracks.ranks)  # when a communication stream has nothing left to do
    moved: list[list[int]] = [[] for _ in tracks.ranks]
    began[tracks.start] = ended[tracks.start] = 0.0
    events, num_events = [(0.0, 0, tracks.start)], 0
    push, pop = heapq.heappush, heapq.heappop
    while events:
        now, _, job = pop(events)
        if job < 0:  # a collective's members are there
            job = -1 - job
            members = [visits[v].sim_rank for v in visits_of[job]]
            begin = max([now, *[free[t] for t in members]])
            began[job], ended[job] = begin, begin + seconds[job]
            for track in members:
                free[track] = ended[job]
                moved[track].append(-1 - job)
            num_events += 1
            push(events, (ended[job], num_events, job))
            continue
        came: list[tuple[int, float]] = []  # jobs for which something came, and when
        if job in resumed:
            came.append((resumed[job], now + under_way[job]))
        for v in visits_of[job]:
            for parcel in visits[v].posts:
                if not posted[parcel]:
                    posted[parcel] = True
                    continue
                takes, track = transit[parcel], sender[parcel]
                left[parcel] = arrived[parcel] = now
                if takes is not None:
                    begin = left[parcel] = max(now, free[track])
                    free[track] = arrived[parcel] = begin + takes
                    moved[track].append(parcel)
                if reader[parcel] >= 0:
                    came.append((visits[reader[parcel]].task, arrived[parcel]))
            came.append((visits[v + 1].task, now))
        for other, when in came:
            if other < 0:
                continue
            if when > ready[other]:
                ready[other] = when
            missing[other] -= 1
            if missing[other] == 0:
                begin = ready[other]
                num_events += 1
                if computes[other]:
                    began[other], ended[other] = begin, begin + seconds[other]
                    push(events, (ended[other], num_events, other))
                else:
                    push(events, (begin, num_events, -1 - other))
    return EventTimes(began, ended, left, arrived, moved, under_way)
