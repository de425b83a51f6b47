"""When everything in a program starts, found by relaxing precedences until nothing changes: the simulator's oracle.

It takes what each rank does, who reads which message and who takes part in what from the actions and the interpreter.
The order in which communication streams were used comes from the simulator itself, since nothing else determines it.
From these the oracle finds the earliest start of everything. Tests then check that the order was the promised one:
what is ready first moves first.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mmtrain.program import Program
from mmtrain.program.ir.actions import (
    Action,
    AsyncCollective,
    Backward,
    Compute,
    Fill,
    Forward,
    GatherParams,
    Partial,
    Recv,
    ReduceGrads,
    Send,
    Share,
    Step,
)
from mmtrain.program.trace.timeline import Timeline
from tests.program.interpreter import Interpreter

Node = tuple[object, ...]  # ("work", action, group) or ("message", sender, send)


@dataclass
class Precedences:
    """What must have ended before each node starts, and, for messages, before each node is ready to move."""

    seconds: dict[Node, float]
    before: dict[Node, set[Node]]
    on_rank: dict[int, list[Node]]  # work in order

    def solve(self, streams: Sequence[Sequence[Node]]) -> dict[Node, float]:
        """Return the earliest starts if the nodes of each stream follow each other."""
        before = {node: set(nodes) for node, nodes in self.before.items()}
        for stream in streams:
            for node, after in pairwise(stream):
                before[after].add(node)
        start = dict.fromkeys(self.seconds, 0.0)
        changed = True
        while changed:
            changed = False
            for node, nodes in before.items():
                ready = max((start[b] + self.seconds[b] for b in nodes), default=0.0)
                if ready > start[node]:
                    start[node] = ready
                    changed = True
        return start

    def ready(self, start: Mapping[Node, float], node: Node) -> float:
        """Return when a message or collective could move if no stream were busy."""
        return max((start[b] + self.seconds[b] for b in self.before[node]), default=0.0)


def precedences(program: Program, timing: object) -> Precedences:
    """Return the precedences of a program that runs, of all replica groups, with durations."""
    graph = program.graph
    actions = {rank: program.for_rank(rank) for rank in sorted(program.symmetry.location)}
    interpreter = Interpreter(graph, actions, lambda action: 0.0)
    result = Precedences({}, defaultdict(set), {rank: [] for rank in actions})
    for rank in actions:
        last: Node | None = None
        stopped: dict[tuple[object, ...], set[Node]] = {}
        waiting: list[tuple[Recv, Node]] = []
        asynchronous: dict[ReduceGrads | GatherParams, Node] = {}
        for action in interpreter.ranks[rank].actions:
            if isinstance(action, Send | Recv):
                node = _message(rank, action)
                if isinstance(action, Recv):
                    waiting.append((action, node))
                else:
                    result.seconds[node] = timing.message(rank, action).seconds  # type: ignore[attr-defined]
                result.before[node] |= {last} if last else set()
                continue
            group = tuple(sorted(interpreter._group(rank, action)))
            node = ("work", action, group)
            if isinstance(action, Compute):
                result.seconds[node] = timing.compute(action)  # type: ignore[attr-defined]
            else:
                result.seconds[node] = timing.collective(group[0], action, group).seconds  # type: ignore[attr-defined]
            reads = [(recv, message) for recv, message in waiting if _reads(action, recv)]
            result.before[node] |= ({last} if last else set()) | {message for _, message in reads}
            waiting = [pair for pair in waiting if pair not in reads]
            result.on_rank[rank].append(node)
            if isinstance(action, ReduceGrads | GatherParams):
                asynchronous[action] = node
                continue
            for begun, awaited in asynchronous.items():
                if isinstance(begun, ReduceGrads):
                    is_awaited = isinstance(action, Step)
                else:
                    layers = interpreter.buckets(rank, begun.unit)[begun.chunk, begun.bucket]
                    is_awaited = isinstance(action, Compute) and interpreter.runs_any(action, layers)
                result.before[node] |= {awaited} if is_awaited else set()
            last = node
            if isinstance(action, Partial) and graph.stage(action.stage).pieces:
                result.before[node] |= stopped.pop((action.stage, action.mb, action.kind), set())
                segments = sum(graph.stage(action.stage).pieces)
                if action.hi < segments if action.kind == "F" else action.lo > 0:
                    left = ("under way", action, group)
                    result.seconds[left] = timing.left_under_way(action)  # type: ignore[attr-defined]
                    result.before[left] = {node}
                    stopped[action.stage, action.mb, action.kind] = {left}
    return result


def nodes_of(timeline: Timeline, precedences: Precedences) -> tuple[dict[Node, float], list[list[Node]]]:
    """Return the starts of nodes in a timeline, and the order of each communication stream."""
    starts: dict[Node, float] = {}
    streams: defaultdict[tuple[int, bool], list[tuple[float, float, Node]]] = defaultdict(list)
    works = {(rank, node[1]): node for rank, nodes in precedences.on_rank.items() for node in nodes}
    for span in timeline.spans:
        node = _message(span.rank, span.action) if isinstance(span.action, Send) else works[span.rank, span.action]
        assert starts.setdefault(node, span.start_s) == span.start_s, "all ranks of a collective start it together"
        if not isinstance(span.action, Compute):
            streams[span.rank, isinstance(span.action, AsyncCollective)].append(
                (span.start_s, span.start_s + span.duration_s, node)
            )
    return starts, [[node for _, _, node in sorted(s, key=lambda entry: entry[:2])] for s in streams.values()]


def _message(rank: int, action: Action) -> Node:
    assert isinstance(action, Send | Recv)
    if isinstance(action, Send):
        return ("message", rank, action)
    return ("message", action.peer, Send(action.edge, action.src, action.dst, rank, action.payload))


def _reads(action: Action, recv: Recv) -> bool:
    """Return whether the action is the first that can read the message."""
    forward = recv.payload == "activation"
    stage, mb = (recv.edge.dst, recv.dst) if forward else (recv.edge.src, recv.src)
    match action:
        case Share(edge, shared, payload):
            return (edge, shared, payload) == (recv.edge, mb, recv.payload)
        case Forward() | Backward() | Partial():
            kind = action.kind == "F" if isinstance(action, Partial) else isinstance(action, Forward)
            return (action.stage, action.mb, kind) == (stage, mb, forward)
        case Fill():
            raise AssertionError("the interpreter has expanded it")
    return False
