"""Whether actions of a program wait for each other in a circle."""

from collections import defaultdict, deque
from collections.abc import Iterable

from mmtrain.program.verify.matching import JointAction, MatchedActions, Post


def find_deadlock(links: MatchedActions) -> list[JointAction]:
    """Find works that wait for each other in a circle; empty if there are none, and the program then always ends.

    A send never waits, so a message makes its reader wait for the work that its sender did before sending.
    Other replica groups are copies of group 0: a circle through several of them is a circle here too.
    """
    return [links.joint_actions[work] for work in find_cycle(_waits(links), len(links.joint_actions))]


def find_cycle(waits: Iterable[tuple[int, int]], num_nodes: int) -> list[int]:
    """Find nodes that wait for each other in a circle, given pairs (earlier, later) of `num_nodes` nodes."""
    after: defaultdict[int, set[int]] = defaultdict(set)
    for before, later in waits:
        after[before].add(later)
    num_waits = [0] * num_nodes
    for laters in after.values():
        for later in laters:
            num_waits[later] += 1
    ready = deque(node for node, n in enumerate(num_waits) if n == 0)
    while ready:
        for later in after[ready.popleft()]:
            num_waits[later] -= 1
            if num_waits[later] == 0:
                ready.append(later)
    stuck = {node for node, n in enumerate(num_waits) if n > 0}
    return _circle(stuck, after) if stuck else []


def _waits(links: MatchedActions) -> Iterable[tuple[int, int]]:
    """Pairs (earlier, later) of works: the order of every rank, and from before each send to the message's reader."""
    sent_after: dict[int, int] = {}
    for rank, steps in links.steps.items():
        last = -1
        for step in steps:
            if isinstance(step, Post):
                if last >= 0 and links.messages[step.message].sender == rank:
                    sent_after[step.message] = last
            else:
                if last >= 0:
                    yield last, step.joint_action
                last = step.joint_action
    for steps in links.steps.values():
        for step in steps:
            if not isinstance(step, Post):
                yield from ((sent_after[message], step.joint_action) for message in step.reads if message in sent_after)


def _circle(stuck: set[int], after: dict[int, set[int]]) -> list[int]:
    """Walk backwards from one stuck node to another until one comes again; return the circle in waiting order."""
    before = {later: node for node in stuck for later in after[node] if later in stuck}
    path: list[int] = []
    node = min(stuck)
    while node not in path:
        path.append(node)
        node = before[node]
    return path[path.index(node) :][::-1]
