"""The send window: how many sends of a channel may be under way before one more waits for the oldest.

Each send holds its rows until the receiver has taken them, so the window should be small. But a send that waits can
close a cycle that cannot exist while sends never wait: two ranks that send each other many messages before they post
their first receive, as encoders on the LLM's ranks do, need a window as large as the number of messages they send.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from mmtrain.program.ir.program import Program
from mmtrain.program.verify.channels import Channel
from mmtrain.program.verify.deadlock import find_cycle
from mmtrain.program.verify.matching import Join, MatchedActions

MIN_SEND_WINDOW = 4  # sends: enough to keep a link busy while the receiver computes


def send_window(program: Program, min_window: int = MIN_SEND_WINDOW) -> int:
    """Return the smallest of `min_window`, 2 x `min_window`, ... with which the checked program cannot deadlock.

    The number of messages on the busiest channel is always enough, so the search ends.
    """
    matched = program.matching
    num_sends = Counter(_channel(matched, message) for message in range(len(matched.messages)))
    busiest = max(num_sends.values(), default=0)
    window = min_window
    while window < busiest and not terminates(matched, window):
        window *= 2
    return window


def terminates(matched: MatchedActions, window: int) -> bool:
    """Return whether the program ends when at most `window` sends of a channel may be under way.

    A send waits until the receiver has posted its receive of the `window`-th message before it on the channel; without
    such a message it never waits. Everything else is as in `find_deadlock`.
    """
    num_nodes = len(matched.joint_actions) + len(matched.messages)
    return not find_cycle(_waits(matched, window), num_nodes)


def _waits(matched: MatchedActions, window: int) -> Iterator[tuple[int, int]]:
    """Yield pairs (earlier, later) of nodes: joint actions first, behind them the messages whose sends wait."""
    first_message_node = len(matched.joint_actions)
    sent_after: dict[int, int | None] = {}  # message -> the node after which it is sent; None: at the start of the step
    taken_after: dict[int, int | None] = {}  # message -> the node after which its receive is posted
    freed_by: dict[int, int] = {}  # message whose send waits -> the message that must have been received
    for rank, sequence in matched.sequences.items():
        sent_on_channel: defaultdict[Channel, list[int]] = defaultdict(list)
        last: int | None = None
        for step in sequence:
            node: int | None = None
            if isinstance(step, Join):
                node = step.joint_action
            elif matched.messages[step.message].sender != rank:
                taken_after[step.message] = last
            else:
                sent_before = sent_on_channel[_channel(matched, step.message)]
                if len(sent_before) >= window:
                    node = first_message_node + step.message
                    freed_by[step.message] = sent_before[-window]
                sent_before.append(step.message)
                sent_after[step.message] = last if node is None else node
            if node is not None:
                if last is not None:
                    yield last, node
                last = node
    for sequence in matched.sequences.values():
        for step in sequence:
            if not isinstance(step, Join):
                continue
            for message in step.reads:
                if (sender_node := sent_after[message]) is not None:
                    yield sender_node, step.joint_action
    for message, oldest in freed_by.items():
        if (receiver_node := taken_after[oldest]) is not None:
            yield receiver_node, first_message_node + message


def _channel(matched: MatchedActions, message: int) -> Channel:
    sender, send = matched.messages[message]
    return send.edge, send.payload, sender, send.peer
