"""Lowering: add the communication that compute actions need, so that a runtime can execute the program."""

from collections.abc import Sequence

from mmtrain.program.ir.actions import Action, ComputeTask, GatherParams, Recv, ReduceGrads, ReduceShared, Step
from mmtrain.program.ir.data_dependencies import (
    EMBEDDINGS,
    holds_shared_embeddings,
    recvs_before,
    sends_after,
    shares_before,
    trained_units,
)
from mmtrain.program.ir.graph import LLM, StageGraph
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.segments import direction, expand
from mmtrain.program.verify.channels import order_receives

# Compute actions by which a receive is posted ahead where layers are cut: the pieces of a few layers.
RECV_LOOKAHEAD_PIECES = 32


def lower(program: Program, reduce_last: bool = False) -> Program:
    """Insert communication into a program of compute actions.

    A receive is posted one compute action ahead of its consumer, or several where layers are cut into pieces, so that
    the transfer overlaps with compute. A send starts right after its producer, and a TP group shares right before the
    consumer. Gradients of a unit are reduced after its last backward on the rank, shared weights just before that; the
    optimizer step and the gathering of parameters follow.

    Args:
        reduce_last: reduce the gradients of all units after all compute, in one order everywhere. Then no reduction
            overlaps with the compute of other units, but no order of compute can make two ranks wait for each other's
            reductions either.
    """
    graph, actions = program.graph, program.actions
    lowered = {rank: _lower_rank(graph, rank, compute, reduce_last) for rank, compute in actions.items()}
    return Program(graph, order_receives(lowered))


def _lower_rank(graph: StageGraph, rank: int, actions: Sequence[Action], reduce_last: bool) -> list[Action]:
    compute = [a for a in actions if isinstance(a, ComputeTask)]
    ahead = RECV_LOOKAHEAD_PIECES if any(stage.pieces for stage in graph.stages) else 1
    posts: list[list[Recv]] = [recvs_before(graph, rank, action) for action in compute]
    units = trained_units(graph, rank)
    last_backward = {unit: index for index, task in enumerate(compute) for unit in _backward_units(graph, task)}
    if reduce_last:
        last_backward = dict.fromkeys(last_backward, len(compute) - 1)
    lowered: list[Action] = [recv for recvs in posts[:ahead] for recv in recvs]
    for index, action in enumerate(compute):
        if index + ahead < len(posts):
            lowered += posts[index + ahead]
        lowered += shares_before(graph, action)
        lowered.append(action)
        lowered += sends_after(graph, rank, action)
        for unit in units:
            if last_backward.get(unit) != index:
                continue
            if unit == LLM and holds_shared_embeddings(graph, rank):
                # Before the reduction: after it each replica holds only its own shard of the gradient.
                lowered.append(ReduceShared(EMBEDDINGS))
            lowered.append(ReduceGrads(unit))
    return [*lowered, Step(), *(GatherParams(unit) for unit in units)]


def _backward_units(graph: StageGraph, task: ComputeTask) -> set[str]:
    """Return the units to whose gradients the task adds."""
    return {part.stage.unit for part in expand(graph, task) if direction(part) == "B"}
