"""The checker: prove, before anything runs, that a program is complete and cannot deadlock.

It proves that activations fit into memory when given a `MemoryLimit`; the planner gives one for the plan it returns.

Each test below looks at one promise and may rely on those before it; problems of one test are reported at once.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from mmtrain.errors import ProgramError
from mmtrain.program.ir.actions import (
    Action,
    AtomicAction,
    Backward,
    Compute,
    Dispatch,
    Forward,
    GatherParams,
    Partial,
    Pass,
    Recv,
    ReduceGrads,
    ReduceShared,
    Send,
    Share,
    Step,
)
from mmtrain.program.ir.channels import ChannelKey, MicrobatchPair, channel_key
from mmtrain.program.ir.data_dependencies import (
    EMBEDDINGS,
    Bucket,
    Flow,
    covers_shared_embeddings,
    dispatched,
    dispatches_before,
    gradient_buckets,
    holds_shared_embeddings,
    input_flows,
    joint_form,
    needs_share,
    parameter_gathers,
    participants,
    rank_pairs,
    receiving_tp_group,
    recvs_before,
    sends_after,
    shared_embedding_stages,
    shares_before,
)
from mmtrain.program.ir.graph import Edge, Microbatch, StageGraph
from mmtrain.program.ir.matching import JointAction, MatchedMessage
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.segments import (
    direction,
    expand,
    expand_all,
    finished_pass,
    num_segments,
    pass_of,
    started_pass,
)
from mmtrain.program.ir.serialize import action_to_text
from mmtrain.program.verify.deadlock import find_deadlock
from mmtrain.program.verify.live_activations import BytesOf, peak_activation_bytes

NumberedActions = list[tuple[int, AtomicAction]]  # what a rank does, in order, each with its place among the actions

MAX_REPORTED_PROBLEMS = 20  # problems printed; one misplaced action can cause hundreds


@dataclass(frozen=True)
class MemoryLimit:
    """What activations may take: bytes a rank keeps for one microbatch of one stage, and bytes it has, by rank."""

    bytes_of: BytesOf
    limit_bytes: Mapping[int, int]
    place: str = "on the device"
    remedy: str = "recompute more layers, use more stages or smaller microbatches"
    host: "MemoryLimit | None" = None  # the same in host memory, where activations wait there


def check_program(program: Program, memory: MemoryLimit | None = None) -> None:
    """Reject a program that is incomplete, out of order, bound to deadlock, or (with `memory`) too large for memory.

    Only group 0 is looked at: the other replica groups are its copies. What is proved:

    * every rank runs exactly the actions that the stage graph asks of it, each once: forwards, backwards where
      something trainable lies in the stage or upstream, sends, receives, shares, dispatches, reductions, the step; a
      forward or backward that runs in parts has all its segments, each once and in order;
    * whatever an action reads was computed, received or shared on its rank before it, and the gathering of its stage's
      parameters was started; what runs in the gap of another action does so between the two parts of that action;
    * the messages of every channel (edge, payload, sender, receiver) are sent and received in the same order;
    * ranks that share a group run its collectives in the same order;
    * no actions and messages wait for each other in a cycle, by NCCL's rules (see `deadlock`): a message starts when
      the devices at both ends have done what was launched before it, messages of a channel run one after another, data
      is waited for where it is first read, and a collective waits for its whole group;
    * with `memory`, live activations fit on every rank.

    Raises:
        ProgramError: names the offending actions.
    """
    ranks = set(program.symmetry.mirrors[0])
    if ranks != set(program.actions):
        present = sorted(program.actions)
        raise ProgramError(f"program: has actions for ranks {present}, but replica group 0 is {sorted(ranks)}")
    graph = program.graph
    numbered = {
        rank: [(index, part) for index, action in enumerate(actions) for part in expand(graph, action)]
        for rank, actions in program.actions.items()
    }
    _raise_if_any([text for rank, actions in numbered.items() for text in _not_exactly_once(graph, rank, actions)])
    early = [text for rank, actions in numbered.items() for text in _out_of_order(graph, rank, actions)]
    _raise_if_any([*early, *_channels_disagree(program), *_groups_disagree(program)])
    if deadlock := find_deadlock(program.matching):
        _raise_if_any([_deadlock_text(deadlock)])
    while memory is not None:
        _raise_if_any(_too_large(program, memory))
        memory = memory.host


def expected_actions(graph: StageGraph, rank: int) -> Counter[Action]:
    """Count everything `rank` must do in a step, in no order."""
    expected: Counter[Action] = Counter()
    for stage, replica in graph.held_by(rank):
        for index in range(graph.mesh(stage.unit).num_microbatches):
            mb = Microbatch(stage.unit, replica, index)
            compute: list[Pass] = [Forward(stage, mb)]
            if graph.needs_backward(stage):
                compute.append(Backward(stage, mb))
            for action in compute:
                expected[action] += 1
                expected.update(recvs_before(graph, rank, action))
                expected.update(dispatches_before(graph, action))
                expected.update(shares_before(graph, action))
                expected.update(sends_after(graph, rank, action))
    expected.update(list(gradient_buckets(graph, rank)))
    expected.update(list(parameter_gathers(graph, rank)))
    if holds_shared_embeddings(graph, rank):
        expected[ReduceShared(EMBEDDINGS)] += 1
    expected[Step()] += 1
    return expected


def _not_exactly_once(graph: StageGraph, rank: int, actions: NumberedActions) -> list[str]:
    expected = expected_actions(graph, rank)
    counted, problems = _count_with_parts_joined(graph, rank, actions, expected)
    if counted.items() == expected.items():
        return problems
    for action in expected | counted:
        text, count, expected_count = action_to_text(action), counted[action], expected[action]
        if expected_count == 0:
            problems.append(f"rank {rank}: `{text}` does not belong on this rank")
        elif count == 0:
            problems.append(f"rank {rank}: `{text}` is missing")
        elif count != expected_count:
            problems.append(f"rank {rank}: `{text}` comes {count} times")
    return problems


def _count_with_parts_joined(
    graph: StageGraph, rank: int, actions: NumberedActions, expected: Counter[Action]
) -> tuple[Counter[Action], list[str]]:
    """Count actions, with parts joined to the pass that they make; and describe parts that do not fit together.

    A pass that starts and does not finish counts as done, so that its missing segments are reported and not the pass.
    """
    counted: Counter[Action] = Counter(action for _, action in actions)
    num_done: Counter[Pass] = Counter()  # segments done of each pass that runs in parts
    problems = []
    for index, action in actions:
        if not isinstance(action, Partial) or not expected[pass_of(action)]:
            continue
        del counted[action]
        joined, total = pass_of(action), num_segments(graph, action.stage)
        done = num_done[joined]
        lo, hi = (action.lo, action.hi) if action.kind == "F" else (total - action.hi, total - action.lo)
        if lo != done or hi > total:
            due = done if action.kind == "F" else total - done - 1
            state = f"segment {due} is due" if done < total else "all segments are done"
            problems.append(f"rank {rank}: `{action_to_text(action)}` (action {index}) comes where {state} of {total}")
        counted[joined] += done == 0
        num_done[joined] = max(done, hi)
    for joined, done in num_done.items():
        total = num_segments(graph, joined.stage)
        if done < total:
            lo, hi = (done, total) if isinstance(joined, Forward) else (0, total - done)
            missing = Partial(joined.stage, joined.mb, direction(joined), lo, hi)
            problems.append(f"rank {rank}: `{action_to_text(missing)}` is missing")
    return counted, problems


def _out_of_order(graph: StageGraph, rank: int, actions: NumberedActions) -> list[str]:
    done: set[Action] = set()
    problems = []
    not_gathered = parameter_gathers(graph, rank)
    for nth, (index, action) in enumerate(actions):
        late = [before for before in _before(graph, rank, action) if before not in done]
        if isinstance(action, Compute):
            late += [gather for gather, bucket in not_gathered.items() if bucket.holds_any(graph, action)]
        elif isinstance(action, GatherParams):
            not_gathered.pop(action, None)
        if isinstance(action, ReduceGrads | ReduceShared | Step):
            must_follow = _must_follow(graph, rank, action)
            late += [other for _, other in actions[nth + 1 :] if must_follow(other)]
        if late:
            others = ", ".join(f"`{action_to_text(other)}`" for other in late[:3])
            problems.append(f"rank {rank}: `{action_to_text(action)}` (action {index}) comes before {others}")
        done.add(action)
        if isinstance(action, Partial) and (finished := finished_pass(graph, action)):
            done.add(finished)
    return problems


def _before(graph: StageGraph, rank: int, action: Action) -> list[Action]:
    """Return the actions of this rank whose results `action` reads."""
    match action:
        case Forward() | Backward() | Partial():
            starts_backward = isinstance(started_pass(graph, action), Backward)
            before: list[Action] = [Forward(action.stage, action.mb)] if starts_backward else []
            before += dispatches_before(graph, action)
            for flow in input_flows(graph, action):
                if needs_share(graph, flow.edge, flow.receiver, flow.payload):
                    before.append(Share(flow.edge, flow.receiver, flow.payload))
                else:
                    before.append(_source(graph, rank, flow))
            return before
        case Dispatch():
            return [dispatched(graph, rank, action).producer]
        case Share(edge, mb, payload):
            if rank != receiving_tp_group(graph, edge, mb, payload)[0]:
                return []
            reader = Forward(edge.dst, mb) if payload == "activation" else Backward(edge.src, mb)
            return [_source(graph, rank, flow) for flow in input_flows(graph, reader) if flow.edge == edge]
        case Send(edge, src, dst, _, payload):
            return [Flow(edge, src, dst, payload).producer]
    return []


def _source(graph: StageGraph, rank: int, flow: Flow) -> Action:
    """Return what brings the flow to this rank: a receive, or the producer itself."""
    for sender, receiver in rank_pairs(graph, flow):
        if receiver == rank:
            return Recv(flow.edge, flow.src, flow.dst, sender, flow.payload)
    return flow.producer


def _must_follow(
    graph: StageGraph, rank: int, action: ReduceGrads | ReduceShared | Step
) -> Callable[[AtomicAction], bool]:
    """Return what tells whether `action` must come after another one of its rank."""
    match action:
        case ReduceGrads():
            bucket = gradient_buckets(graph, rank)[action]
            # After it a replica holds only its shard of the gradient: too late to add what another stage holds.
            covers_shared = covers_shared_embeddings(graph, rank, bucket)
            return lambda other: _adds_to(graph, bucket, other) or (covers_shared and isinstance(other, ReduceShared))
        case ReduceShared():
            shared = shared_embedding_stages(graph)
            return lambda other: isinstance(other, Compute) and direction(other) == "B" and other.stage in shared
        case Step():
            return lambda other: isinstance(other, Compute | ReduceGrads | ReduceShared)


def _adds_to(graph: StageGraph, bucket: Bucket, action: Action) -> bool:
    """Return whether the action adds to gradients of the bucket."""
    return isinstance(action, Compute) and direction(action) == "B" and bucket.holds_any(graph, action)


def _channels_disagree(program: Program) -> list[str]:
    """Describe channels whose ends disagree: messages have no tags, so the k-th sent must be the k-th received."""
    sent: defaultdict[ChannelKey, list[MicrobatchPair]] = defaultdict(list)
    received: defaultdict[ChannelKey, list[MicrobatchPair]] = defaultdict(list)
    for rank, actions in program.actions.items():
        for action in actions:
            if isinstance(action, Send):
                sent[channel_key(action, rank, action.peer)].append((action.src, action.dst))
            elif isinstance(action, Recv):
                received[channel_key(action, action.peer, rank)].append((action.src, action.dst))
    problems = []
    for channel in dict.fromkeys([*sent, *received]):
        for k, (out, into) in enumerate(zip_longest(sent[channel], received[channel])):
            if out != into:
                src, dst, payload, sender, receiver = channel
                problems.append(
                    f"channel {Edge(src, dst)} ({payload}s, rank {sender} to {receiver}): message {k} is "
                    f"{_pair_text(out, 'sent')}, {_pair_text(into, 'received')}"
                )
                break
    return problems


def _pair_text(pair: MicrobatchPair | None, verb: str) -> str:
    return f"not {verb}" if pair is None else f"{verb} as {pair[0]} for {pair[1]}"


def _groups_disagree(program: Program) -> list[str]:
    """Describe process groups whose members run the group's collectives in different orders."""
    orders: defaultdict[tuple[int, ...], dict[int, list[AtomicAction]]] = defaultdict(dict)
    for rank, actions in program.actions.items():
        for action in expand_all(program.graph, actions):
            if isinstance(action, Send | Recv):  # of this rank alone, and most actions
                continue
            group = participants(program.graph, rank, action)
            orders[group].setdefault(rank, []).append(joint_form(program.graph, action))
    problems = []
    for group, by_rank in orders.items():
        first, *others = (rank for rank in group if rank in program.actions)
        for other in others:
            pairs = zip_longest(by_rank.get(first, []), by_rank.get(other, []))
            for k, (of_first, of_other) in enumerate(pairs):
                if of_first != of_other:
                    problems.append(
                        f"ranks {first} and {other} share the group {list(group)}, but its collective {k} is "
                        f"{_maybe_text(of_first)} on one and {_maybe_text(of_other)} on the other"
                    )
                    break
    return problems


