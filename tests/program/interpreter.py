"""A slow, literal executor of programs: the oracle for the checker's and the simulator's claims.

It moves labels instead of tensors: every rank runs until it must wait, round after round, until no rank moves. Sends
never wait. A receive takes the next message of its channel (edge, payload, sender, receiver), whatever that holds.
Compute and collectives wait for all ranks of their group, but for reductions of gradients and the gathering of
parameters: a rank starts them and goes on, and they run one after another. Only `Step` waits for reductions, and only
compute of their own stages for gathered parameters. The collectives of a group, of both kinds, come in one order on all
of its ranks: two communicators of the same ranks are no reason for two orders. Parts in a gap run between the two
halves of their host; a forward or backward in parts is done when its last layer is. The interpreter uses none of the
code under test.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from mmtrain.program.ir.actions import (
    Action,
    Backward,
    Fill,
    Forward,
    GatherParams,
    Partial,
    Recv,
    ReduceGrads,
    ReduceShared,
    Send,
    Share,
    Step,
)
from mmtrain.program.ir.graph import Microbatch, StageGraph, StageId

Seconds = Callable[[Action], float]


@dataclass
class Result:
    """`problems` is empty if the step ran to its end and computed what it should; `clock` is the end by rank."""

    problems: list[str]
    clock: dict[int, float]


@dataclass
class _Rank:
    actions: Sequence[Action]
    position: int = 0
    clock: float = 0.0
    done: list[Action] = field(default_factory=list)
    did: set[Action] = field(default_factory=set)
    expected: set[tuple] = field(default_factory=set)  # pieces that some message to the rank is for
    posted: dict[tuple, tuple] = field(default_factory=dict)  # piece -> channel, place in it, time
    shared: set[tuple] = field(default_factory=set)
    layers: dict[Forward | Backward, list[int]] = field(default_factory=dict)  # done of what runs in parts
    begun: list[tuple] = field(default_factory=list)  # asynchronous and not done: (group, place in its order)
    num_begun: dict[tuple, int] = field(default_factory=lambda: defaultdict(int))  # by group
    stream_free: float = 0.0  # end of the last asynchronous collective
    ended: dict[Action, float] = field(default_factory=dict)  # asynchronous collectives


class Interpreter:
    """Runs `actions` of some ranks of `graph`; no rank waits for ranks without actions."""

    def __init__(self, graph: StageGraph, actions: Mapping[int, Sequence[Action]], seconds: Seconds) -> None:
        self.graph, self.seconds = graph, seconds
        self.ranks = {rank: _Rank([p for a in todo for p in self._expanded(a)]) for rank, todo in actions.items()}
        for rank, state in self.ranks.items():
            for a in state.actions:
                if isinstance(a, Send | Recv) and (to := a.peer if isinstance(a, Send) else rank) in self.ranks:
                    self.ranks[to].expected.add((a.edge, a.src, a.dst, a.payload))
        self.sent: dict[tuple, list[tuple]] = defaultdict(list)  # channel -> (label, time, seconds)
        self.received: dict[tuple, int] = defaultdict(int)
        self.problems: list[str] = []
        self.begun: dict[tuple, dict[int, tuple[Action, float]]] = defaultdict(dict)  # by place and rank

    def run(self) -> Result:
        while sum(self._advance(rank) for rank in self.ranks):
            pass
        for rank, state in self.ranks.items():
            if state.position < len(state.actions):
                self.problems.append(f"rank {rank} is stuck at {state.actions[state.position]}")
            self._audit(rank, state)
        for channel in {*self.sent, *self.received}:
            if len(self.sent[channel]) != self.received[channel]:
                self.problems.append(f"{channel}: messages left over")
        return Result(self.problems, {rank: state.clock for rank, state in self.ranks.items()})

    def _expanded(self, action: Action) -> list[Action]:
        if not isinstance(action, Fill):
            return [action]
        host = action.host
        kind = "F" if isinstance(action.host, Forward) else "B"
        lo = 0
        hi = self._num_layers(host.stage)
        if isinstance(host, Partial):
            lo, hi, kind = host.lo, host.hi, host.kind
        halves = [Partial(host.stage, host.mb, kind, a, b) for a, b in ((lo, action.gap), (action.gap, hi))]
        first, second = halves if kind == "F" else halves[::-1]
        return [first, *action.partials, second]

    def _num_layers(self, stage: StageId) -> int:
        lo, hi = self.graph.stage(stage).layers
        return hi - lo

    def _advance(self, rank: int) -> bool:
        state = self.ranks[rank]
        moved = False
        while state.position < len(state.actions):
            action = state.actions[state.position]
            if isinstance(action, Send):
                self._send(rank, state, action)
                state.position += 1
            elif isinstance(action, Recv):
                channel = (action.edge, action.payload, action.peer, rank)
                piece = (action.edge, action.src, action.dst, action.payload)
                state.posted[piece] = (channel, self.received[channel], state.clock)
                self.received[channel] += 1
                state.position += 1
            elif isinstance(action, ReduceGrads | GatherParams):
                self._start_async(rank, state, action)
            elif not self._together(rank, action):
                return moved
            moved = True
        return moved

    def _send(self, rank: int, state: _Rank, action: Send) -> None:
        made = (
            Forward(action.edge.src, action.src)
            if action.payload == "activation"
            else Backward(action.edge.dst, action.dst)
        )
        if made not in state.did:
            self.problems.append(f"rank {rank} sends what it has not computed: {action}")
        label = (action.src, action.dst)
        self.sent[action.edge, action.payload, rank, action.peer].append((label, state.clock, self.seconds(action)))

    def _start_async(self, rank: int, state: _Rank, action: ReduceGrads | GatherParams) -> None:
        self._rules(rank, state, action)
        group = tuple(sorted(r for r in self._group(rank, action) if r in self.ranks))
        place = (group, state.num_begun[group])
        state.num_begun[group] += 1
        state.begun.append(place)
        self.begun[place][rank] = (action, state.clock)
        self._run_async()
        state.done.append(action)
        state.did.add(action)
        state.position += 1

    def _run_async(self) -> None:
        """Run every asynchronous collective that is the next one of all ranks of its group, until there is none."""
        for state in self.ranks.values():
            while state.begun:
                place = state.begun[0]
                members = [self.ranks[r] for r in place[0]]
                if not all(member.begun[:1] == [place] for member in members):
                    break
                started = self.begun[place].values()
                if len({action for action, _ in started}) > 1:
                    self.problems.append(f"{place[0]} reduce or gather different chunks together")
                ready = max([when for _, when in started] + [member.stream_free for member in members])
                for member, (action, _) in zip(members, started, strict=True):
                    member.stream_free = member.ended[action] = ready + self.seconds(action)
                    del member.begun[0]

    def _together(self, rank: int, action: Action) -> bool:
        """Run a compute action or a collective if all ranks of its group have reached it with their data."""
        group = [r for r in self._group(rank, action) if r in self.ranks] or [rank]
        start = 0.0
        for member in group:
            state = self.ranks[member]
            if state.position >= len(state.actions) or state.actions[state.position] != action:
                return False
            ready = self._data_time(member, action)
            if ready is None:
                return False
            start = max(start, state.clock, ready)
        if len({self.ranks[member].num_begun[tuple(sorted(group))] for member in group}) > 1:
            self.problems.append(f"{group}: not all have begun as many reductions and gathers before {action}")
        for member in group:
            state = self.ranks[member]
            self._rules(member, state, action)
            state.clock = start + self.seconds(action)
            state.done.append(action)
            state.did.add(action)
            state.position += 1
            if isinstance(action, Share):
                state.shared.add((action.edge, action.mb, action.payload))
        return True

    def _group(self, rank: int, action: Action) -> list[int]:
        tp_group = lambda stage, mb: list(self.graph.stage(stage).tp_groups[mb.replica])  # noqa: E731
        match action:
            case Forward(stage, mb) | Backward(stage, mb) | Partial(stage, mb):
                return tp_group(stage, mb)
            case Share(edge, mb, payload):
                return tp_group(edge.dst if payload == "activation" else edge.src, mb)
            case ReduceGrads(unit) | GatherParams(unit):
                mine = [s for s in self.graph.stages if s.id.unit == unit and any(rank in x for x in s.tp_groups)]
                same = (
                    x[k] for s in mine for y in s.tp_groups if rank in y for k in [y.index(rank)] for x in s.tp_groups
                )
                return list(dict.fromkeys(same))
            case ReduceShared():
                llm = [s for s in self.graph.stages if s.id.unit == "llm"]
                for first, last in zip(llm[0].tp_groups, llm[-1].tp_groups, strict=True):
                    for pair in zip(first, last, strict=True):
                        if rank in pair:
                            return list(pair)
        return list(self.ranks)

    def _data_time(self, rank: int, action: Action) -> float | None:
        """Return when everything the action reads is on the rank; None if some of it is not on its way yet."""
        times = [self._pieces_time(rank, action), *self._awaited_times(rank, action)]
        return None if None in times else max(t for t in times if t is not None)

    def _awaited_times(self, rank: int, action: Action) -> list[float | None]:
        """Return the ends of the asynchronous collectives that the action waits for; None of those that have none."""
        state = self.ranks[rank]
        begun = [a for a in state.done if isinstance(a, ReduceGrads | GatherParams)]
        if isinstance(action, Step):
            return [state.ended.get(a) for a in begun if isinstance(a, ReduceGrads)]
        if not isinstance(action, Forward | Backward | Partial):
            return []
        return [
            state.ended.get(a)
            for a in begun
            if isinstance(a, GatherParams) and self.runs_any(action, self.buckets(rank, a.unit).get(_number(a), set()))
        ]

    def _pieces_time(self, rank: int, action: Action) -> float | None:
        """Return when every piece that the action reads is on the rank; None if some have not been sent yet."""
        if isinstance(action, Partial):
            if self._layers_of(action)[0] != (0 if action.kind == "F" else self._num_layers(action.stage) - 1):
                return 0.0
            action = _made_of(action)
        match action:
            case Forward(stage, mb):
                pieces = [
                    (e, s, mb, "activation")
                    for e in self.graph.edges
                    if e.dst == stage
                    for s in self._partners(e.src.unit, mb)
                ]
            case Backward(stage, mb):
                pieces = [
                    (e, mb, d, "gradient")
                    for e in self.graph.edges
                    if e.src == stage
                    for d in self._partners(e.dst.unit, mb)
                ]
            case Share(edge, mb, "activation"):
                if rank != self.graph.stage(edge.dst).tp_groups[mb.replica][0]:
                    return 0.0
                pieces = [(edge, s, mb, "activation") for s in self._partners(edge.src.unit, mb)]
            case Share(edge, mb, "gradient"):
                if rank != self.graph.stage(edge.src).tp_groups[mb.replica][0]:
                    return 0.0
                pieces = [(edge, mb, d, "gradient") for d in self._partners(edge.dst.unit, mb)]
            case _:
                return 0.0
        times = [self._piece_time(rank, piece) for piece in pieces]
        return None if None in times else max([0.0, *(t for t in times if t is not None)])

    def _piece_time(self, rank: int, piece: tuple) -> float | None:
        edge, src, dst, payload = piece
        state = self.ranks[rank]
        if (edge, dst if payload == "activation" else src, payload) in state.shared:
            return 0.0
        if piece in state.posted:
            channel, place, when = state.posted[piece]
            messages = self.sent[channel]
            if place >= len(messages):
                return None
            label, sent, seconds = messages[place]
            if label != (src, dst):
                self.problems.append(f"rank {rank} receives {label} as {piece}")
            return max(sent, when) + seconds
        made = Forward(edge.src, src) if payload == "activation" else Backward(edge.dst, dst)
        return 0.0 if made in state.did and piece not in state.expected else None

    def _partners(self, unit: str, mb: Microbatch) -> list[Microbatch]:
        """Return the microbatches of `unit` with which `mb` may exchange data: of the same share of replicas and step.

        A share of the step is one of as many equal parts as both units can be cut into.
        """
        if unit == mb.unit:
            return [mb]
        mine = self.graph.mesh(mb.unit)
        other = self.graph.mesh(unit)
        groups = self.graph.num_groups
        parts = gcd(mine.num_microbatches, other.num_microbatches)
        return [
            Microbatch(unit, r, i)
            for i in range(other.num_microbatches)
            for r in range(other.dp)
            if r * groups // other.dp == mb.replica * groups // mine.dp
            and i * parts // other.num_microbatches == mb.index * parts // mine.num_microbatches
        ]

    def _rules(self, rank: int, state: _Rank, action: Action) -> None:
        """Report an action that runs before something it must follow, though data flow alone would allow it."""
        later = state.actions[state.position + 1 :]
        wrong = False
        if isinstance(action, Forward | Backward | Partial):
            wrong = any(
                isinstance(a, GatherParams) and self.runs_any(action, self.buckets(rank, a.unit)[_number(a)])
                for a in later
            )
        if isinstance(action, Partial):
            wrong |= self._part(state, action)
        match action:
            case Backward(stage, mb):
                wrong |= Forward(stage, mb) not in state.did
            case ReduceGrads(unit):
                layers = self.buckets(rank, unit).get(_number(action), set())
                ends = self._tied_layers()
                wrong = any(layer in ends for layer in layers) and any(isinstance(a, ReduceShared) for a in later)
                if ends and ends[0] in layers and self._holds(rank, ends[-1][0]):  # the only copy of the matrix
                    layers = layers | {ends[-1]}
                wrong |= any(_is_backward(a) and self.runs_any(a, layers) for a in later)
            case ReduceShared():
                wrong = any(_is_backward(a) and a.stage in self._tied() for a in later)
            case Step():
                wrong = any(isinstance(a, Forward | Backward | Partial | ReduceGrads | ReduceShared) for a in later)
        if wrong:
            self.problems.append(f"rank {rank} runs {action} too early")

    def _tied(self) -> list[StageId]:
        llm = [s.id for s in self.graph.stages if s.id.unit == "llm"]
        return [llm[0], llm[-1]] if self.graph.tied_embeddings else []

    def _tied_layers(self) -> list[tuple[StageId, int]]:
        """Return the first and the last layer that read the tied matrix, each as its stage and its number in it."""
        if not self._tied():
            return []
        first, last = self._tied()
        return [(first, 0), (last, self._num_layers(last) - 1)]

    def _holds(self, rank: int, stage: StageId) -> bool:
        return any(rank in tp_group for tp_group in self.graph.stage(stage).tp_groups)

    def buckets(self, rank: int, unit: str) -> dict[tuple[int, int], set[tuple[StageId, int]]]:
        """Return the layers whose gradients the rank reduces together, by chunk and number of the bucket."""
        held = [s for s in self.graph.stages if s.id.unit == unit and any(rank in x for x in s.tp_groups)]
        buckets = defaultdict(set)
        for chunk, stage in enumerate(held):
            for layer in range(self._num_layers(stage.id)):
                if stage.trainable:
                    number = sum(start <= layer for start in stage.bucket_starts) - 1
                    buckets[chunk, number].add((stage.id, layer))
        return dict(buckets)

    def runs_any(self, action: Forward | Backward | Partial, layers: set[tuple[StageId, int]]) -> bool:
        """Return whether the action runs one of the layers, or a piece of one."""
        segments = list(range(self._num_layers(action.stage)))
        if isinstance(action, Partial):
            pieces = self.graph.stage(action.stage).pieces or [1] * len(segments)
            segments = [layer for layer, count in enumerate(pieces) for _ in range(count)][action.lo : action.hi]
        return any((action.stage, layer) in layers for layer in segments)

    def _layers_of(self, part: Partial) -> list[int]:
        layers = list(range(part.lo, part.hi))
        return layers if part.kind == "F" else layers[::-1]

    def _part(self, state: _Rank, part: Partial) -> bool:
        """Run layers one by one; return whether any was not the next of its microbatch."""
        whole = _made_of(part)
        count = self._num_layers(part.stage)
        expected = list(range(count)) if part.kind == "F" else list(range(count))[::-1]
        done = state.layers.setdefault(whole, [])
        if not done and isinstance(whole, Backward) and Forward(part.stage, part.mb) not in state.did:
            return True
        done += self._layers_of(part)
        if done == expected:
            state.done.append(whole)
            state.did.add(whole)
        return done != expected[: len(done)]

    def _audit(self, rank: int, state: _Rank) -> None:
        """Report a rank that did not do exactly what the graph asks of it, each once."""
        trained = set()
        expected = []
        for stage in self.graph.stages:
            for replica, tp_group in enumerate(stage.tp_groups):
                if rank not in tp_group:
                    continue
                for i in range(self.graph.mesh(stage.id.unit).num_microbatches):
                    mb = Microbatch(stage.id.unit, replica, i)
                    expected.append(Forward(stage.id, mb))
                    if trains_up_to(self.graph, stage.id):
                        expected.append(Backward(stage.id, mb))
                if stage.trainable:
                    trained.add(stage.id.unit)
        buckets = [(unit, *number) for unit in trained for number in self.buckets(rank, unit)]
        expected += [Step(), *(kind(*bucket) for bucket in buckets for kind in (ReduceGrads, GatherParams))]
        llm = [s for s in self.graph.stages if s.id.unit == "llm"]
        two_copies = llm[0].tp_groups != llm[-1].tp_groups if llm else False
        if self.graph.tied_embeddings and two_copies and llm[0].trainable and llm[-1].trainable:
            expected += [ReduceShared("embeddings")] * any(rank in x for s in (llm[0], llm[-1]) for x in s.tp_groups)
        executed = [a for a in state.done if not isinstance(a, Share | Partial)]
        shares = [a for a in state.actions if isinstance(a, Share)]
        if sorted(map(repr, expected)) != sorted(map(repr, executed)) or len(set(shares)) != len(shares):
            self.problems.append(f"rank {rank} did not do what it should")


def _made_of(part: Partial) -> Forward | Backward:
    return Forward(part.stage, part.mb) if part.kind == "F" else Backward(part.stage, part.mb)


def _number(collective: ReduceGrads | GatherParams) -> tuple[int, int]:
    return collective.chunk, collective.bucket


def _is_backward(action: Action) -> bool:
    return isinstance(action, Backward) or (isinstance(action, Partial) and action.kind == "B")


def trains_up_to(graph: StageGraph, stage: StageId) -> bool:
    """Return whether anything trainable lies in the stage or upstream of it."""
    return graph.stage(stage).trainable or any(trains_up_to(graph, e.src) for e in graph.edges if e.dst == stage)


def interpret(
    graph: StageGraph, actions: Mapping[int, Sequence[Action]], seconds: Seconds = lambda action: 0.0
) -> Result:
    """Run the actions; `seconds` of a `Send` is how long its message travels."""
    return Interpreter(graph, actions, seconds).run()
