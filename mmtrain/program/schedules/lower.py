"""Lowering: from compute actions to a program a runtime can execute."""

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

RECV_LOOKAHEAD_PIECES = 32  # actions by which a receive is posted ahead where they may be pieces: those of a few layers


def lower(program: Program, reduce_last: bool = False) -> Program:
    """Insert communication into a program of compute actions.

    A receive is posted one compute action ahead of its consumer, or where layers are cut several pieces ahead, so that
    the transfer overlaps with compute; a send starts right after its producer; a TP group shares right before the
    consumer. Gradients of a unit are reduced after its last backward on the rank, shared weights just before; then
    the optimizer step and the gathering of parameters.

    `reduce_last`: gradients of all units are reduced after all compute, in one order everywhere. Then nothing is hidden
    beside other units' compute, but no order of compute makes two ranks wait for each other's reductions either.
    """
    graph, actions = program.graph, program.actions
    return Program(
        graph, order_receives({rank: _lower_rank(graph, rank, todo, reduce_last) for rank, todo in actions.items()})
    )


def _lower_rank(graph: StageGraph, rank: int, actions: Sequence[Action], reduce_last: bool) -> list[Action]:
    compute = [a for a in actions if isinstance(a, ComputeTask)]
    ahead = RECV_LOOKAHEAD_PIECES if any(stage.pieces for stage in graph.stages) else 1
    posts: list[list[Recv]] = [recvs_before(graph, rank, action) for action in compute]
    units = trained_units(graph, rank)
    last = {unit: at for at, task in enumerate(compute) for unit in _backward_units(graph, task)}
    if reduce_last:
        last = dict.fromkeys(last, len(compute) - 1)
    out: list[Action] = [recv for early in posts[:ahead] for recv in early]
    for at, action in enumerate(compute):
        out += posts[at + ahead] if at + ahead < len(posts) else ()
        out += shares_before(graph, action)
        out.append(action)
        out += sends_after(graph, rank, action)
        for unit in units:
            if last.get(unit) == at:
                # Before the reduction, after which each replica holds only its own shard of the gradient.
                out += [ReduceShared(EMBEDDINGS)] if unit == LLM and holds_shared_embeddings(graph, rank) else []
                out.append(ReduceGrads(unit))
    return [*out, Step(), *(GatherParams(unit) for unit in units)]


def _backward_units(graph: StageGraph, task: ComputeTask) -> set[str]:
    """Units on whose gradients the task works."""
    return {part.stage.unit for part in expand(graph, task) if direction(part) == "B"}
