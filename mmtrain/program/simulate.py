"""The simulator: replays a checked program event by event, over what its actions take.

Each rank has a compute stream and a communication stream. The rank walks through its actions: it posts sends and
receives without delay; a forward, backward or collective starts when the rank has come to it, the messages it reads
have arrived and all ranks that take part are there, and holds the rank until it ends. A message is ready once both
ends have posted it; messages and collectives occupy the communication streams of the sender, or of all members, one
after another in the order in which they become ready. What arrives occupies nobody's stream.
"""

import heapq
from dataclasses import dataclass, field

from mmtrain.errors import ProgramError
from mmtrain.program.actions import (
    Action,
    Backward,
    Collective,
    Compute,
    Forward,
    GatherParams,
    Recv,
    ReduceGrads,
    Send,
    Share,
)
from mmtrain.program.memory import peak_bytes
from mmtrain.program.program import Program
from mmtrain.program.text import action_to_text
from mmtrain.program.timeline import BUBBLE_KINDS, BubbleKind, Span, Timeline
from mmtrain.program.timing import Timing
from mmtrain.program.wiring import members, waiter


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
    ranks = [rank for group in program.symmetry.ranks[:num_groups] for rank in group.values()]
    replay = _Replay(program, timing, {rank: program.for_rank(rank) for rank in ranks})
    replay.run()
    step_time = max(walk.clock for walk in replay.walks.values())
    for walk in replay.walks.values():
        walk.bubbles["dp_gather"] += step_time - walk.clock
    return Timeline(
        spans=tuple(sorted(replay.spans, key=lambda span: (span.start_s, span.rank))),
        step_time_s=step_time,
        bubbles={rank: walk.bubbles for rank, walk in replay.walks.items()},
        peak_memory_bytes={
            rank: peak_bytes(program.graph, walk.actions, timing.activation_bytes)[0]
            for rank, walk in replay.walks.items()
        },
        simulated=True,
    )


@dataclass(slots=True)
class _Message:
    """A message in flight; `arrival` is known once both ends have posted it."""

    sender: int
    send: Send
    posted: int = 0
    arrival: float | None = None
    reader: "_Walk | None" = None  # blocked until it arrives


@dataclass(slots=True)
class _Work:
    """What holds a rank: a forward, a backward or a collective. One object for all ranks that take part."""

    action: Compute | Collective
    group: tuple[int, ...]  # of all replica groups
    walks: "list[_Walk]" = field(default_factory=list)  # those simulated
    num_ready: int = 0


@dataclass(slots=True)
class _Walk:
    """Where one rank stands."""

    rank: int
    actions: tuple[Action, ...]
    forwards_left: int
    todo: list[tuple[_Message | None, _Work | None, list[_Message]]] = field(default_factory=list)
    at: int = 0
    clock: float = 0.0  # end of the work done so far
    comm_free: float = 0.0  # when the communication stream has nothing left to do
    num_missing: int = 0  # messages posted by one end only that the next work waits for
    computed: bool = False
    bubbles: dict[BubbleKind, float] = field(default_factory=lambda: dict.fromkeys(BUBBLE_KINDS, 0.0))

    def waiting_kind(self, action: Compute | Collective) -> BubbleKind:
        if isinstance(action, Forward | Backward | Share):
            if not self.computed:
                return "pp_warmup"
            return "pp_other" if self.forwards_left else "pp_cooldown"
        return "imbalance" if isinstance(action, ReduceGrads | GatherParams) else "pp_cooldown"


