"""Lowering: from compute actions to a program a runtime can execute."""

from collections.abc import Sequence

from mmtrain.program.actions import Action, Backward, Forward, GatherParams, Recv, ReduceGrads, ReduceShared, Step
from mmtrain.program.channels import in_channel_order
from mmtrain.program.graph import LLM, StageGraph
from mmtrain.program.program import Program
from mmtrain.program.wiring import EMBEDDINGS, holds_shared_embeddings, receives, sends, shares, trained_units


def lower(program: Program) -> Program:
    """Insert communication into a program of compute actions.

    A receive is posted one compute action ahead of its consumer, so that the transfer overlaps with compute; a send
    starts right after its producer; a lane shares right before the consumer. Gradients of a unit are reduced after
    its last backward on the rank, shared weights just before; then the optimizer step and the gathering of parameters.
    """
    graph = program.graph
    return Program(graph, in_channel_order({r: _lower_rank(graph, r, todo) for r, todo in program.actions.items()}))


def _lower_rank(graph: StageGraph, rank: int, actions: Sequence[Action]) -> list[Action]:
    compute = [a for a in actions if isinstance(a, Forward | Backward)]
    posts: list[list[Recv]] = [receives(graph, rank, action) for action in compute] + [[]]
    units = trained_units(graph, rank)
    last = {a.stage.unit: at for at, a in enumerate(compute) if isinstance(a, Backward)}
    out: list[Action] = [*posts[0]]
    for at, action in enumerate(compute):
        out += posts[at + 1]
        out += shares(graph, action)
        out.append(action)
        out += sends(graph, rank, action)
        for unit in units:
            if last[unit] == at:
                # Before the reduction, after which each replica holds only its own shard of the gradient.
                out += [ReduceShared(EMBEDDINGS)] if unit == LLM and holds_shared_embeddings(graph, rank) else []
                out.append(ReduceGrads(unit))
    return [*out, Step(), *(GatherParams(unit) for unit in units)]
