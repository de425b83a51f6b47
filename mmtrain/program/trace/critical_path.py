"""The critical path: the chain of actions, each begun by the end of the one before, that a step's time is."""

from collections.abc import Iterator, Sequence

from mmtrain.program.simulation.event_loop import EventTimes
from mmtrain.program.simulation.sim_graph import SimGraph
from mmtrain.program.simulation.timing import TransferCost
from mmtrain.program.trace.timeline import Span


def critical_path(
    tracks: SimGraph, moments: EventTimes, costs: Sequence[TransferCost], transits: Sequence[TransferCost]
) -> tuple[Span, ...]:
    """Return compute, messages and collectives from the begin of the step to its end, without a gap between them.

    What ends last has waited for something that ended when it began, and so on back to the begin. Of several such
    chains one is returned: the one that stays on its rank, where it can. A message without rows is in no chain; it
    hands on what its ends waited for. A part is shown with the collective that it left under way, where that was waited
    for. Jobs of several ranks are shown on one that kept the others waiting.
    """
    return tuple(_Walk(tracks, moments, costs, transits).backwards())[::-1]


class _Walk:
    def __init__(
        self, tracks: SimGraph, moments: EventTimes, costs: Sequence[TransferCost], transits: Sequence[TransferCost]
    ) -> None:
        self.tracks, self.moments, self.costs, self.transits = tracks, moments, costs, transits
        self.posters: dict[int, list[int]] = {}
        for number, visit in enumerate(tracks.participations):
            for parcel in visit.posts:
                self.posters.setdefault(parcel, []).append(number)
        self.resumes = {other: part for part, other in tracks.resumed_by.items()}
        self.place = [{what: at for at, what in enumerate(moved)} for moved in moments.stream_order]

    def backwards(self) -> Iterator[Span]:
        """Spans of the path, the last one first."""
        tracks, moments = self.tracks, self.moments
        last = max(range(len(tracks.tasks)), key=lambda job: moments.ended[job])
        at, waited = -1 - last, 0.0
        while at != -1 - tracks.start:
            if at < 0:
                job = tracks.tasks[-1 - at]
                assert job is not None
                begin, (seconds, nbytes, _) = moments.started[-1 - at], self.costs[-1 - at]
                duration = seconds + waited
                at, track, waited = self._before_job(-1 - at)
                yield Span(tracks.ranks[track][0], begin, duration, job.action, nbytes)
            else:
                parcel, (seconds, nbytes, _) = tracks.messages[at], self.transits[at]
                if nbytes:
                    yield Span(parcel.senders[0], moments.departed[at], seconds, parcel.send, nbytes)
                at = self._before_parcel(at)

    def _before_job(self, job: int) -> tuple[int, int, float]:
        """What the job waited for last, a parcel or -1 - another job, and the track on which it did.

        And for how long after that job's end, where it left a collective under way.
        """
        visits, begin = self.tracks.participations, self.moments.started[job]
        numbers = self.tracks.participations_of[job]
        for v in numbers:
            if self.moments.ended[visits[v - 1].task] == begin:
                return -1 - visits[v - 1].task, visits[v].sim_rank, 0.0
        if job in self.resumes:
            before = self.resumes[job]
            waited = self.moments.under_way[before]
            if self.moments.ended[before] + waited == begin:
                return -1 - before, visits[numbers[0]].sim_rank, waited
        for v in numbers:
            for parcel in visits[v].reads:
                if self.moments.arrived[parcel] == begin:
                    return parcel, visits[v].sim_rank, 0.0
        for v in numbers:
            if (left := self._on_stream(visits[v].sim_rank, -1 - job, begin)) is not None:
                return left, visits[v].sim_rank, 0.0
        raise AssertionError("a job begins when what it waits for ends")

    def _before_parcel(self, parcel: int) -> int:
        """What ended when the message left: work of one of its ends, or what its sender's stream did before."""
        begin = self.moments.departed[parcel]
        for v in self.posters[parcel]:
            if self.moments.ended[self.tracks.participations[v].task] == begin:
                return -1 - self.tracks.participations[v].task
        before = self._on_stream(self.tracks.sender[parcel], parcel, begin)
        assert before is not None, "a message leaves when what it waits for ends"
        return before

    def _on_stream(self, track: int, what: int, begin: float) -> int | None:
        """What the communication stream did right before, if it ended then."""
        at = self.place[track].get(what, 0)
        if at == 0:
            return None
        before = self.moments.stream_order[track][at - 1]
        ended = self.moments.ended[-1 - before] if before < 0 else self.moments.arrived[before]
        return before if ended == begin else None