class _Replay:
    """The event loop. Events are (time, tie-breaker, rank that may go on)."""

    def __init__(self, program: Program, timing: Timing, actions: dict[int, tuple[Action, ...]]) -> None:
        self.timing = timing
        self.walks = {
            rank: _Walk(rank, todo, sum(isinstance(a, Forward) for a in todo)) for rank, todo in actions.items()
        }
        self.spans: list[Span] = []
        self.events: list[tuple[float, int, _Walk]] = []
        self.num_events = 0
        _link(program, self.walks)

    def run(self) -> None:
        for walk in self.walks.values():
            self._wake(walk, 0.0)
        while self.events:
            now, _, walk = heapq.heappop(self.events)
            self._go_on(walk, now)
        for walk in self.walks.values():
            if walk.at < len(walk.todo):
                stuck = action_to_text(walk.actions[walk.at])
                raise ProgramError(
                    f"simulate: rank {walk.rank} waits for ever at `{stuck}` (action {walk.at}); let check say why"
                )

    def _wake(self, walk: _Walk, when: float) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (when, self.num_events, walk))

    def _go_on(self, walk: _Walk, now: float) -> None:
        """Post messages up to the next work; begin that if nothing is missing for it."""
        while walk.at < len(walk.todo):
            message, work, reads = walk.todo[walk.at]
            if work is not None:
                self._try(walk, work, reads, now)
                return
            assert message is not None
            walk.at += 1
            self._post(message, now)

    def _post(self, message: _Message, now: float) -> None:
        message.posted += 1
        if message.posted < 2:
            return
        seconds, nbytes = self.timing.message(message.sender, message.send)
        message.arrival = now
        if nbytes:
            sender = self.walks[message.sender]
            start = max(now, sender.comm_free)
            message.arrival = sender.comm_free = start + seconds
            self.spans.append(Span(message.sender, start, seconds, message.send, nbytes))
        if (reader := message.reader) is not None:
            reader.num_missing -= 1
            if reader.num_missing == 0:
                self._wake(reader, now)

    def _try(self, walk: _Walk, work: _Work, reads: list[_Message], now: float) -> None:
        ready = now
        for message in reads:
            if message.arrival is None:
                message.reader = walk
                walk.num_missing += 1
            elif message.arrival > ready:
                ready = message.arrival
        if walk.num_missing:
            return
        if ready > now:
            self._wake(walk, ready)
            return
        work.num_ready += 1
        if work.num_ready == len(work.walks):
            self._begin(work, now)

    def _begin(self, work: _Work, now: float) -> None:
        action = work.action
        if isinstance(action, Forward | Backward):
            start, seconds, nbytes = now, self.timing.compute(action), 0
        else:
            seconds, nbytes = self.timing.collective(work.walks[0].rank, action, work.group)
            start = max([now, *(walk.comm_free for walk in work.walks)])
        end = start + seconds
        for walk in work.walks:
            walk.bubbles[walk.waiting_kind(action)] += start - walk.clock
            if isinstance(action, Forward | Backward):
                walk.computed = True
                walk.forwards_left -= isinstance(action, Forward)
            else:
                walk.bubbles[_own_kind(action)] += seconds
                walk.comm_free = end
            self.spans.append(Span(walk.rank, start, seconds, action, nbytes))
            walk.clock = end
            walk.at += 1
            self._wake(walk, end)


def _own_kind(action: Collective) -> BubbleKind:
    """The bubble that a collective itself is: no rank computes during it."""
    if isinstance(action, Share):
        return "tp"
    return "dp_gather" if isinstance(action, GatherParams) else "dp_reduce"


def _link(program: Program, walks: dict[int, _Walk]) -> None:
    """Give both ends of a message one object, and likewise all ranks of a collective."""
    messages: dict[tuple[Send, int], _Message] = {}
    works: dict[tuple[tuple[int, ...], int], _Work] = {}
    for rank, walk in walks.items():
        reads: dict[Action, list[_Message]] = {}
        seen: dict[tuple[int, ...], int] = {}
        for action in walk.actions:
            if isinstance(action, Send | Recv):
                message = _message(messages, rank, action)
                if isinstance(action, Recv):
                    reads.setdefault(waiter(program.graph, action), []).append(message)
                walk.todo.append((message, None, []))
            else:
                group = members(program.graph, rank, action)
                seen[group] = seen.get(group, 0) + 1
                key = (group, seen[group])
                if key not in works:
                    works[key] = _Work(action, group)
                works[key].walks.append(walk)
                walk.todo.append((None, works[key], reads.get(action, [])))


def _message(messages: dict[tuple[Send, int], _Message], rank: int, action: Send | Recv) -> _Message:
    if isinstance(action, Send):
        send, sender = action, rank
    else:
        send, sender = Send(action.edge, action.src, action.dst, rank, action.payload), action.peer
    return messages.setdefault((send, sender), _Message(sender, send))
