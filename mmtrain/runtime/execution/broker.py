"""The broker: move activations and gradients along the edges of the stage graph.

Inside a unit a whole tensor goes from stage to stage. Between units, items of several source microbatches go to
several destination microbatches; the step's route says which rows go where, so no shape is ever negotiated. Sends
and receives are posted asynchronously in the order of the program. A receive is waited for where its data is needed,
a send when too many others have been posted after it on its channel, or when the step ends. Where replicas dispatch,
one collective moves the rows of all of them instead.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmtrain.program import Action, Dispatch, Edge, Microbatch, Recv, Send, Share, StageGraph, StepLoads
from mmtrain.program.ir.actions import ComputeTask, Payload
from mmtrain.program.ir.data_dependencies import dispatched, input_flows
from mmtrain.program.ir.step_loads import IntArray
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.dispatch_exchange import DispatchExchange, RoutePair, decide_exchange, exchanged_pairs
from mmtrain.runtime.execution.process_groups import Pending, Transport

Key = tuple[Edge, Microbatch, Payload]
Channel = tuple[Edge, Payload, int]  # and the rank at its other end


class RouteRows(NamedTuple):
    """The rows that flow between two microbatches, in the order in which they travel: (R,) int64 each."""

    src: Tensor  # among the source's rows
    dst: Tensor  # among those that the destination receives


class _Posted(NamedTuple):
    """A message under way: `rows` must not be freed or read until `work` is done."""

    action: Send | Recv
    work: Pending
    rows: Tensor


class Broker:
    """Delivers activations and gradients to the stages of one rank.

    A stage's result is `put`; the actions `Send`, `Recv`, `Share` and `Dispatch` move it; a stage `take`s what it
    needs, assembled from local and received parts.

    At most `send_limit` sends are under way on a channel (edge, payload, peer): one more waits for the oldest, which
    ends no sooner than the peer has posted its receive. `program.verify.send_window` proves that the program cannot
    deadlock under this limit if every message counts. A message without rows is never sent, so the send that is waited
    for here was posted no later than the one of the proof.
    """

    def __init__(
        self,
        graph: StageGraph,
        actions: Iterable[Action],
        transport: Transport,
        send_limit: int,
        activity: Activity | None = None,
    ) -> None:
        self._graph, self._transport, self._send_limit = graph, transport, send_limit
        self._activity = activity or Activity()
        actions = list(actions)
        self._num_uses = _count_uses(graph, actions, transport.rank)
        self._pairs = _route_pairs(graph, actions)
        self._dispatched = {a: dispatched(graph, transport.rank, a) for a in actions if isinstance(a, Dispatch)}
        self._decide = partial(decide_exchange, graph, transport.rank)
        self._clear()

    @property
    def rank(self) -> int:
        """The rank whose data this is."""
        return self._transport.rank

    def host_rows(self, loads: StepLoads) -> dict[RoutePair, RouteRows]:
        """List, on the host, the rows of all pairs of this rank between which more than one span of rows flows."""
        pairs = set(self._pairs)
        for action, flow in self._dispatched.items():
            route = loads.routes[action.edge.src.unit, action.edge.dst.unit]
            pairs.update(*exchanged_pairs(flow, action, route))
        spans_of_pairs = {pair: self._route_spans(*pair, loads) for pair in pairs}
        return {pair: _rows_of(spans) for pair, spans in spans_of_pairs.items() if len(spans) > 1}

    def host_exchanges(self, loads: StepLoads) -> dict[Dispatch, DispatchExchange]:
        """Decide what this rank sends and receives in each dispatch of a step."""
        return {action: self._decide(action, loads) for action in self._dispatched}

    def start_step(
        self,
        loads: StepLoads,
        rows: Mapping[RoutePair, RouteRows] | None = None,
        exchanges: Mapping[Dispatch, DispatchExchange] | None = None,
    ) -> None:
        """Start a step with these loads and routes; `rows` is what `host_rows` lists, on the device.

        Without it rows are listed where they are needed, and the device waits for a copy. `exchanges` is what
        `host_exchanges` decides; without it each dispatch decides its own, and the device waits for that.
        """
        self._loads = loads
        self._rows = {} if rows is None else dict(rows)
        self._exchanges = {} if exchanges is None else exchanges
        self._clear()

    def put(self, edge: Edge, mb: Microbatch, payload: Payload, tensor: Tensor) -> None:
        """Hold what this rank computed for `mb` until its last send or local use."""
        key = (edge, mb, payload)
        if self._num_uses[key]:
            self._held[key] = tensor
            self._uses_left[key] = self._num_uses[key]

    def send(self, action: Send) -> None:
        """Start sending the rows that the action names; do nothing if there are none."""
        forward = action.payload == "activation"
        producer = action.src if forward else action.dst
        tensor = self._use((action.edge, producer, action.payload))
        spans = self._spans(action.edge, action.src, action.dst)
        rows = tensor if spans is None else self._pick(tensor, action.src, action.dst, spans, forward)
        if len(rows):
            rows = rows.contiguous()
            channel = self._sending[action.edge, action.payload, action.peer]
            if len(channel) == self._send_limit:
                self._wait(channel.popleft())
            channel.append(_Posted(action, self._transport.send(rows, action), rows))

    def receive(self, action: Recv) -> None:
        """Post the receive that matches a peer's send."""
        num_rows = self._num_rows(action.edge, action.src, action.dst)
        if num_rows:
            rows = self._empty(num_rows, action.edge)
            posted = _Posted(action, self._transport.receive(rows, action), rows)
            self._receiving[action.edge, action.src, action.dst, action.payload] = posted

    def share(self, action: Share) -> None:
        """Broadcast what the TP group's first rank received to the whole TP group."""
        stage = action.edge.dst if action.payload == "activation" else action.edge.src
        first_rank = self._graph.stage(stage).tp_groups[action.mb.replica][0]
        if self._transport.rank == first_rank:
            tensor = self._assemble(action.edge, action.mb, action.payload)
        else:
            tensor = self._empty(self._total_rows(action.edge, action.mb, action.payload), action.edge)
        if len(tensor):
            self._transport.share(tensor, action, first_rank)
        self._shared[action.edge, action.mb, action.payload] = tensor

    def dispatch(self, action: Dispatch) -> None:
        """Send the rows that other replicas need, and put those that they send in their places.

        Ranks without rows take part too. No rank does where all rows stay on their rank, which every rank knows.
        """
        edge, payload, flow = action.edge, action.payload, self._dispatched[action]
        forward = payload == "activation"
        tensor = self._use((edge, flow.src if forward else flow.dst, payload))
        exchange = self._exchanges.get(action) or self._decide(action, self._loads)
        rows = self._all_picked(tensor, exchange.sent, forward)
        if exchange.leaves_rank:
            rows = self._move(action, exchange, rows.contiguous())
        key = (edge, flow.receiver, payload)
        if key not in self._shared:  # else another dispatch has brought other rows of the same microbatch
            self._shared[key] = self._zeros(exchange.num_rows, edge)
        first = 0
        for src, dst in exchange.received:
            spans = self._route_spans(src, dst, self._loads)
            num_rows = int(spans[:, 2].sum())
            self._place(self._shared[key], rows[first : first + num_rows], src, dst, spans, forward)
            first += num_rows

    def take(self, edge: Edge, mb: Microbatch, payload: Payload) -> Tensor:
        """Return what `mb` needs over `edge`, as (rows, width); wait for what has not arrived.

        The rows of an activation come in the order of the destination, those of a gradient in that of the source.
        """
        shared = self._shared.pop((edge, mb, payload), None)
        return self._assemble(edge, mb, payload) if shared is None else shared

    def drain(self) -> None:
        """Wait until everything sent in this step has left."""
        for channel in self._sending.values():
            while channel:
                self._wait(channel.popleft())

    def _clear(self) -> None:
        self._held: dict[Key, Tensor] = {}
        self._uses_left: Counter[Key] = Counter()
        self._receiving: dict[tuple[Edge, Microbatch, Microbatch, Payload], _Posted] = {}
        self._shared: dict[Key, Tensor] = {}
        self._sending: defaultdict[Channel, deque[_Posted]] = defaultdict(deque)

    def _use(self, key: Key) -> Tensor:
        """Return a tensor that this rank holds; drop it after its last use."""
        tensor = self._held[key]
        self._uses_left[key] -= 1
        if not self._uses_left[key]:
            del self._held[key]
        return tensor

    def _assemble(self, edge: Edge, mb: Microbatch, payload: Payload) -> Tensor:
        """Put the parts that flow to `mb` in their places."""
        if not edge.crosses_units:
            if not self._num_rows(edge, mb, mb):  # no message was sent
                return self._empty(0, edge)
            return self._part(edge, mb, mb, payload).detach()
        forward = payload == "activation"
        others = self._graph.sources(edge, mb) if forward else self._graph.destinations(edge, mb)
        num_rows = self._total_rows(edge, mb, payload)
        assembled: Tensor | None = None
        for other in others:
            src, dst = (other, mb) if forward else (mb, other)
            spans = self._spans(edge, src, dst)
            # A local part must be taken even if no row of it is wanted: it counts as a use.
            is_local = (edge, other, payload) in self._held
            if is_local or (spans is not None and len(spans)):
                part = self._part(edge, src, dst, payload)
                if spans is None or not len(spans):
                    continue
                if len(spans) == 1 and len(part) == num_rows:
                    assembled = part.detach()  # all rows, in their order
                    continue
                assembled = self._zeros(num_rows, edge) if assembled is None else assembled
                self._place(assembled, part, src, dst, spans, forward)
        return self._zeros(num_rows, edge) if assembled is None else assembled

    def _part(self, edge: Edge, src: Microbatch, dst: Microbatch, payload: Payload) -> Tensor:
        """Return the rows that flow between `src` and `dst`: produced here, or received."""
        forward = payload == "activation"
        local = (edge, src if forward else dst, payload)
        if local in self._held:
            tensor = self._use(local)
            spans = self._spans(edge, src, dst)
            return tensor if spans is None else self._pick(tensor, src, dst, spans, forward)
        posted = self._receiving.pop((edge, src, dst, payload))
        self._wait(posted)
        return posted.rows

    def _wait(self, message: _Posted) -> None:
        self._activity.wait(message.action)
        message.work.wait()
        self._activity.arrived(message.rows.nbytes)

    def _move(self, action: Dispatch, exchange: DispatchExchange, rows: Tensor) -> Tensor:
        """Exchange the `rows` of all replicas; return those of this one, in the order of the replicas that send."""
        if self._graph.mesh(action.edge.src.unit).exchange == "all_to_all":
            return self._transport.exchange(rows, list(exchange.num_sent), list(exchange.num_received), action)
        gathered = self._transport.gather_rows(rows, exchange.num_gathered, action)
        mine = [gathered[replica].narrow(0, first, num) for replica, first, num in exchange.gathered]
        return torch.cat([rows[:0], *mine])

    def _all_picked(self, tensor: Tensor, pairs: Sequence[RoutePair], forward: bool) -> Tensor:
        """Return the rows of some pairs, pair by pair."""
        picked = [self._pick(tensor, *pair, self._route_spans(*pair, self._loads), forward) for pair in pairs]
        return picked[0] if len(picked) == 1 else torch.cat([tensor[:0], *picked])

    def _spans(self, edge: Edge, src: Microbatch, dst: Microbatch) -> IntArray | None:
        """Return (src_offset, dst_offset, length) of spans between units; None inside a unit, where all rows travel."""
        return self._route_spans(src, dst, self._loads) if edge.crosses_units else None

    def _route_spans(self, src: Microbatch, dst: Microbatch, loads: StepLoads) -> IntArray:
        return loads.routes[src.unit, dst.unit].spans.get((src, dst), _NO_SPANS)

    def _route_rows(self, src: Microbatch, dst: Microbatch, spans: IntArray) -> RouteRows:
        """Return on the device the rows of several spans."""
        if (src, dst) not in self._rows:
            rows = _rows_of(spans)
            self._rows[src, dst] = RouteRows(*(indices.to(self._transport.device) for indices in rows))
        return self._rows[src, dst]

    def _pick(self, tensor: Tensor, src: Microbatch, dst: Microbatch, spans: IntArray, forward: bool) -> Tensor:
        """Return the rows of the spans, one after another, of what the source computed (in backward: destination)."""
        if not len(spans):
            return tensor[:0]
        if len(spans) == 1:
            return tensor.narrow(0, int(spans[0, 0 if forward else 1]), int(spans[0, 2]))
        rows = self._route_rows(src, dst, spans)
        return tensor.index_select(0, rows.src if forward else rows.dst)

    def _place(
        self, assembled: Tensor, part: Tensor, src: Microbatch, dst: Microbatch, spans: IntArray, forward: bool
    ) -> None:
        """Copy the concatenated rows of `part` to their places in the destination (in backward: the source)."""
        if len(spans) == 1:
            assembled.narrow(0, int(spans[0, 1 if forward else 0]), len(part)).copy_(part)
            return
        rows = self._route_rows(src, dst, spans)
        assembled.index_copy_(0, rows.dst if forward else rows.src, part)

    def _num_rows(self, edge: Edge, src: Microbatch, dst: Microbatch) -> int:
        spans = self._spans(edge, src, dst)
        reader = self._transport.state_readers.get(edge)
        if reader is not None:
            load = self._loads.loads[src]
            return reader.input_elements(load.tokens, load.num_sequences)
        if spans is None:
            return -(-self._loads.loads[src].tokens // self._transport.token_shards.get(src.unit, 1))
        return int(spans[:, 2].sum())

    def _total_rows(self, edge: Edge, mb: Microbatch, payload: Payload) -> int:
        """Return the rows that a microbatch receives by messages, or from its own rank."""
        if payload == "gradient":
            return self._loads.rows_out[mb]
        return sum(self._num_rows(edge, src, mb) for src in self._graph.sources(edge, mb))

    def _empty(self, rows: int, edge: Edge) -> Tensor:
        transport = self._transport
        return torch.empty(rows, transport.widths[edge], device=transport.device, dtype=transport.dtype)

    def _zeros(self, rows: int, edge: Edge) -> Tensor:
        return self._empty(rows, edge).zero_()


def _count_uses(graph: StageGraph, actions: Iterable[Action], rank: int) -> Counter[Key]:
    """Count how often each tensor that this rank produces is sent or used here, to drop it after its last use."""
    uses: Counter[Key] = Counter()
    for action in actions:
        if isinstance(action, Send):
            producer = action.src if action.payload == "activation" else action.dst
            uses[action.edge, producer, action.payload] += 1
        elif isinstance(action, Dispatch):
            flow = dispatched(graph, rank, action)
            uses[action.edge, flow.src if action.payload == "activation" else flow.dst, action.payload] += 1
        elif isinstance(action, ComputeTask):
            for flow in input_flows(graph, action):
                if rank in graph.tp_group(flow.producer.stage, flow.producer.mb.replica):
                    uses[flow.edge, flow.producer.mb, flow.payload] += 1
    return uses


def _route_pairs(graph: StageGraph, actions: Iterable[Action]) -> set[RoutePair]:
    """Return the pairs of microbatches of two units whose rows this rank sends, receives or uses."""
    pairs: set[RoutePair] = set()
    for action in actions:
        if isinstance(action, Send | Recv) and action.edge.crosses_units:
            pairs.add((action.src, action.dst))
        elif isinstance(action, ComputeTask):
            pairs |= {(flow.src, flow.dst) for flow in input_flows(graph, action) if flow.edge.crosses_units}
    return pairs


def _rows_of(spans: IntArray) -> RouteRows:
    """List the rows of spans (k, 3) of source offset, destination offset and length."""
    lengths = spans[:, 2]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    src, dst = (torch.from_numpy(np.repeat(spans[:, end], lengths) + within) for end in (0, 1))
    return RouteRows(src, dst)


_NO_SPANS: IntArray = np.zeros((0, 3), dtype=np.int64)