def _maybe_text(action: Action | None) -> str:
    return "missing" if action is None else f"`{action_to_text(action)}`"


def _deadlock_text(cycle: list[JointAction | MatchedMessage]) -> str:
    steps = " -> ".join(map(_node_text, [*cycle, cycle[0]]))
    return f"deadlock: each of these waits for the one before it: {steps}"


def _node_text(node: JointAction | MatchedMessage) -> str:
    if isinstance(node, MatchedMessage):
        return f"rank {node.sender} `{action_to_text(node.send)}`"
    return f"rank {node.ranks[0]} `{action_to_text(node.action)}`"


def _too_large(program: Program, memory: MemoryLimit) -> list[str]:
    problems = []
    for rank, actions in program.actions.items():
        peak, index = peak_activation_bytes(program.graph, actions, memory.bytes_of)
        if peak > memory.limit_bytes[rank]:
            problems.append(
                f"rank {rank}: {peak / 2**30:.3f} GiB of activations are alive {memory.place} at "
                f"`{action_to_text(actions[index])}` (action {index}), {memory.limit_bytes[rank] / 2**30:.3f} GiB are "
                f"free; {memory.remedy}"
            )
    return problems


def _raise_if_any(problems: list[str]) -> None:
    if problems:
        more = len(problems) - MAX_REPORTED_PROBLEMS
        tail = [f"... and {more} more"] if more > 0 else []
        raise ProgramError("program rejected:\n  " + "\n  ".join([*problems[:MAX_REPORTED_PROBLEMS], *tail]))
