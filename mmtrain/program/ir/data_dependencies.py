"""What travels between ranks: the rules that `lower`, `check`, `simulate` and the executor share.

* Inside a unit, position k of a TP group talks to position k of the next TP group.
* Between units, the first rank of the source's TP group talks to the first rank of the destination's TP group. If the
  receiving TP group has more than one rank, its first rank then shares what it holds (`Share`).
* What both ends find on the same rank is local and appears in no program; source and destination TP groups that are
  the same ranks in the same order need no sharing either.
"""

from dataclasses import dataclass

from mmtrain.program.ir.actions import (
    Action,
    Backward,
    ComputeTask,
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
from mmtrain.program.ir.segments import expand, finished_pass, started_pass

EMBEDDINGS = "embeddings"  # the one shared weight: the LLM's tied input and output matrix


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
    """Flows that a task waits for: where a forward begins all its sources, where a backward does its destinations."""
    found: list[Flow] = []
    for part in expand(graph, task):
        begins, mb = started_pass(graph, part), part.mb
        if isinstance(begins, Forward):
            edges = graph.inputs(part.stage)
            found += [Flow(e, s, mb, "activation") for e in edges for s in graph.sources(e, mb)]
        elif begins:
            edges = graph.outputs(part.stage)
            found += [Flow(e, mb, d, "gradient") for e in edges for d in graph.destinations(e, mb)]
    return found


def output_flows(graph: StageGraph, task: ComputeTask) -> list[Flow]:
    """Flows that a task produces: what a forward or backward gives leaves when that ends."""
    found: list[Flow] = []
    for part in expand(graph, task):
        ends, mb = finished_pass(graph, part), part.mb
        if isinstance(ends, Forward):
            edges = graph.outputs(part.stage)
            found += [Flow(e, mb, d, "activation") for e in edges for d in graph.destinations(e, mb)]
        elif ends:
            edges = tuple(e for e in graph.inputs(part.stage) if graph.carries_gradient(e))
            found += [Flow(e, s, mb, "gradient") for e in edges for s in graph.sources(e, mb)]
    return found


def rank_pairs(graph: StageGraph, flow: Flow) -> list[tuple[int, int]]:
    """Pairs (sending rank, receiving rank) between which the flow travels; empty where it is local."""
    src = graph.tp_group(flow.edge.src, flow.src.replica)
    dst = graph.tp_group(flow.edge.dst, flow.dst.replica)
    pairs = [(src[0], dst[0])] if flow.edge.crosses_units and src != dst else list(zip(src, dst, strict=True))
    if flow.payload == "gradient":
        pairs = [(d, s) for s, d in pairs]
    return [(a, b) for a, b in pairs if a != b]


def needs_share(graph: StageGraph, edge: Edge, mb: Microbatch, payload: Payload) -> bool:
    """Whether the TP group that receives `mb`'s data over `edge` must share what its first rank holds."""
    if not edge.crosses_units:
        return False
    tp_group = receiving_tp_group(graph, edge, mb, payload)
    if payload == "activation":
        others = [graph.tp_group(edge.src, s.replica) for s in graph.sources(edge, mb)]
    else:
        others = [graph.tp_group(edge.dst, d.replica) for d in graph.destinations(edge, mb)]
    return len(tp_group) > 1 and any(other != tp_group for other in others)


def receiving_tp_group(graph: StageGraph, edge: Edge, mb: Microbatch, payload: Payload) -> tuple[int, ...]:
    """The TP group that receives `mb`'s data over `edge`."""
    return graph.tp_group(edge.dst if payload == "activation" else edge.src, mb.replica)


def recvs_before(graph: StageGraph, rank: int, task: ComputeTask) -> list[Recv]:
    """Messages that `rank` must receive before `task`."""
    return [
        Recv(f.edge, f.src, f.dst, sender, f.payload)
        for f in input_flows(graph, task)
        for sender, receiver in rank_pairs(graph, f)
        if receiver == rank
    ]


def sends_after(graph: StageGraph, rank: int, task: ComputeTask) -> list[Send]:
    """Messages that `rank` must send after `task`."""
    return [
        Send(f.edge, f.src, f.dst, receiver, f.payload)
        for f in output_flows(graph, task)
        for sender, receiver in rank_pairs(graph, f)
        if sender == rank
    ]


def shares_before(graph: StageGraph, task: ComputeTask) -> list[Share]:
    """Broadcasts in which every rank of the task's TP group takes part just before `task`."""
    wanted = dict.fromkeys((f.edge, f.receiver, f.payload) for f in input_flows(graph, task))
    return [Share(*key) for key in wanted if needs_share(graph, *key)]


def reader_of(graph: StageGraph, recv: Recv) -> Share | Pass:
    """What waits for the message on the receiving rank."""
    if not recv.edge.crosses_units:  # most messages of a step
        return Forward(recv.edge.dst, recv.dst) if recv.payload == "activation" else Backward(recv.edge.src, recv.src)
    flow = Flow(recv.edge, recv.src, recv.dst, recv.payload)
    if needs_share(graph, flow.edge, flow.receiver, flow.payload):
        return Share(flow.edge, flow.receiver, flow.payload)
    return flow.reader


def trained_units(graph: StageGraph, rank: int) -> list[str]:
    """Units of which `rank` holds a stage with a trainable parameter, destinations before sources."""
    units = [sid.unit for sid, _ in graph.held_by(rank) if graph.stage(sid).trainable]
    return list(dict.fromkeys(reversed(units)))


def shared_embedding_stages(graph: StageGraph) -> tuple[StageId, ...]:
    """The LLM's first and last stage if they hold two copies of one trainable matrix, else nothing.

    On the same ranks (one pipeline rank, several chunks) they hold one copy.
    """
    if not graph.tied_embeddings:
        return ()
    llm = [sid for sid in graph.order if sid.unit == LLM]
    first, last = (graph.stage(sid) for sid in (llm[0], llm[-1]))
    two_copies = first.tp_groups != last.tp_groups and first.trainable and last.trainable
    return (first.id, last.id) if two_copies else ()


def holds_shared_embeddings(graph: StageGraph, rank: int) -> bool:
    """Whether `rank` takes part in reducing the tied embedding matrix."""
    return any(rank in tp_group for sid in shared_embedding_stages(graph) for tp_group in graph.stage(sid).tp_groups)


def participants(graph: StageGraph, rank: int, action: Action) -> tuple[int, ...]:
    """Global ranks, in ascending order, that take part in `rank`'s action at the same time; all replica groups.

    Compute is a collective of its TP group: tensor parallelism exchanges partial results inside it.
    """
    match action:
        case Forward(stage, mb) | Backward(stage, mb) | Partial(stage, mb):
            ranks = set(graph.tp_group(stage, mb.replica))
        case Fill(host):
            return participants(graph, rank, host)
        case Share(edge, mb, payload):
            ranks = set(receiving_tp_group(graph, edge, mb, payload))
        case ReduceGrads(unit) | GatherParams(unit):
            ranks = _mirrors(graph, rank, unit)
        case ReduceShared():
            ranks = _embedding_group(graph, rank)
        case Step():
            ranks = {r for s in graph.stages for tp_group in s.tp_groups for r in tp_group}
        case Send() | Recv():
            ranks = {rank}
    return tuple(sorted(ranks))


def _mirrors(graph: StageGraph, rank: int, unit: str) -> set[int]:
    """The data-parallel group of `rank`: same stages of `unit`, same TP group position, every replica."""
    ranks: set[int] = set()
    for sid, replica in graph.held_by(rank):
        if sid.unit == unit:
            tp_groups = graph.stage(sid).tp_groups
            position = tp_groups[replica].index(rank)
            ranks.update(tp_group[position] for tp_group in tp_groups)
    return ranks


def _embedding_group(graph: StageGraph, rank: int) -> set[int]:
    """Holders of the same slice of the tied matrix in the same replica."""
    ends = shared_embedding_stages(graph)
    for sid in ends:
        for replica, tp_group in enumerate(graph.stage(sid).tp_groups):
            if rank in tp_group:
                return {graph.tp_group(end, replica)[tp_group.index(rank)] for end in ends}
    return set()
