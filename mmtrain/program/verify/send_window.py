"""The send window: how many sends of a channel may be under way before one more waits for the oldest.

Each send holds its rows until the receiver has taken them, so the window should be small. But a send that waits can
close a cycle that cannot exist while sends never wait: two ranks that send each other many messages before they post
their first receive, as encoders on the LLM's ranks do, need a window as large as the number of messages they send.
"""

from collections import Counter

from mmtrain.program.ir.program import Program
from mmtrain.program.verify.deadlock import find_deadlock

MIN_SEND_WINDOW = 4  # sends: enough to keep a link busy while the receiver computes


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
