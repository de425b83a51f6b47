"""The simulator: replays a checked program event by event, over what its actions take.

Each rank has a compute stream and a communication stream. The rank walks through its actions: it posts sends and
receives without delay; a forward or backward, a part of one, or a collective starts when the rank has come to it, the
messages it reads have arrived and all ranks that take part are there, and holds the rank until it ends. A message is
ready once both ends have posted it; messages and collectives occupy the communication streams of the sender, or of all
members, one after another in the order in which they become ready. What arrives occupies nobody's stream.
"""

import heapq
from dataclasses import dataclass

from mmtrain.errors import ProgramError
from mmtrain.program.account import Account
from mmtrain.program.actions import Collective, Compute
from mmtrain.program.links import Do, Links, Post, Work
from mmtrain.program.memory import peak_bytes
from mmtrain.program.program import Program
from mmtrain.program.text import action_to_text
from mmtrain.program.timeline import Span, Timeline
from mmtrain.program.timing import Timing


def simulate(program: Program, timing: Timing, num_groups: int = 1) -> Timeline:
    """Predict one step of the first `num_groups` replica groups.

    One group stands for all when their loads are alike: it then waits for its own members of data-parallel
    collectives only, though these are timed at their full size. With different loads simulate them all.

    What the bubbles mean is said in `Account`.

    Raises:
        ProgramError: the program gets stuck; `check` says why.
    """
    replay = _Replay(program, timing, num_groups)
    replay.run()
    step_time = max(walk.account.clock for walk in replay.walks.values())
    for walk in replay.walks.values():
        walk.account.close(step_time)
    return Timeline(
        spans=tuple(sorted(replay.spans, key=_start_and_rank)),
        step_time_s=step_time,
        bubbles={rank: walk.account.bubbles for rank, walk in replay.walks.items()},
        peak_memory_bytes={
            rank: peak_bytes(program.graph, program.for_rank(rank), timing.activation_bytes)[0] for rank in replay.walks
        },
        simulated=True,
        pipeline_ranks={mesh.unit: mesh.pp for mesh in program.graph.meshes},
    )


def _start_and_rank(span: Span) -> tuple[float, int]:
    return span.start_s, span.rank


@dataclass(slots=True)
class _Walk:
    """Where one rank stands."""

    rank: int
    group: int  # its replica group
    links: Links  # of that group
    steps: tuple[Post | Do, ...]
    account: Account
    at: int = 0
    comm_free: float = 0.0  # when the communication stream has nothing left to do
    num_missing: int = 0  # messages posted by one end only that the next work reads

    def blocked_at(self) -> str:
        """The work before which a rank stands that cannot go on, as text."""
        step = self.steps[self.at]
        assert isinstance(step, Do), "posting a message never blocks"
        return action_to_text(self.links.works[step.work].action)


class _Replay:
    """The event loop. Events are (time, tie-breaker, rank that may go on).

    Messages and works are those of `Program.links`, once for each replica group; a work with members in other groups
    is kept with group 0 and waits for its members in all of them.
    """

    def __init__(self, program: Program, timing: Timing, num_groups: int) -> None:
        self.timing = timing
        self.links = [program.links_of(group) for group in range(num_groups)]
        self.walks = {
            rank: _Walk(
                rank, group, links, steps, Account.of(links.works[s.work].action for s in steps if isinstance(s, Do))
            )
            for group, links in enumerate(self.links)
            for rank, steps in links.steps.items()
        }
        num_messages, num_works = len(self.links[0].messages), len(self.links[0].works)
        self.posted = [[False] * num_messages for _ in range(num_groups)]
        self.arrival: list[list[float | None]] = [[None] * num_messages for _ in range(num_groups)]
        self.reader: list[list[_Walk | None]] = [[None] * num_messages for _ in range(num_groups)]
        self.num_ready = [[0] * num_works for _ in range(num_groups)]
        self.spans: list[Span] = []
        self.events: list[tuple[float, int, _Walk]] = []
        self.num_events = 0

    def run(self) -> None:
        """Let every rank go on until none can.

        Raises:
            ProgramError: some rank did not come to its end.
        """
        for walk in self.walks.values():
            self._wake(walk, 0.0)
        while self.events:
            now, _, walk = heapq.heappop(self.events)
            self._go_on(walk, now)
        for walk in self.walks.values():
            if walk.at < len(walk.steps):
                raise ProgramError(
                    f"simulate: rank {walk.rank} waits for ever at `{walk.blocked_at()}` (action {walk.at}); "
                    "let check say why"
                )

    def _wake(self, walk: _Walk, when: float) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (when, self.num_events, walk))

    def _go_on(self, walk: _Walk, now: float) -> None:
        """Post messages up to the next work; begin that if nothing is missing for it."""
        steps, posted = walk.steps, self.posted[walk.group]
        while walk.at < len(steps):
            step = steps[walk.at]
            if isinstance(step, Do):
                self._try(walk, step, now)
                return
            walk.at += 1
            if posted[step.message]:
                self._transfer(walk.group, step.message, now)
            posted[step.message] = True

    def _transfer(self, group: int, number: int, now: float) -> None:
        """Move a message that both ends have posted."""
        rank, send = self.links[group].messages[number]
        seconds, nbytes = self.timing.message(rank, send)
        arrival = now
        if nbytes:
            sender = self.walks[rank]
            start = max(now, sender.comm_free)
            arrival = sender.comm_free = start + seconds
            self.spans.append(Span(rank, start, seconds, send, nbytes))
        self.arrival[group][number] = arrival
        reader = self.reader[group][number]
        if reader is not None:
            reader.num_missing -= 1
            if reader.num_missing == 0:
                self._wake(reader, now)

    def _try(self, walk: _Walk, step: Do, now: float) -> None:
        """Begin a work unless a message or a member is missing, whose coming will wake the rank."""
        ready = now
        for message in step.reads:
            arrival = self.arrival[walk.group][message]
            if arrival is None:
                self.reader[walk.group][message] = walk
                walk.num_missing += 1
            elif arrival > ready:
                ready = arrival
        if walk.num_missing:
            return
        if ready > now:
            self._wake(walk, ready)
            return
        work = walk.links.works[step.work]
        groups = range(len(self.links)) if work.crosses_groups else range(walk.group, walk.group + 1)
        num_ready = self.num_ready[groups[0]]
        num_ready[step.work] += 1
        if num_ready[step.work] == len(work.ranks) * len(groups):
            self._begin(work, [self.walks[rank] for g in groups for rank in self.links[g].works[step.work].ranks], now)

    def _begin(self, work: Work, walks: list[_Walk], now: float) -> None:
        action = work.action
        if isinstance(action, Compute):
            self._compute(action, walks, now)
            return
        seconds, nbytes = self.timing.collective(walks[0].rank, action, work.group)
        start = max([now, *(walk.comm_free for walk in walks)])
        for walk in walks:
            walk.comm_free = start + seconds
            self._done(walk, action, start, seconds, nbytes)

    def _compute(self, action: Compute, walks: list[_Walk], now: float) -> None:
        seconds = self.timing.compute(action)
        for walk in walks:
            self._done(walk, action, now, seconds)

    def _done(self, walk: _Walk, action: Compute | Collective, start: float, seconds: float, nbytes: int = 0) -> None:
        self.spans.append(Span(walk.rank, start, seconds, action, nbytes))
        walk.account.book(action, start, seconds)
        walk.at += 1
        self._wake(walk, walk.account.clock)
