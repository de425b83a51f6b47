"""The last step of the bubble schedule: pieces of encoder layers into the gaps inside the LLM's layers.

Coarse, the encoders lie around the LLM's work; then their layers go into its pipeline's bubbles; and here, for the few
fastest layouts, pieces of these layers beside its tensor-parallel collectives (Optimus, arXiv 2408.03505, section 4.3).
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

MAX_LAYOUTS_IN_PIECES = 2  # layouts, the fastest first


def overlaps_collectives(machine: Hardware) -> bool:
    """Whether ranks of this hardware compute at full speed while they communicate: gloo takes the core for it."""
    return machine.name != "cpu-core"


def fill_tp_bubbles(
    candidates: Sequence[Candidate], layer_costs: LayerCosts, machine: Hardware, fastest: float
) -> tuple[Candidate, ...]:
    """The candidates, of which the fastest few are replaced by orders in pieces that are faster and fit.

    fastest: seconds of a step that is known; candidates whose LLM alone takes as long stay as they are.
    """
    if not overlaps_collectives(machine):
        return tuple(candidates)
    ranked = sorted(candidates, key=lambda one: one.step_time_s)
    first = [id(one) for one in ranked if one.layout.units[LLM].tp > 1][:MAX_LAYOUTS_IN_PIECES]
    return tuple(_with_pieces(one, layer_costs, machine, fastest) if id(one) in first else one for one in candidates)


def _with_pieces(judged: Candidate, layer_costs: LayerCosts, machine: Hardware, fastest: float) -> Candidate:
    """The candidate with pieces in gaps where that is faster and fits, else as it is."""
    whole = layout_graph(judged.layout, layer_costs)
    alone = simulate_llm_alone(whole, layer_costs, machine)
    if alone.step_time_s >= fastest:
        return judged
    graph = split_into_pieces(
        whole, layer_costs.shape, [m.unit for m in whole.meshes if layer_costs.has_sp(m.unit, m.tp)]
    )
    for max_ahead in max_ahead_choices(judged.layout.units[LLM].pp):
        schedule = SchedulePlan(
            kind="explicit",
            num_microbatches=dict(judged.layout.num_microbatches),
            order=plan_encoder_order(graph, layer_costs, machine, max_ahead=max_ahead, llm_alone=alone),
            pieces=True,
        )
        memory = schedule_memory(graph, schedule, layer_costs)
        if max(held.total for held in memory.values()) <= machine.memory_bytes:
            found = evaluate_layout(judged.layout, layer_costs, machine, schedule)
            return found if found.step_time_s < judged.step_time_s else judged
    return judged
