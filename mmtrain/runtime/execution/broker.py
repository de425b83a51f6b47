"""The broker: moves what flows along the edges of the stage graph.

Inside a unit a whole tensor goes from stage to stage. Between units, items of several source microbatches go to
several destination microbatches; the step's route says which rows go where, so no shape is ever negotiated. Sends
and receives are posted asynchronously in the order of the program. A receive is waited for where its data is needed,
a send when too many others have been posted after it on its channel, or when the step ends.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.program import Action, Edge, Microbatch, Recv, Send, Share, StageGraph, StepLoads
from mmtrain.program.ir.actions import ComputeTask, Payload
from mmtrain.program.ir.data_dependencies import input_flows
from mmtrain.program.ir.step_loads import IntArray
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.process_groups import ProcessGroups

Key = tuple[Edge, Microbatch, Payload]
Channel = tuple[Edge, Payload, int]  # and the rank at its other end


class _Posted(NamedTuple):
    """A message under way: its rows fill, or must live, until `work` is done."""

    action: Send | Recv
    work: dist.Work
    rows: Tensor


class Broker:
    """Delivers activations and gradients to the stages of one rank.

    What a stage produced is `put`; the actions `Send`, `Recv` and `Share` move it; a stage `take`s what it needs,
    assembled from local and received parts.

    At most `send_limit` sends are under way on a channel (edge, payload, peer): one more waits for the oldest, which
    ends no sooner than the peer has posted its receive. That the program cannot deadlock so is proved for the limit
    that `program.inflight.send_limit` returns, for messages counted whether they hold rows or not. Those without rows
    are never sent, so the one waited for here was sent no later than the one of that proof.
    """

    def __init__(
        self,
        graph: StageGraph,
        actions: Iterable[Action],
        rank: int,
        groups: ProcessGroups,
        widths: Mapping[Edge, int],
        sharers: Mapping[str, int],
        send_limit: int,
        device: torch.device,
        dtype: torch.dtype,
        activity: Activity | None = None,
    ) -> None:
        self._graph, self._rank, self._groups, self._widths = graph, rank, groups, widths
        self._sharers = sharers  # ranks that share out a unit's tokens between stages, where they do
        self._send_limit, self._device, self._dtype = send_limit, device, dtype
        self._activity = activity or Activity()
        self._uses = _count_uses(graph, actions, rank)
        self._begin_empty()

    def start_step(self, loads: StepLoads) -> None:
        """Start a step with these loads and routes."""
        self._loads = loads
        self._begin_empty()

    def put(self, edge: Edge, mb: Microbatch, payload: Payload, tensor: Tensor) -> None:
        """Hold what this rank computed for `mb` until its last send or local use."""
        key = (edge, mb, payload)
        if self._uses[key]:
            self._held[key] = tensor
            self._left[key] = self._uses[key]

    def send(self, action: Send) -> None:
        """Start sending the rows that the action names; nothing, if there are none."""
        produced = action.src if action.payload == "activation" else action.dst
        tensor = self._use((action.edge, produced, action.payload))
        spans = self._spans(action.edge, action.src, action.dst)
        rows = tensor if spans is None else _pick(tensor, spans[:, 0 if action.payload == "activation" else 1], spans)
        if len(rows):
            rows = rows.contiguous()
            channel = self._sending[action.edge, action.payload, action.peer]
            if len(channel) == self._send_limit:
                self._wait(channel.popleft())
            group = self._groups.channels[action.edge, action.payload]
            work = dist.isend(rows, action.peer, group=group)
            assert work is not None
            channel.append(_Posted(action, work, rows))

    def receive(self, action: Recv) -> None:
        """Post the receive that matches a peer's send."""
        num_rows = self._num_rows(action.edge, action.src, action.dst)
        if num_rows:
            rows = self._empty(num_rows, action.edge)
            work = dist.irecv(rows, action.peer, group=self._groups.channels[action.edge, action.payload])
            assert work is not None
            self._posted[action.edge, action.src, action.dst, action.payload] = _Posted(action, work, rows)

    def share(self, action: Share) -> None:
        """Broadcast what the TP group's first rank received to the whole TP group."""
        stage = action.edge.dst if action.payload == "activation" else action.edge.src
        tp_group = self._graph.stage(stage).tp_groups[action.mb.replica]
        if self._rank == tp_group[0]:
            tensor = self._assemble(action.edge, action.mb, action.payload)
        else:
            tensor = self._empty(self._total_rows(action.edge, action.mb, action.payload), action.edge)
        if len(tensor):
            dist.broadcast(tensor, src=tp_group[0], group=self._groups.units[stage.unit].tp)
        self._shared[action.edge, action.mb, action.payload] = tensor

    def take(self, edge: Edge, mb: Microbatch, payload: Payload) -> Tensor:
        """Return what `mb` needs over `edge`, waiting for what has not arrived.

        An activation comes as (rows, width) in the order of the destination; a gradient in that of the source.
        """
        shared = self._shared.pop((edge, mb, payload), None)
        return self._assemble(edge, mb, payload) if shared is None else shared

    def drain(self) -> None:
        """Wait until everything sent in this step has left."""
        for channel in self._sending.values():
            while channel:
                self._wait(channel.popleft())

    def _begin_empty(self) -> None:
        self._held: dict[Key, Tensor] = {}
        self._left: Counter[Key] = Counter()
        self._posted: dict[tuple[Edge, Microbatch, Microbatch, Payload], _Posted] = {}
        self._shared: dict[Key, Tensor] = {}
        self._sending: defaultdict[Channel, deque[_Posted]] = defaultdict(deque)

    def _use(self, key: Key) -> Tensor:
        tensor = self._held[key]
        self._left[key] -= 1
        if not self._left[key]:
            del self._held[key]
        return tensor

    def _assemble(self, edge: Edge, mb: Microbatch, payload: Payload) -> Tensor:
        if not edge.crosses_units:
            empty = not self._num_rows(edge, mb, mb)  # then nothing travels, and nothing need be received
            return self._empty(0, edge) if empty else self._part(edge, mb, mb, payload).detach()
        forward = payload == "activation"
        others = self._graph.sources(edge, mb) if forward else self._graph.destinations(edge, mb)
        whole = self._zeros(self._total_rows(edge, mb, payload), edge)
        for other in others:
            src, dst = (other, mb) if forward else (mb, other)
            spans = self._spans(edge, src, dst)
            held = (edge, other, payload) in self._held  # a local part counts as used even if no row of it is wanted
            if held or (spans is not None and len(spans)):
                part = self._part(edge, src, dst, payload)
                if spans is not None:
                    _place(whole, part, spans, forward)
        return whole

    def _part(self, edge: Edge, src: Microbatch, dst: Microbatch, payload: Payload) -> Tensor:
        """Rows that flow between `src` and `dst`: produced here, or received."""
        local = (edge, src if payload == "activation" else dst, payload)
        if local in self._held:
            tensor = self._use(local)
            spans = self._spans(edge, src, dst)
            return tensor if spans is None else _pick(tensor, spans[:, 0 if payload == "activation" else 1], spans)
        posted = self._posted.pop((edge, src, dst, payload))
        self._wait(posted)
        return posted.rows

    def _wait(self, message: _Posted) -> None:
        self._activity.wait(message.action)
        message.work.wait()
        self._activity.arrived(message.rows.nbytes)

    def _spans(self, edge: Edge, src: Microbatch, dst: Microbatch) -> IntArray | None:
        """Spans (src_offset, dst_offset, length) between two units; None inside a unit, where all rows travel."""
        if not edge.crosses_units:
            return None
        route = self._loads.routes[edge.src.unit, edge.dst.unit]
        return route.spans.get((src, dst), _NO_SPANS)

    def _num_rows(self, edge: Edge, src: Microbatch, dst: Microbatch) -> int:
        spans = self._spans(edge, src, dst)
        if spans is None:
            return -(-self._loads.loads[src].tokens // self._sharers.get(src.unit, 1))
        return int(spans[:, 2].sum())

    def _total_rows(self, edge: Edge, mb: Microbatch, payload: Payload) -> int:
        if payload == "gradient":
            return self._loads.rows_out[mb]
        return sum(self._num_rows(edge, src, mb) for src in self._graph.sources(edge, mb))

    def _empty(self, rows: int, edge: Edge) -> Tensor:
        return torch.empty(rows, self._widths[edge], device=self._device, dtype=self._dtype)

    def _zeros(self, rows: int, edge: Edge) -> Tensor:
        return torch.zeros(rows, self._widths[edge], device=self._device, dtype=self._dtype)


def _count_uses(graph: StageGraph, actions: Iterable[Action], rank: int) -> Counter[Key]:
    """Count how often each tensor that this rank produces is sent or used here, to drop it after the last time."""
    uses: Counter[Key] = Counter()
    for action in actions:
        if isinstance(action, Send):
            produced = action.src if action.payload == "activation" else action.dst
            uses[action.edge, produced, action.payload] += 1
        elif isinstance(action, ComputeTask):
            for flow in input_flows(graph, action):
                made = flow.producer
                if rank in graph.tp_group(made.stage, made.mb.replica):
                    uses[flow.edge, made.mb, flow.payload] += 1
    return uses


def _pick(tensor: Tensor, offsets: IntArray, spans: IntArray) -> Tensor:
    """Concatenate the rows of the spans that start at `offsets`."""
    if len(spans) == 1:
        return tensor.narrow(0, int(offsets[0]), int(spans[0, 2]))
    parts = [tensor.narrow(0, int(o), int(n)) for o, n in zip(offsets, spans[:, 2], strict=True)]
    return torch.cat(parts) if parts else tensor[:0]


def _place(whole: Tensor, part: Tensor, spans: IntArray, forward: bool) -> None:
    """Write the concatenated rows of `part` to their places in the destination (or, in backward, the source)."""
    begin = 0
    for src_offset, dst_offset, length in spans.tolist():
        whole.narrow(0, dst_offset if forward else src_offset, length).copy_(part.narrow(0, begin, length))
        begin += length


_NO_SPANS: IntArray = np.zeros((0, 3), dtype=np.int64)
