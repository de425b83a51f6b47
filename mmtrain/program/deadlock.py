"""Who waits for whom in a program, and whether anybody waits for himself."""

from collections import defaultdict, deque
from collections.abc import Iterable

from mmtrain.program.actions import Action, Recv, Send
from mmtrain.program.program import Program
from mmtrain.program.wiring import members, waiter

Place = tuple[int, int]  # rank, position in its actions


def waiting_circle(program: Program) -> list[tuple[int, Action]]:
    """Find actions that wait for each other in a circle; empty if there are none, and the program then always ends.

    Sends never wait and receives are waited for where their data is read, so a message is an edge from its send to
    its reader. A collective is one node for all members of its group. Messages and collectives must pair up.
    Other replica groups are copies of group 0: a circle through several of them is a circle here too.
    """
    node_of, members_of = _nodes(program)
    after: defaultdict[int, list[int]] = defaultdict(list)
    waits: dict[int, int] = dict.fromkeys(members_of, 0)
    for before, later in _waits(program, node_of):
        if before != later:
            after[before].append(later)
            waits[later] += 1
    ready = deque(node for node, n in waits.items() if n == 0)
    while ready:
        for later in after[ready.popleft()]:
            waits[later] -= 1
            if waits[later] == 0:
                ready.append(later)
    stuck = {node for node, n in waits.items() if n > 0}
    if not stuck:
        return []
    return [_describe(program, members_of[node]) for node in _circle(stuck, after)]


def _nodes(program: Program) -> tuple[dict[Place, int], dict[int, Place]]:
    """Number the actions; members of a collective get one number. Also one place for each number."""
    node_of: dict[Place, int] = {}
    place_of: dict[int, Place] = {}
    collectives: dict[tuple[tuple[int, ...], int], int] = {}
    for rank, actions in program.actions.items():
        seen: defaultdict[tuple[int, ...], int] = defaultdict(int)
        for at, action in enumerate(actions):
            node = len(place_of)
            group = members(program.graph, rank, action)
            if len(group) > 1:
                node = collectives.setdefault((group, seen[group]), node)
                seen[group] += 1
            node_of[rank, at] = node
            place_of.setdefault(node, (rank, at))
    return node_of, place_of


def _waits(program: Program, node_of: dict[Place, int]) -> Iterable[tuple[int, int]]:
    """Pairs (earlier, later): program order on every rank, and from each send to the reader of its message."""
    position = {rank: {action: at for at, action in enumerate(actions)} for rank, actions in program.actions.items()}
    for rank, actions in program.actions.items():
        for at, action in enumerate(actions):
            if at:
                yield node_of[rank, at - 1], node_of[rank, at]
            if isinstance(action, Recv):
                send = Send(action.edge, action.src, action.dst, rank, action.payload)
                reader = position[rank][waiter(program.graph, action)]
                yield node_of[action.peer, position[action.peer][send]], node_of[rank, reader]


def _circle(stuck: set[int], after: dict[int, list[int]]) -> list[int]:
    """Walk backwards from one stuck node to another until a node comes again; return the circle in waiting order."""
    before = {later: node for node in stuck for later in after[node] if later in stuck}
    path: list[int] = []
    node = min(stuck)
    while node not in path:
        path.append(node)
        node = before[node]
    return path[path.index(node) :][::-1]


def _describe(program: Program, place: Place) -> tuple[int, Action]:
    rank, at = place
    return rank, program.actions[rank][at]
