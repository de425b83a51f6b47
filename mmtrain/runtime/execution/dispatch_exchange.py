"""Decide what one rank sends and receives in a dispatch. Lengths alone decide it, so it is done before the step."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mmtrain.program import Dispatch, Microbatch, StageGraph, StepLoads
from mmtrain.program.ir.data_dependencies import Flow, dispatched
from mmtrain.program.ir.step_loads import Route

RoutePair = tuple[Microbatch, Microbatch]  # source and destination, of two units


class GatheredRows(NamedTuple):
    """Rows of this replica among those that all replicas gather from one of them."""

    replica: int  # that they come from
    first: int
    num: int


class DispatchExchange(NamedTuple):
    """What one rank sends and receives in a dispatch."""

    sent: tuple[RoutePair, ...]  # in the order of the replicas that receive
    received: tuple[RoutePair, ...]  # in the order of the replicas that send
    num_sent: tuple[int, ...]  # rows, by replica
    num_received: tuple[int, ...]  # rows, by replica
    num_rows: int  # of the tensor that this and other dispatches fill
    leaves_rank: bool  # whether any rank sends rows to another
    num_gathered: int = 0  # by all-gather: rows of the replica that sends most
    gathered: tuple[GatheredRows, ...] = ()  # by all-gather: where this replica's rows are


def decide_exchange(graph: StageGraph, rank: int, action: Dispatch, loads: StepLoads) -> DispatchExchange:
    """Return what a rank sends and receives in a dispatch of a step with these loads."""
    mesh, is_gradient = graph.mesh(action.edge.src.unit), action.payload == "gradient"
    flow, route = dispatched(graph, rank, action), loads.routes[mesh.unit, action.edge.dst.unit]
    sent, received = exchanged_pairs(flow, action, route)
    # Activations go to the destination's replica, gradients to the source's.
    receiving_end, sending_end = (0, 1) if is_gradient else (1, 0)
    if is_gradient:
        num_rows = loads.rows_out[flow.src]
    else:
        num_rows = sum(route.rows(src, dst) for src, dst in route.spans if dst == flow.dst)
    exchange = DispatchExchange(
        sent=tuple(sent),
        received=tuple(received),
        num_sent=_rows_by_replica(sent, receiving_end, mesh.dp, route),
        num_received=_rows_by_replica(received, sending_end, mesh.dp, route),
        num_rows=num_rows,
        leaves_rank=any(src.replica != dst.replica for src, dst in route.pairs_between(action.src, action.dst)),
    )
    if mesh.exchange == "all_to_all":
        return exchange
    sender, receiver, num_rows_sent = route.exchanged(action.src, action.dst, is_gradient)
    is_before, is_mine = receiver < flow.receiver.replica, receiver == flow.receiver.replica
    first = np.bincount(sender[is_before], num_rows_sent[is_before], mesh.dp).astype(np.int64)
    mine = sorted(zip(sender[is_mine].tolist(), num_rows_sent[is_mine].tolist(), strict=True))
    return exchange._replace(
        num_gathered=int(np.bincount(sender, num_rows_sent).max(initial=0)),
        gathered=tuple(GatheredRows(replica, int(first[replica]), num) for replica, num in mine),
    )


def exchanged_pairs(flow: Flow, action: Dispatch, route: Route) -> tuple[list[RoutePair], list[RoutePair]]:
    """Return the pairs of microbatches whose rows leave a rank, and come to it, in the order of the replicas.

    flow: what the dispatch takes from the rank and brings it, see `dispatched`.
    """
    pairs = route.pairs_between(action.src, action.dst)
    from_src = sorted(pair for pair in pairs if pair[0] == flow.src)
    into_dst = sorted(pair for pair in pairs if pair[1] == flow.dst)
    return (from_src, into_dst) if action.payload == "activation" else (into_dst, from_src)


def _rows_by_replica(pairs: Sequence[RoutePair], end: int, num_replicas: int, route: Route) -> tuple[int, ...]:
    """Count the rows of some pairs by the replica at one of their ends: 0 the source, 1 the destination."""
    num_rows = [0] * num_replicas
    for pair in pairs:
        num_rows[pair[end].replica] += route.rows(*pair)
    return tuple(num_rows)
