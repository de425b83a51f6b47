"""Which data an action reads and produces, and between which ranks it travels.

`lower`, `check`, `simulate` and the executor share these rules:

* Inside a unit, position k of a TP group sends to position k of the next TP group.
* Between units, the first rank of the source's TP group sends to the first rank of the destination's TP group. If the
  receiving TP group has more than one rank, its first rank then shares what it holds (`Share`).
* Between units that dispatch, all replicas rearrange their rows in one collective (`Dispatch`), without messages.
* Data whose two ends are on the same rank is local and appears in no program. TP groups that are the same ranks in the
  same order need no sharing either.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from mmtrain.program.ir.actions import (
    Action,
    AsyncCollective,
    AtomicAction,
    Backward,
    Compute,
    ComputeTask,
    Dispatch,
    Fill,
    Forward,
    GatherParams,
    Partial,
    Pass,
    Payload,
    Recv,
    ReduceGrads,
    ReduceShared,
    Send,
    Share,
    Step,
)
from mmtrain.program.ir.graph import LLM, Edge, Microbatch, StageGraph, StageId
from mmtrain.program.ir.segments import expand, finished_pass, layer_range, started_pass

EMBEDDINGS = "embeddings"  # the one shared weight: the LLM's tied input and output matrix


class Bucket(NamedTuple):
    """Layers [lo, hi) of a stage, counted from its first, whose gradients are reduced and parameters gathered together.

    A matrix that two layers of a rank share belongs to the first of them: its gradient is complete last.
    """

    stage: StageId
    lo: int
    hi: int

    def holds_any(self, graph: StageGraph, action: Compute) -> bool:
        """Return whether an action runs one of these layers, or a piece of one."""
        if action.stage != self.stage:
            return False
        lo, hi = layer_range(graph, action)
        return lo < self.hi and self.lo < hi


@dataclass(frozen=True, slots=True)
class Flow:
    """Activations (source to destination) or gradients (back) between two microbatches over one edge."""

    edge: Edge
    src: Microbatch
    dst: Microbatch
    payload: Payload

    @property
    def receiver(self) -> Microbatch:
        """The microbatch that waits for this flow."""
        return self.dst if self.payload == "activation" else self.src

    @property
    def producer(self) -> Pass:
        """The forward or backward whose result flows."""
        if self.payload == "activation":
            return Forward(self.edge.src, self.src)
        return Backward(self.edge.dst, self.dst)

    @property
    def reader(self) -> Pass:
        """The forward or backward that waits for this flow."""
        if self.payload == "activation":
            return Forward(self.edge.dst, self.dst)
        return Backward(self.edge.src, self.src)


def input_flows(graph: StageGraph, task: ComputeTask) -> list[Flow]:
    """Return the flows that a task waits for: those into each forward and backward that it starts.

    What collectives of all replicas bring is not among them, see `dispatches_before`.
    """
    flows: list[Flow] = []
    for part in expand(graph, task):
        started, mb = started_pass(graph, part), part.mb
        if isinstance(started, Forward):
            edges = _with_messages(graph, graph.inputs(part.stage))
            flows += [Flow(e, s, mb, "activation") for e in edges for s in graph.sources(e, mb)]
        elif started:
            edges = _with_messages(graph, graph.outputs(part.stage))
            flows += [Flow(e, mb, d, "gradient") for e in edges for d in graph.destinations(e, mb)]
    return flows


def output_flows(graph: StageGraph, task: ComputeTask) -> list[Flow]:
    """Return the flows that a task produces: those out of each forward and backward that it finishes."""
    flows: list[Flow] = []
    for part in expand(graph, task):
        finished, mb = finished_pass(graph, part), part.mb
        if isinstance(finished, Forward):
            edges = _with_messages(graph, graph.outputs(part.stage))
            flows += [Flow(e, mb, d, "activation") for e in edges for d in graph.destinations(e, mb)]
        elif finished:
            edges = _with_messages(graph, [e for e in graph.inputs(part.stage) if graph.carries_gradient(e)])
            flows += [Flow(e, s, mb, "gradient") for e in edges for s in graph.sources(e, mb)]
    return flows


def dispatches_before(graph: StageGraph, task: ComputeTask) -> list[Dispatch]:
    """Return the collectives in which all replicas take part before `task`: they bring what it reads of other units."""
    dispatches: dict[Dispatch, None] = {}
    if not graph.dispatches_items:
        return []
    for part in expand(graph, task):
        started, index = started_pass(graph, part), part.mb.index
        if isinstance(started, Forward):
            for edge in filter(graph.dispatches, graph.inputs(part.stage)):
                sources = graph.sources(edge, part.mb)
                dispatches.update((Dispatch(edge, src.index, index, "activation"), None) for src in sources)
        elif started:
            for edge in filter(graph.dispatches, graph.outputs(part.stage)):
                destinations = graph.destinations(edge, part.mb)
                dispatches.update((Dispatch(edge, index, dst.index, "gradient"), None) for dst in destinations)
    return list(dispatches)


def dispatched(graph: StageGraph, rank: int, action: Dispatch) -> Flow:
    """Return what a dispatch takes from `rank` and brings it, as a flow between the rank's own microbatches."""
    edge = action.edge
    src, dst = (
        Microbatch(stage.unit, graph.mesh(stage.unit).ranks.index(rank) // graph.mesh(stage.unit).tp, index)
        for stage, index in ((edge.src, action.src), (edge.dst, action.dst))
    )
    return Flow(edge, src, dst, action.payload)


def _with_messages(graph: StageGraph, edges: Sequence[Edge]) -> list[Edge]:
    """Return the edges over which data flows by messages, or stays on its rank."""
    return [edge for edge in edges if not graph.dispatches(edge)]


def rank_pairs(graph: StageGraph, flow: Flow) -> list[tuple[int, int]]:
    """Return pairs (sending rank, receiving rank) between which the flow travels; none where it is local.

    Between units it travels from the first rank of one TP group to the first rank of the other, unless that rank is in
    both: every rank of a TP group holds what the group produces.
    """
    senders = graph.tp_group(flow.edge.src, flow.src.replica)
    receivers = graph.tp_group(flow.edge.dst, flow.dst.replica)
    if flow.payload == "gradient":
        senders, receivers = receivers, senders
    if flow.edge.crosses_units and senders != receivers:
        return [] if receivers[0] in senders else [(senders[0], receivers[0])]
    return [(sender, receiver) for sender, receiver in zip(senders, receivers, strict=True) if sender != receiver]


def needs_share(graph: StageGraph, edge: Edge, mb: Microbatch, payload: Payload) -> bool:
    """Return whether the TP group that receives `mb`'s data over `edge` must share what its first rank holds."""
    if not edge.crosses_units:
        return False
    tp_group = receiving_tp_group(graph, edge, mb, payload)
    if len(tp_group) == 1:
        return False
    if payload == "activation":
        return any(graph.tp_group(edge.src, s.replica) != tp_group for s in graph.sources(edge, mb))
    return any(graph.tp_group(edge.dst, d.replica) != tp_group for d in graph.destinations(edge, mb))


def receiving_tp_group(graph: StageGraph, edge: Edge, mb: Microbatch, payload: Payload) -> tuple[int, ...]:
    """Return the TP group that receives `mb`'s data over `edge`."""
    return graph.tp_group(edge.dst if payload == "activation" else edge.src, mb.replica)


def recvs_before(graph: StageGraph, rank: int, task: ComputeTask) -> list[Recv]:
    """Return the receives that `rank` must post before `task`."""
    inside = _passed_inside_unit(graph, task, is_read=True)
    if inside is not None:
        stage, mb, edges, payload = inside
        peers = [(edge, _peer_inside_unit(graph, rank, stage, edge, mb)) for edge in edges]
        return [Recv(edge, mb, mb, peer, payload) for edge, peer in peers if peer != rank]
    return [
        Recv(f.edge, f.src, f.dst, sender, f.payload)
        for f in input_flows(graph, task)
        for sender, receiver in rank_pairs(graph, f)
        if receiver == rank
    ]


def sends_after(graph: StageGraph, rank: int, task: ComputeTask) -> list[Send]:
    """Return the sends that `rank` must start after `task`."""
    inside = _passed_inside_unit(graph, task, is_read=False)
    if inside is not None:
        stage, mb, edges, payload = inside
        peers = [(edge, _peer_inside_unit(graph, rank, stage, edge, mb)) for edge in edges]
        return [Send(edge, mb, mb, peer, payload) for edge, peer in peers if peer != rank]
    return [
        Send(f.edge, f.src, f.dst, receiver, f.payload)
        for f in output_flows(graph, task)
        for sender, receiver in rank_pairs(graph, f)
        if sender == rank
    ]


def shares_before(graph: StageGraph, task: ComputeTask) -> list[Share]:
    """Return the broadcasts in which every rank of the task's TP group takes part just before `task`."""
    if _passed_inside_unit(graph, task, is_read=True) is not None:
        return []
    flows = dict.fromkeys((f.edge, f.receiver, f.payload) for f in input_flows(graph, task))
    return [Share(*key) for key in flows if needs_share(graph, *key)]


def _passed_inside_unit(
    graph: StageGraph, task: ComputeTask, *, is_read: bool
) -> tuple[StageId, Microbatch, Sequence[Edge], Payload] | None:
    """Return stage and microbatch of a task, the edges over which it reads, or its result leaves, and what flows there.

    This is a short cut for most tasks of a step: None for parts of passes, and where an edge crosses units.
    """
    if not isinstance(task, Forward | Backward):
        return None
    stage, is_forward = task.stage, isinstance(task, Forward)
    edges: Sequence[Edge] = graph.inputs(stage) if is_forward == is_read else graph.outputs(stage)
    for edge in edges:
        if edge.src.unit != edge.dst.unit:
            return None
    if not is_forward and not is_read:
        edges = [edge for edge in edges if graph.carries_gradient(edge)]
    return stage, task.mb, edges, "activation" if is_forward else "gradient"


def _peer_inside_unit(graph: StageGraph, rank: int, stage: StageId, edge: Edge, mb: Microbatch) -> int:
    """Return the rank at the other end of an edge of a stage, in the same place of its TP group as `rank`."""
    position = graph.tp_group(stage, mb.replica).index(rank)
    other = edge.dst if edge.src == stage else edge.src
    return graph.tp_group(other, mb.replica)[position]


def reader_of(graph: StageGraph, recv: Recv) -> Share | Pass:
    """Return the action of the receiving rank that waits for the message."""
    if not recv.edge.crosses_units:  # a short cut for most messages of a step
        return Forward(recv.edge.dst, recv.dst) if recv.payload == "activation" else Backward(recv.edge.src, recv.src)
    flow = Flow(recv.edge, recv.src, recv.dst, recv.payload)
    if needs_share(graph, flow.edge, flow.receiver, flow.payload):
        return Share(flow.edge, flow.receiver, flow.payload)
    return flow.reader


def awaits_result(
    graph: StageGraph, action: Action, collective: AsyncCollective, buckets: Mapping[AsyncCollective, Bucket]
) -> bool:
    """Return whether an action of a rank waits for the end of a collective that the rank has started before.

    buckets: of the rank, see `covered_buckets`.
    """
    if isinstance(collective, ReduceGrads):
        return isinstance(action, Step)
    bucket = buckets.get(collective)
    return bucket is not None and isinstance(action, Compute) and bucket.holds_any(graph, action)


def trained_units(graph: StageGraph, rank: int) -> list[str]:
    """Return the units whose gradients `rank` reduces by actions of their own, destinations before sources.

    They have a trainable parameter in a stage on the rank. Backwards of sharded units reduce gradients themselves.
    """
    held = [sid for sid, _ in graph.held_by(rank) if graph.stage(sid).trainable]
    units = [sid.unit for sid in held if graph.mesh(sid.unit).shard is None]
    return list(dict.fromkeys(reversed(units)))


def gradient_buckets(graph: StageGraph, rank: int) -> dict[ReduceGrads, Bucket]:
    """Return the reductions of gradients that `rank` takes part in, each with the layers whose gradients it covers.

    Each model chunk has one or several of its own (`Stage.bucket_starts`), so that it overlaps with the backwards of
    the layers before and of other chunks. Last layers come first, as their backwards end first, so do last chunks, and
    destinations before sources.
    """
    return {ReduceGrads(*number): bucket for number, bucket in reversed(list(_numbered_buckets(graph, rank)))}


def parameter_gathers(graph: StageGraph, rank: int) -> dict[GatherParams, Bucket]:
    """Return the gathers of parameters that `rank` takes part in, each with the layers whose parameters it covers.

    They cover the same layers as the reductions of gradients, in the opposite order: sources before destinations, first
    chunks and first layers first, as forwards need them. This is one order on all ranks.
    """
    return {GatherParams(*number): bucket for number, bucket in _numbered_buckets(graph, rank)}


def covered_buckets(graph: StageGraph, rank: int) -> dict[AsyncCollective, Bucket]:
    """Return all asynchronous collectives that `rank` takes part in, each with the layers that it covers."""
    covered: dict[AsyncCollective, Bucket] = {}
    for number, bucket in _numbered_buckets(graph, rank):
        covered[ReduceGrads(*number)] = covered[GatherParams(*number)] = bucket
    return covered


def _numbered_buckets(graph: StageGraph, rank: int) -> Iterator[tuple[tuple[str, int, int], Bucket]]:
    """Yield the buckets of a rank, first layers first, each with its unit, its model chunk and its number in it."""
    for unit in reversed(trained_units(graph, rank)):
        for chunk, sid in enumerate(sid for sid, _ in graph.held_by(rank) if sid.unit == unit):
            if graph.stage(sid).trainable:
                for number, bucket in enumerate(stage_buckets(graph, sid)):
                    yield (unit, chunk, number), bucket


def stage_buckets(graph: StageGraph, stage: StageId) -> list[Bucket]:
    """Return the buckets of a stage's layers, first layers first."""
    lo, hi = graph.stage(stage).layers
    starts = graph.stage(stage).bucket_starts
    return [Bucket(stage, *bounds) for bounds in pairwise((*starts, hi - lo))]


def shared_embedding_stages(graph: StageGraph) -> tuple[StageId, ...]:
    """Return the LLM's first and last stage if they hold two copies of one trainable matrix, else nothing.

    On the same ranks (one pipeline rank, several model chunks) they hold one copy.
    """
    if not graph.tied_embeddings:
        return ()
    llm = [sid for sid in graph.order if sid.unit == LLM]
    first, last = (graph.stage(sid) for sid in (llm[0], llm[-1]))
    two_copies = first.tp_groups != last.tp_groups and first.trainable and last.trainable
    return (first.id, last.id) if two_copies else ()


def holds_shared_embeddings(graph: StageGraph, rank: int) -> bool:
    """Return whether `rank` takes part in reducing the tied embedding matrix."""
    return any(rank in tp_group for sid in shared_embedding_stages(graph) for tp_group in graph.stage(sid).tp_groups)


def covers_shared_embeddings(graph: StageGraph, rank: int, bucket: Bucket) -> bool:
    """Return whether `rank` reduces the tied embedding matrix with another rank, and the bucket holds its copy."""
    if not holds_shared_embeddings(graph, rank) or bucket.stage not in (ends := shared_embedding_stages(graph)):
        return False
    first, last = ends
    lo, hi = graph.stage(last).layers
    return bucket.lo == 0 if bucket.stage == first else bucket.hi == hi - lo


def participants(graph: StageGraph, rank: int, action: Action) -> tuple[int, ...]:
    """Return the global ranks, ascending and of all replica groups, that run `rank`'s action together.

    Compute is a collective of its TP group: tensor parallelism exchanges partial results inside it. With context or
    expert parallelism it is one of all replicas that share its sequences or experts, that of a sharded unit one of all
    replicas, which gather weights and reduce gradients in it.
    """
    match action:
        case Forward(stage, mb) | Backward(stage, mb) | Partial(stage, mb):
            replicas = graph.mesh(stage.unit).joint_replicas(mb.replica)
            ranks = {rank for replica in replicas for rank in graph.tp_group(stage, replica)}
        case Fill(host):
            return participants(graph, rank, host)
        case Dispatch(edge):
            ranks = {rank for tp_group in graph.stage(edge.src).tp_groups for rank in tp_group}
        case Share(edge, mb, payload):
            ranks = set(receiving_tp_group(graph, edge, mb, payload))
        case ReduceGrads(unit) | GatherParams(unit):
            ranks = _data_parallel_group(graph, rank, unit)
        case ReduceShared():
            ranks = _embedding_group(graph, rank)
        case Step():
            return graph.all_ranks
        case Send() | Recv():
            ranks = {rank}
    return tuple(sorted(ranks))


def joint_form(graph: StageGraph, action: AtomicAction) -> AtomicAction:
    """Return the action as the first of the ranks writes it that run it together.

    Replicas that share sequences or experts name different replicas in the passes that they run together, and so do all
    replicas of a sharded unit.
    """
    if not isinstance(action, Compute):
        return action
    first = graph.mesh(action.mb.unit).joint_replicas(action.mb.replica)[0]
    return replace(action, mb=action.mb._replace(replica=first))


def _data_parallel_group(graph: StageGraph, rank: int, unit: str) -> set[int]:
    """Return the ranks that hold what `rank` holds of `unit`, at the same place in the TP group of every replica."""
    ranks: set[int] = set()
    for sid, replica in graph.held_by(rank):
        if sid.unit == unit:
            ranks.update(graph.ranks_at(sid, graph.tp_group(sid, replica).index(rank)))
    return ranks


def _embedding_group(graph: StageGraph, rank: int) -> set[int]:
    """Return the holders of the same slice of the tied matrix in the same replica."""
    ends = shared_embedding_stages(graph)
    for sid in ends:
        for replica, tp_group in enumerate(graph.stage(sid).tp_groups):
            if rank in tp_group:
                return {graph.tp_group(end, replica)[tp_group.index(rank)] for end in ends}
    return set()
