"""Waiting for collectives inside layers is a bubble of its own, in plans as in simulated steps."""

import pytest

from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.planning.evaluate.layout_simulation import _CandidateProgram, scheduled_graph
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.program import simulate
from tests.planning.factory import anchor_layout, problem_for, recipe
from tests.plans import mesh_assignments

WIDE = {"hidden": 2048, "heads": 16, "ffn": 8192}


def bubbles_of(tp: int) -> tuple[float, float]:
    """Return the share of waiting inside layers as a plan states it, and as the timing of every microbatch has it."""
    problem = problem_for(recipe(vision=None, llm=WIDE, seq_len=2048, global_batch=8), "h100-80g")
    layer_costs = LayerCosts(problem)
    assignment = next(a for a in mesh_assignments(problem.choices, 4) if a.meshes["llm"].tp == tp)
    layout = anchor_layout(assignment, layer_costs, problem.choices)
    assert layout is not None
    schedule = SchedulePlan(num_microbatches=dict(layout.num_microbatches))
    graph = scheduled_graph(layout, schedule, layer_costs)
    budget = layer_costs.budget.evaluation
    candidate = _CandidateProgram.build(graph, schedule, layer_costs, problem.hardware, budget)
    timeline = candidate.simulate(0)
    exact = simulate(candidate.program, candidate.timings.of_batch(0).model, candidate.num_groups)
    return timeline.bubble_shares()["tp_layers"], exact.bubble_shares()["tp_layers"]


def test_a_plan_counts_what_ranks_wait_inside_layers_as_every_microbatch_has_it() -> None:
    waiting, exact = bubbles_of(tp=4)
    assert 0.05 < waiting < 0.8
    assert waiting == pytest.approx(exact, rel=0.05)


def test_without_tensor_parallelism_nothing_waits_inside_layers() -> None:
    assert bubbles_of(tp=1) == (0.0, 0.0)
