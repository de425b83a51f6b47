"""The simulator: replays a checked program event by event, over what its actions take.

Each rank has a compute stream and a communication stream. The rank walks through its actions: it posts sends and
receives without delay; a forward or backward, a part of one, or a collective starts when the rank has come to it, the
messages it reads have arrived and all ranks that take part are there, and holds the rank until it ends. A message is
ready once both ends have posted it; messages and collectives occupy the communication streams of the sender, or of all
members, one after another in the order in which they become ready. What arrives occupies nobody's stream.
"""

import heapq
from dataclasses import dataclass, field

from mmtrain.errors import ProgramError
from mmtrain.program.actions import Collective, Compute, GatherParams, ReduceGrads, Share
from mmtrain.program.links import Do, Links, Post, Work
from mmtrain.program.memory import peak_bytes
from mmtrain.program.program import Program
from mmtrain.program.segments import direction
from mmtrain.program.text import action_to_text
from mmtrain.program.timeline import BUBBLE_KINDS, BubbleKind, Span, Timeline
from mmtrain.program.timing import Timing


def simulate(program: Program, timing: Timing, num_groups: int = 1) -> Timeline:
    """Predict one step of the first `num_groups` replica groups.

    One group stands for all when their loads are alike: it then waits for its own members of data-parallel
    collectives only, though these are timed at their full size. With different loads simulate them all.

    Bubbles: a rank's wait for data before its first compute is `pp_warmup`, after its last forward `pp_cooldown`,
    between them `pp_other`; `pp_cooldown` also counts the wait for other stages before shared weights and the step,
    `imbalance` that for other replicas before a reduction. Collectives themselves count as `tp` (sharing in a lane),
    `dp_gather` or `dp_reduce` (gradients, shared weights, the norm). Tensor parallelism inside compute is compute.

    Raises:
        ProgramError: the program gets stuck; `check` says why.
    """
    replay = _Replay(program, timing, num_groups)
    replay.run()
    step_time = max(walk.clock for walk in replay.walks.values())
    for walk in replay.walks.values():
        walk.bubbles["dp_gather"] += step_time - walk.clock
    return Timeline(
        spans=tuple(sorted(replay.spans, key=_start_and_rank)),
        step_time_s=step_time,
        bubbles={rank: walk.bubbles for rank, walk in replay.walks.items()},
        peak_memory_bytes={
            rank: peak_bytes(program.graph, program.for_rank(rank), timing.activation_bytes)[0] for rank in replay.walks
        },
        simulated=True,
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
    forwards_left: int = 0
    at: int = 0
    clock: float = 0.0  # end of the work done so far
    comm_free: float = 0.0  # when the communication stream has nothing left to do
    num_missing: int = 0  # messages posted by one end only that the next work reads
    computed: bool = False
    bubbles: dict[BubbleKind, float] = field(default_factory=lambda: dict.fromkeys(BUBBLE_KINDS, 0.0))

    def __post_init__(self) -> None:
        self.forwards_left = sum(_is_forward(action) for action in self.work_actions())

    def work_actions(self) -> list[Compute | Collective]:
        """What the rank does, messages left out."""
        works = self.links.works
        return [works[step.work].action for step in self.steps if isinstance(step, Do)]

    def blocked_at(self) -> str:
        """The work before which a rank stands that cannot go on, as text."""
        step = self.steps[self.at]
        assert isinstance(step, Do), "posting a message never blocks"
        return action_to_text(self.links.works[step.work].action)

    def waiting_kind(self, action: Compute | Collective) -> BubbleKind:
        """The bubble that a wait before `action` is."""
        if isinstance(action, Compute | Share):
            if not self.computed:
                return "pp_warmup"
            return "pp_other" if self.forwards_left else "pp_cooldown"
        return "imbalance" if isinstance(action, ReduceGrads | GatherParams) else "pp_cooldown"


def _is_forward(action: Compute | Collective) -> bool:
    return isinstance(action, Compute) and direction(action) == "F"


def _own_kind(action: Collective) -> BubbleKind:
    """The bubble that a collective itself is: no rank computes during it."""
    if isinstance(action, Share):
        return "tp"
    return "dp_gather" if isinstance(action, GatherParams) else "dp_reduce"


class _Replay:
    """The event loop. Events are (time, tie-breaker, rank that may go on).

    Messages and works are those of `Program.links`, once for each replica group; a work with members in other groups
    is kept with group 0 and waits for its members in all of them.
    """

    def __init__(self, program: Program, timing: Timing, num_groups: int) -> None:
        self.timing = timing
        self.links = [program.links_of(group) for group in range(num_groups)]
        self.walks = {
            rank: _Walk(rank, group, links, steps)
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
        own_kind = _own_kind(action)
        for walk in walks:
            walk.bubbles[walk.waiting_kind(action)] += start - walk.clock
            walk.bubbles[own_kind] += seconds
            walk.comm_free = start + seconds
            self._done(walk, Span(walk.rank, start, seconds, action, nbytes))

    def _compute(self, action: Compute, walks: list[_Walk], now: float) -> None:
        seconds = self.timing.compute(action)
        for walk in walks:
            walk.bubbles[walk.waiting_kind(action)] += now - walk.clock
            walk.computed = True
            walk.forwards_left -= _is_forward(action)
            self._done(walk, Span(walk.rank, now, seconds, action))

    def _done(self, walk: _Walk, span: Span) -> None:
        self.spans.append(span)
        walk.clock = span.start_s + span.duration_s
        walk.at += 1
        self._wake(walk, walk.clock)
