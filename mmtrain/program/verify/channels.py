"""Channels carry no tags: what one end sends first, the other must receive first."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from mmtrain.program.ir.actions import Action, Payload, Recv, Send
from mmtrain.program.ir.graph import Edge, Microbatch

Channel = tuple[Edge, Payload, int, int]  # sender, receiver
MicrobatchPair = tuple[Microbatch, Microbatch]  # source, destination


def order_receives(actions: Mapping[int, Sequence[Action]]) -> dict[int, tuple[Action, ...]]:
    """Post the receives of every channel in the order in which its other end sends.

    Where several source microbatches feed several destination ones, a sender has all that comes of its first before
    its second, and a receiver needs all that goes into its own first. Receives are posted earlier than they are
    needed, never later, so nothing that ran before waits now. Without sends to match them they stay where they are.
    """
    sent: defaultdict[Channel, dict[MicrobatchPair, int]] = defaultdict(dict)
    for rank, todo in actions.items():
        for action in todo:
            if isinstance(action, Send):
                places = sent[action.edge, action.payload, rank, action.peer]
                places.setdefault((action.src, action.dst), len(places))
    return {rank: _reordered(rank, todo, sent) for rank, todo in actions.items()}


def _reordered(
    rank: int, todo: Sequence[Action], sent: Mapping[Channel, Mapping[MicrobatchPair, int]]
) -> tuple[Action, ...]:
    waiting: defaultdict[Channel, list[tuple[int, int]]] = defaultdict(list)  # place in the channel, place in `todo`
    for at, action in enumerate(todo):
        if isinstance(action, Recv):
            channel = (action.edge, action.payload, action.peer, rank)
            place = sent[channel].get((action.src, action.dst)) if channel in sent else None
            if place is not None:
                waiting[channel].append((place, at))
    before: defaultdict[int, list[Action]] = defaultdict(list)  # place in `todo` -> receives to post there
    moved: set[int] = set()
    for places in waiting.values():
        by_channel = sorted(places)
        if by_channel == places:
            continue
        latest = len(todo)
        moves: list[tuple[int, int]] = []
        for _, at in reversed(by_channel):
            latest = min(latest, at)
            moves.append((latest, at))
        for to, at in reversed(moves):
            before[to].append(todo[at])
            moved.add(at)
    if not moved:
        return tuple(todo)
    return tuple(new for at, action in enumerate(todo) for new in (*before[at], *([] if at in moved else [action])))
