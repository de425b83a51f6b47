"""Find actions of a program that wait for each other in a cycle."""

from collections import defaultdict, deque
from collections.abc import Iterable

from mmtrain.program.verify.matching import Join, JointAction, MatchedActions, Post


def find_deadlock(matched: MatchedActions) -> list[JointAction]:
    """Return joint actions that wait for each other in a cycle; empty if there are none, and then the program ends.

    A send never waits, so a message makes its reader wait for what its sender did before sending. Other replica groups
    are copies of group 0: a cycle through several of them is a cycle in group 0 too.
    """
    return [matched.joint_actions[number] for number in find_cycle(_waits(matched), len(matched.joint_actions))]


def find_cycle(waits: Iterable[tuple[int, int]], num_nodes: int) -> list[int]:
    """Return nodes that wait for each other in a cycle, or nothing; `waits` are pairs (earlier, later) of nodes."""
    after: defaultdict[int, set[int]] = defaultdict(set)
    for earlier, later in waits:
        after[earlier].add(later)
    num_waits = [0] * num_nodes
    for laters in after.values():
        for later in laters:
            num_waits[later] += 1
    ready = deque(node for node, count in enumerate(num_waits) if count == 0)
    while ready:
        for later in after[ready.popleft()]:
            num_waits[later] -= 1
            if num_waits[later] == 0:
                ready.append(later)
    stuck = {node for node, count in enumerate(num_waits) if count > 0}
    return _cycle_among(stuck, after) if stuck else []


def _waits(matched: MatchedActions) -> Iterable[tuple[int, int]]:
    """Yield pairs (earlier, later) of joint actions: every rank's order, and from each send to the message's reader."""
    sent_after: dict[int, int] = {}  # message -> the sender's joint action before it
    for rank, sequence in matched.sequences.items():
        last: int | None = None
        for step in sequence:
            if isinstance(step, Join):
                if last is not None:
                    yield last, step.joint_action
                last = step.joint_action
            elif last is not None and matched.messages[step.message].sender == rank:
                sent_after[step.message] = last
    for sequence in matched.sequences.values():
        for step in sequence:
            if not isinstance(step, Post):
                yield from ((sent_after[message], step.joint_action) for message in step.reads if message in sent_after)


def _cycle_among(stuck: set[int], after: dict[int, set[int]]) -> list[int]:
    """Walk backwards from one stuck node to another until one repeats; return the cycle in waiting order."""
    before = {later: node for node in stuck for later in after[node] if later in stuck}
    path: list[int] = []
    node = min(stuck)
    while node not in path:
        path.append(node)
        node = before[node]
    return path[path.index(node) :][::-1]
