"""Channels carry no tags: the first message that one end sends must be the first that the other end receives.

The runtime gives each channel a communicator of its own (`runtime.execution.process_groups`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from mmtrain.program.ir.actions import Action, Payload, Recv, Send
from mmtrain.program.ir.data_dependencies import Flow, rank_pairs
from mmtrain.program.ir.graph import Edge, Microbatch, StageGraph, StageId

Channel = tuple[Edge, Payload, int, int]  # ..., sender, receiver
ChannelKey = tuple[StageId, StageId, Payload, int, int]
MicrobatchPair = tuple[Microbatch, Microbatch]  # source, destination


def channel_key(end: Send | Recv, sender: int, receiver: int) -> ChannelKey:
    """Return the channel of a message as a tuple of tuples, which is hashed without a call of Python."""
    edge = end.edge
    return edge.src, edge.dst, end.payload, sender, receiver


def graph_channels(graph: StageGraph, num_parts: int = 1) -> list[Channel]:
    """Return every channel that a program of the graph uses, of all replica groups: the same list on every rank.

    num_parts: with `graph.num_groups`, only those of the first replica group.
    """
    channels: dict[Channel, None] = {}
    payloads: tuple[Payload, ...] = ("activation", "gradient")
    for edge in graph.edges:
        for payload in payloads:
            if payload == "gradient" and not graph.carries_gradient(edge):
                continue
            for replica in range(graph.mesh(edge.src.unit).num_replicas // num_parts):
                # Microbatch 0 of a replica exchanges data with every replica that another one of it does.
                src = Microbatch(edge.src.unit, replica, 0)
                for dst in graph.destinations(edge, src):
                    for sender, receiver in rank_pairs(graph, Flow(edge, src, dst, payload)):
                        channels[edge, payload, sender, receiver] = None
    return list(channels)


def order_receives(actions: Mapping[int, Sequence[Action]]) -> dict[int, tuple[Action, ...]]:
    """Post the receives of every channel in the order in which its other end sends.

    Where several source microbatches feed several destination microbatches, a sender sends everything of its first
    microbatch before its second, while a receiver needs everything that enters its own first. Receives are posted
    earlier than they are needed, never later, so nothing waits that did not wait before. A receive without a matching
    send stays where it is.
    """
    sent: defaultdict[ChannelKey, dict[MicrobatchPair, int]] = defaultdict(dict)  # channel -> message -> its place
    for rank, actions_of_rank in actions.items():
        for action in actions_of_rank:
            if isinstance(action, Send):
                places = sent[channel_key(action, rank, action.peer)]
                places.setdefault((action.src, action.dst), len(places))
    return {rank: _reordered(rank, actions_of_rank, sent) for rank, actions_of_rank in actions.items()}


def _reordered(
    rank: int, actions: Sequence[Action], sent: Mapping[ChannelKey, Mapping[MicrobatchPair, int]]
) -> tuple[Action, ...]:
    # By channel: (place in the channel, place in `actions`).
    receives: defaultdict[ChannelKey, list[tuple[int, int]]] = defaultdict(list)
    for place_of_action, action in enumerate(actions):
        if isinstance(action, Recv):
            channel = channel_key(action, action.peer, rank)
            place = sent[channel].get((action.src, action.dst)) if channel in sent else None
            if place is not None:
                receives[channel].append((place, place_of_action))
    before: defaultdict[int, list[Action]] = defaultdict(list)  # place in `actions` -> receives to post there
    moved: set[int] = set()
    for of_channel in receives.values():
        in_channel_order = sorted(of_channel)
        if in_channel_order == of_channel:
            continue
        latest = len(actions)
        moves: list[tuple[int, int]] = []
        for _, place_of_action in reversed(in_channel_order):
            latest = min(latest, place_of_action)
            moves.append((latest, place_of_action))
        for to, place_of_action in reversed(moves):
            before[to].append(actions[place_of_action])
            moved.add(place_of_action)
    if not moved:
        return tuple(actions)
    reordered: list[Action] = []
    for place_of_action, action in enumerate(actions):
        reordered += before[place_of_action]
        if place_of_action not in moved:
            reordered.append(action)
    return tuple(reordered)
