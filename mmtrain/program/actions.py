"""Actions: the things one rank does in a step, in a form that prints, parses and compares.

Compute actions come from builders; `lower` adds the communication. Text form, one action a line:

    F llm.0 llm:0.3                          forward of stage llm.0 on microbatch 3 of replica 0
    B vision.1 vision:1.0                    backward
    SA vision.0>llm.0 vision:0.2 llm:1.2 @5  send rank 5 the activations that llm:1.2 needs from vision:0.2
    RA / SG / RG                             receive activations, send / receive gradients
    XA vision.0>llm.0 llm:1.2                share received activations inside the lane (XG: gradients)
    RS llm   GP llm   RT embeddings   STEP   reduce gradients, gather parameters, reduce shared weights, optimizer
"""

from dataclasses import dataclass
from typing import Literal

from mmtrain.program.graph import Edge, Microbatch, StageId

Payload = Literal["activation", "gradient"]


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a stage's layers on a microbatch."""

    stage: StageId
    mb: Microbatch


@dataclass(frozen=True, slots=True)
class Backward:
    """Run a stage's backward on a microbatch."""

    stage: StageId
    mb: Microbatch


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


@dataclass(frozen=True, slots=True)
class Recv:
    """Post the receive that matches a peer's `Send`; whoever needs the data waits for it."""

    edge: Edge
    src: Microbatch
    dst: Microbatch
    peer: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Share:
    """Broadcast what the lane's first rank holds for `mb` over `edge` to the rest of the lane (a collective).

    The first rank holds what it received and what it computed itself. Activations are shared in the lane of
    `edge.dst`, gradients in the lane of `edge.src`.
    """

    edge: Edge
    mb: Microbatch
    payload: Payload


@dataclass(frozen=True, slots=True)
class ReduceGrads:
    """Reduce the unit's gradients over its data-parallel group (a collective)."""

    unit: str


@dataclass(frozen=True, slots=True)
class ReduceShared:
    """Sum the gradients of weights that live on several stages (tied embeddings; a collective)."""

    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """Agree on the gradient norm over all ranks, clip, and step the optimizer (a collective of the world)."""


@dataclass(frozen=True, slots=True)
class GatherParams:
    """Gather the unit's updated parameters over its data-parallel group (a collective)."""

    unit: str


Compute = Forward | Backward
Collective = Share | ReduceGrads | ReduceShared | Step | GatherParams
Action = Forward | Backward | Send | Recv | Share | ReduceGrads | ReduceShared | Step | GatherParams
