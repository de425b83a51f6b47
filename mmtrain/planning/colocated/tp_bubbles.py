"""The last step of the bubble schedule: pieces of encoder layers in the gaps inside the LLM's layers.

In the coarse order, encoders run before and after the LLM's work. Then their layers go into its pipeline's bubbles.
Here pieces of these layers run during the LLM's tensor-parallel collectives (Optimus, arXiv 2408.03505, section 4.3).
"""

import math
from collections.abc import Sequence

from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.planning.artifact.plan_graph import split_into_pieces
from mmtrain.planning.colocated.encoder_order import max_ahead_choices, plan_encoder_order
from mmtrain.planning.colocated.llm_alone import simulate_llm_alone
from mmtrain.planning.colocated.stage_kernels import compute_share
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_partition import layout_graph
from mmtrain.planning.space.candidate import Candidate
from mmtrain.program.ir.graph import LLM


def fill_tp_bubbles(
    candidates: Sequence[Candidate], evaluator: Evaluator, rival_s: float = math.inf
) -> tuple[Candidate, ...]:
    """Return the candidates, those whose LLM leaves gaps with orders in pieces where these are faster and fit.

    The LLM leaves gaps where it has tensor parallelism and the costs say that a collective does not take all of the
    rank. Candidates that would be slower than the fastest so far even without the gaps stay as they are.

    rival_s: the step time of the fastest candidate of other placements.
    """
    if not candidates or not evaluator.budget.colocated.fills_tp_bubbles:
        return tuple(candidates)
    by_step_time = sorted(candidates, key=lambda candidate: candidate.step_time_s)
    fastest_s = min(by_step_time[0].step_time_s, rival_s)
    in_pieces: dict[int, Candidate] = {}
    for candidate in by_step_time:
        llm_load = evaluator.layer_costs.loads.of_unit(LLM, candidate.assignment.batch_split).mean()
        llm_compute_share = compute_share(evaluator.layer_costs, LLM, candidate.layout.units[LLM].tp, llm_load)
        without_gaps_s = max(candidate.time_lower_bound_s, candidate.step_time_s * llm_compute_share)
        if llm_compute_share == 1 or without_gaps_s >= fastest_s:
            continue
        in_pieces[candidate.id] = _with_pieces(candidate, evaluator, fastest_s)
        fastest_s = min(fastest_s, in_pieces[candidate.id].step_time_s)
    return tuple(in_pieces.get(candidate.id, candidate) for candidate in candidates)


def _with_pieces(candidate: Candidate, evaluator: Evaluator, fastest_s: float) -> Candidate:
    """Return the candidate with pieces in the LLM's gaps where that is faster and fits, else as it is."""
    layer_costs, hardware = evaluator.layer_costs, evaluator.problem.hardware
    layout = candidate.layout
    graph = layout_graph(layout, layer_costs)
    llm_alone = simulate_llm_alone(graph, layer_costs, hardware)
    if llm_alone.step_time_s >= fastest_s:
        return candidate
    with_sp = [mesh.unit for mesh in graph.meshes if layer_costs.has_sp(mesh.unit, mesh.tp)]
    pieces = split_into_pieces(graph, layer_costs.shape, with_sp)
    for max_ahead in max_ahead_choices(layout.units[LLM].pp):
        schedule = SchedulePlan(
            kind="explicit",
            num_microbatches=dict(layout.num_microbatches),
            order=plan_encoder_order(pieces, layer_costs, hardware, max_ahead=max_ahead, llm_alone=llm_alone),
            pieces=True,
        )
        fitted = evaluator.fit_schedule(candidate, layout, schedule)
        if isinstance(fitted, Candidate):
            simulated = evaluator.simulate_unless_slow(fitted, candidate.first_batch_step_s)
            if simulated is None or simulated.step_time_s >= candidate.step_time_s:
                return candidate
            return simulated
    return candidate
