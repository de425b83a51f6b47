"""Actions: the things one rank does in a step, in a form that prints, parses and compares.

Builders order compute actions; `lower` adds the communication. Classes whose actions come by the hundred thousand have
a hash function of their own, since programs are made with dictionaries of them. Text form, one action a line:

    F llm.0 llm:0.3                          forward of stage llm.0 on microbatch 3 of replica 0
    B vision.1 vision:1.0                    backward
    SA vision.0>llm.0 vision:0.2 llm:1.2 @5  send rank 5 the activations that llm:1.2 needs from vision:0.2
    RA / SG / RG                             receive activations, send / receive gradients
    DA vision.0>llm.0 2 3                    rearrange rows of microbatches 2 for those numbered 3 (DG: gradients)
    XA vision.0>llm.0 llm:1.2                share received activations inside the TP group (XG: gradients)
    PF vision.0 vision:0.2 0:3               segments 0 to 2 of that stage's forward (PB: of its backward, 2 first)
    F llm.0 llm:0.3 |2| PF ..., PB ...       forward with partials in its gap 2, between its segments 1 and 2
    RS llm 0 2   GP llm 0 2                  reduce gradients, gather parameters of bucket 2 of model chunk 0
    RT embeddings   STEP                     reduce shared weights, optimizer
"""

from dataclasses import dataclass
from typing import Literal

from mmtrain.program.ir.graph import Edge, Microbatch, StageId

Payload = Literal["activation", "gradient"]
Direction = Literal["F", "B"]


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a stage's layers on a microbatch."""

    stage: StageId
    mb: Microbatch

    def __hash__(self) -> int:
        return hash(("F", self.stage.unit, self.stage.index, self.mb.replica, self.mb.index))


@dataclass(frozen=True, slots=True)
class Backward:
    """Run a stage's backward on a microbatch; where the stage `reruns_forward`, after another forward."""

    stage: StageId
    mb: Microbatch

    def __hash__(self) -> int:
        return hash(("B", self.stage.unit, self.stage.index, self.mb.replica, self.mb.index))


@dataclass(frozen=True, slots=True)
class Partial:
    """Run segments [lo, hi) of a stage's forward or backward on a microbatch; segments count from 0.

    A segment is a layer or, where `Stage.pieces` says so, a piece of one. If the partial's last piece ends with a
    tensor-parallel collective, that collective is left under way: the rank's next actions compute beside it, and only
    the next part of the same forward or backward waits for it.

    A forward goes through its segments upwards, a backward downwards. A forward reads its inputs before segment 0, and
    its outputs leave after its last segment; a backward reads before its last segment, and its gradients leave after
    segment 0.

    Raises:
        ValueError: no segment lies in [lo, hi).
    """

    stage: StageId
    mb: Microbatch
    kind: Direction
    lo: int
    hi: int

    def __post_init__(self) -> None:
        if not 0 <= self.lo < self.hi:
            raise ValueError(f"{self.lo}:{self.hi} holds no segment; write the first and the one after the last")


@dataclass(frozen=True, slots=True)
class Fill:
    """Run `host` with `partials` in its gap `gap`, the one between its segments gap - 1 and gap.

    Everything that the partials read must be there before the host starts, and their outputs leave after it ends. A
    host with several gaps to fill is cut into partials with one gap each.

    Raises:
        ValueError: `partials` is empty.
    """

    host: "Forward | Backward | Partial"
    gap: int
    partials: tuple[Partial, ...]

    def __post_init__(self) -> None:
        if not self.partials:
            raise ValueError("the gap is empty; write the host alone")


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending, over `edge`, what flows between source microbatch `src` and destination microbatch `dst`.

    Activations go from the rank that holds `edge.src`, gradients from the one that holds `edge.dst`. `peer` is the
    other rank. Never blocks; a message of zero rows is not sent, and both sides know that from the route.
    """

    edge: Edge
    src: Microbatch
    dst: Microbatch
    peer: int
    payload: Payload

    def __hash__(self) -> int:
        return _hash_of_message(self)


@dataclass(frozen=True, slots=True)
class Recv:
    """Post the receive that matches a peer's `Send`; the action that reads the data waits for it."""

    edge: Edge
    src: Microbatch
    dst: Microbatch
    peer: int
    payload: Payload

    def __hash__(self) -> int:
        return _hash_of_message(self)


def _hash_of_message(message: Send | Recv) -> int:
    edge, src, dst = message.edge, message.src, message.dst
    numbers = (edge.src.index, edge.dst.index, src.replica, src.index, dst.replica, dst.index, message.peer)
    return hash((edge.src.unit, edge.dst.unit, message.payload, numbers))


@dataclass(frozen=True, slots=True)
class Share:
    """Broadcast what the TP group's first rank holds for `mb` over `edge` to the rest of the TP group (a collective).

    The first rank holds what it received and what it computed itself. Activations are shared in the TP group of
    `edge.dst`, gradients in the TP group of `edge.src`.
    """

    edge: Edge
    mb: Microbatch
    payload: Payload


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Rearrange what flows over `edge` between all replicas of two units (a collective of all replicas).

    Each replica of the source sends the rows of its microbatch `src` that microbatch `dst` of any replica of the
    destination needs, or takes back their gradients. `UnitMesh.exchange` names the collective. Every replica takes
    part, also one without rows, unless no replica has any: all know that from the route.
    """

    edge: Edge
    src: int
    dst: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class ReduceGrads:
    """Start to reduce gradients over the unit's data-parallel group (a collective); `Step` waits for the result.

    They are those of one bucket of layers of a model chunk of the unit: see `gradient_buckets`.
    """

    unit: str
    chunk: int = 0
    bucket: int = 0  # of the chunk, the one with its first layers is 0


@dataclass(frozen=True, slots=True)
class ReduceShared:
    """Sum the gradients of weights that live on several stages (tied embeddings; a collective)."""

    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """Agree on the gradient norm over all ranks, clip, and step the optimizer (a collective of the world)."""


@dataclass(frozen=True, slots=True)
class GatherParams:
    """Start to gather parameters that the step before has updated, over the unit's data-parallel group (a collective).

    They are those of one bucket of layers of a model chunk of the unit: see `parameter_gathers`. The first forward of
    these layers waits for the result.
    """

    unit: str
    chunk: int = 0
    bucket: int = 0  # see `ReduceGrads`


Pass = Forward | Backward  # all of a stage's work on a microbatch in one direction
Compute = Forward | Backward | Partial
ComputeTask = Forward | Backward | Partial | Fill  # what builders order
# A `Fill` is expanded before it runs; all other actions are atomic (see `segments.expand`).
AsyncCollective = (
    ReduceGrads | GatherParams
)  # ranks start it and go on; what reads the result waits for it (see `awaits_result`)
Collective = Share | Dispatch | ReduceGrads | ReduceShared | Step | GatherParams
AtomicAction = (
    Forward | Backward | Partial | Send | Recv | Share | Dispatch | ReduceGrads | ReduceShared | Step | GatherParams
)
Action = AtomicAction | Fill
