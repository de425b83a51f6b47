"""Prove that a program ends on every device: no actions and messages of it wait for each other in a cycle.

The rules are NCCL's, which are stricter than gloo's, so that one proof holds for both. A message is a kernel at both of
its ends. It starts when the device has done what the rank launched before it, and the messages of one communicator run
one after another. The runtime gives every channel (edge, payload, sender, receiver) a communicator of its own. The same
holds for an asynchronous collective at all of its ranks: `Step` waits for reductions of gradients, and a chunk's first
forward for the gathering of its parameters. These have a communicator for each group, and yet a rank's are taken to run
one after another: NCCL may block where two GPUs start collectives of two communicators in different orders.

The send window is how many sends of a channel may be under way before one more waits for the oldest. Each send holds
its rows until the receiver has taken them, so the window should be small. But a send that waits can close a cycle that
cannot exist while sends never wait. Two ranks that send each other many messages before they post their first receive,
as encoders on the LLM's ranks do, need a window as large as the number of messages they send.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence

from mmtrain.program.ir.matching import Join, JointAction, Launch, MatchedActions, MatchedMessage
from mmtrain.program.ir.program import Program

MIN_SEND_WINDOW = 4  # sends: enough to keep a link busy while the receiver computes


def find_deadlock(matched: MatchedActions, window: int | None = None) -> list[JointAction | MatchedMessage]:
    """Return joint actions and messages that wait for each other in a cycle; empty if there are none: the program ends.

    With `window`, a rank that has so many sends of a channel under way waits for the oldest before it goes on. Other
    replica groups are copies of group 0: a cycle through several of them is a cycle in group 0 too.
    """
    num_joint_actions = len(matched.joint_actions)
    num_nodes = num_joint_actions + len(matched.messages)
    return [
        matched.joint_actions[node] if node < num_joint_actions else matched.messages[node - num_joint_actions]
        for node in _find_cycle(_waits(matched, window), num_nodes)
    ]


def _waits(matched: MatchedActions, window: int | None) -> Iterator[tuple[Sequence[int], int]]:
    """Yield (earlier, later): a node and those it waits for. Joint actions come first, behind them the messages."""
    first_message_node = len(matched.joint_actions)
    for rank, sequence in matched.sequences.items():
        launched: list[int] = []  # what the device must have done before it starts what is launched next
        on_channel: defaultdict[int, list[int]] = defaultdict(list)  # nodes of the messages posted so far
        asynchronous: list[int] = []  # collectives launched so far
        for step in sequence:
            if isinstance(step, Join):
                if step.reads:
                    launched += [first_message_node + message for message in step.reads]
                launched += step.awaits
                yield launched, step.joint_action
                launched = [step.joint_action]
                continue
            if isinstance(step, Launch):
                yield launched, step.joint_action
                if asynchronous:
                    yield asynchronous[-1:], step.joint_action
                asynchronous.append(step.joint_action)
                continue
            node = first_message_node + step.message
            message = matched.messages[step.message]
            posted = on_channel[message.channel]
            if window is not None and message.sender == rank and len(posted) >= window:
                launched.append(posted[-window])
            yield launched, node
            if posted:
                yield posted[-1:], node
            posted.append(node)


def _find_cycle(waits: Iterator[tuple[Sequence[int], int]], num_nodes: int) -> list[int]:
    """Return nodes that wait for each other in a cycle, or nothing."""
    after: list[list[int]] = [[] for _ in range(num_nodes)]
    num_waits = [0] * num_nodes
    for earlier_nodes, later in waits:
        num_waits[later] += len(earlier_nodes)
        for earlier in earlier_nodes:
            after[earlier].append(later)
    ready = deque(node for node, count in enumerate(num_waits) if count == 0)
    while ready:
        for later in after[ready.popleft()]:
            num_waits[later] -= 1
            if num_waits[later] == 0:
                ready.append(later)
    stuck = {node for node, count in enumerate(num_waits) if count > 0}
    return _cycle_among(stuck, after) if stuck else []


def _cycle_among(stuck: set[int], after: Sequence[Sequence[int]]) -> list[int]:
    """Walk backwards from one stuck node to another until one repeats; return the cycle in waiting order."""
    before = {later: node for node in stuck for later in after[node] if later in stuck}
    path: list[int] = []
    node = min(stuck)
    while node not in path:
        path.append(node)
        node = before[node]
    return path[path.index(node) :][::-1]


def send_window(program: Program, min_window: int = MIN_SEND_WINDOW) -> int:
    """Return the smallest of `min_window`, 2 x `min_window`, ... with which the checked program cannot deadlock.

    The number of messages on the busiest channel is always enough, so the search ends.
    """
    num_sends = Counter(message.channel for message in program.matching.messages)
    busiest = max(num_sends.values(), default=0)
    window = min_window
    while window < busiest and find_deadlock(program.matching, window):
        window *= 2
    return window
