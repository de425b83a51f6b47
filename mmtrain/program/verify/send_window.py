"""How many sends of a channel may be under way before one more waits for the oldest.

Each holds its rows until the receiver has taken them, so their number should be small; but a send that waits can close
a circle that sends which never wait cannot. Two ranks that send each other many messages before they post their first
receive, as encoders on the LLM's ranks do, need as many in flight as they send.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from mmtrain.program.ir.program import Program
from mmtrain.program.verify.channels import Channel
from mmtrain.program.verify.deadlock import find_cycle
from mmtrain.program.verify.matching import MatchedActions, Post

MIN_SEND_WINDOW = 4  # enough to keep a link busy while the receiver computes


def send_window(program: Program, wanted: int = MIN_SEND_WINDOW) -> int:
    """Return the least of `wanted`, 2 x `wanted`, ... for which the (checked) program still cannot deadlock.

    As many as the busiest channel has messages always will do, so the search ends.
    """
    links = program.matching
    busiest = max(Counter(_channel(links, m) for m in range(len(links.messages))).values(), default=0)
    limit = wanted
    while limit < busiest and not terminates(links, limit):
        limit *= 2
    return limit


def terminates(links: MatchedActions, limit: int) -> bool:
    """Whether the program comes to its end when `limit` sends a channel may be under way.

    A send waits until the receiver has posted its receive of the `limit`-th message before it on the channel; without
    such a message it never waits. Everything else is as in `waiting_circle`. Works and sends that wait are the nodes.
    """
    num_nodes = len(links.joint_actions) + len(links.messages)
    return not find_cycle(_waits(links, limit), num_nodes)


def _waits(links: MatchedActions, limit: int) -> Iterator[tuple[int, int]]:
    """Pairs (earlier, later) of nodes: works, and behind them the messages, as far as their sends wait."""
    num_works = len(links.joint_actions)
    sent_after: dict[int, int] = {}  # message -> the node before which it is not sent
    taken_after: dict[int, int] = {}  # message -> the node before which its receive is not posted
    freed_by: dict[int, int] = {}  # message whose send waits -> the message that must have been received
    for rank, steps in links.steps.items():
        on_channel: defaultdict[Channel, list[int]] = defaultdict(list)
        last = -1
        for step in steps:
            node = -1
            if not isinstance(step, Post):
                node = step.joint_action
            elif links.messages[step.message].sender != rank:
                taken_after[step.message] = last
            else:
                before = on_channel[_channel(links, step.message)]
                if len(before) >= limit:
                    node = num_works + step.message
                    freed_by[step.message] = before[-limit]
                before.append(step.message)
                sent_after[step.message] = last if node < 0 else node
            if node >= 0:
                if last >= 0:
                    yield last, node
                last = node
    for steps in links.steps.values():
        for step in steps:
            if not isinstance(step, Post):
                yield from ((sent_after[m], step.joint_action) for m in step.reads if sent_after[m] >= 0)
    for message, oldest in freed_by.items():
        if taken_after[oldest] >= 0:
            yield taken_after[oldest], num_works + message


def _channel(links: MatchedActions, message: int) -> Channel:
    sender, send = links.messages[message]
    return send.edge, send.payload, sender, send.peer
