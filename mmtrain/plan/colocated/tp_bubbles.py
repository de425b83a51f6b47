"""Put pieces of encoder layers into the gaps inside the LLM's layers: the last and finest step of bubble scheduling.

A coarse schedule runs encoders before and after the LLM. A planned order puts their layers into the bubbles of the
LLM's pipeline. Here, for the few fastest layouts, pieces of these layers run while the LLM's tensor-parallel ranks
communicate (the TP bubbles of Optimus, arXiv 2408.03505).
"""

from collections.abc import Sequence

from mmtrain.costs import Hardware
from mmtrain.plan.artifact.plan import SchedulePlan
from mmtrain.plan.artifact.plan_graph import split_into_pieces
from mmtrain.plan.colocated.encoder_order import max_ahead_choices, plan_encoder_order
from mmtrain.plan.colocated.llm_alone import simulate_llm_alone
from mmtrain.plan.estimate.evaluate import Candidate, evaluate_layout, schedule_memory
from mmtrain.plan.estimate.layer_costs import LayerCosts
from mmtrain.plan.search.layer_partition import layout_graph
from mmtrain.program.ir.graph import LLM

MAX_LAYOUTS_IN_PIECES = 2  # layouts whose orders are also planned in pieces, the fastest first


def overlaps_collectives(machine: Hardware) -> bool:
    """Return whether ranks of this hardware compute at full speed while they communicate.

    gloo communicates on the core that computes.
    """
    return machine.name != "cpu-core"


def fill_tp_bubbles(
    candidates: Sequence[Candidate], layer_costs: LayerCosts, machine: Hardware, fastest: float
) -> tuple[Candidate, ...]:
    """Replace the orders of the fastest few candidates by orders in pieces that are faster and fit.

    Args:
        candidates: colocated candidates with orders of layers.
        layer_costs: costs of the model on the sampled batches.
        machine: the hardware.
        fastest: step time of the fastest plan of other placements; a candidate whose LLM alone takes as long is kept as
            it is.
    """
    if not overlaps_collectives(machine):
        return tuple(candidates)
    with_tp = [i for i, candidate in enumerate(candidates) if candidate.layout.units[LLM].tp > 1]
    selected = sorted(with_tp, key=lambda i: candidates[i].step_time_s)[:MAX_LAYOUTS_IN_PIECES]
    return tuple(
        _with_pieces(candidate, layer_costs, machine, fastest) if i in selected else candidate
        for i, candidate in enumerate(candidates)
    )


def _with_pieces(candidate: Candidate, layer_costs: LayerCosts, machine: Hardware, fastest: float) -> Candidate:
    """Return the candidate with an order in pieces where that is faster and fits, else unchanged."""
    by_layer = layout_graph(candidate.layout, layer_costs)
    llm_alone = simulate_llm_alone(by_layer, layer_costs, machine)
    if llm_alone.step_time_s >= fastest:
        return candidate
    with_sp = [mesh.unit for mesh in by_layer.meshes if layer_costs.has_sp(mesh.unit, mesh.tp)]
    by_piece = split_into_pieces(by_layer, layer_costs.shape, with_sp)
    for max_ahead in max_ahead_choices(candidate.layout.units[LLM].pp):
        schedule = SchedulePlan(
            kind="explicit",
            num_microbatches=dict(candidate.layout.num_microbatches),
            order=plan_encoder_order(by_piece, layer_costs, machine, max_ahead=max_ahead, llm_alone=llm_alone),
            pieces=True,
        )
        memory = schedule_memory(by_piece, schedule, layer_costs)
        if max(rank.total for rank in memory.values()) <= machine.memory_bytes:
            in_pieces = evaluate_layout(candidate.layout, layer_costs, machine, schedule)
            return in_pieces if in_pieces.step_time_s < candidate.step_time_s else candidate
    return candidate
