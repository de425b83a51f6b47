"""Plans of runs whose linears Muon trains: memory, seconds, and what is printed."""

from typing import Any

import pytest

from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_partition import layer_chains, partitioned_layout
from mmtrain.planning.planner import plan
from mmtrain.program.simulation.muon_timing import muon_seconds
from mmtrain.recipe import Recipe
from mmtrain.report.plan_view import plan_table
from tests.planning import factory
from tests.plans import mesh_assignments

GPT = {"layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 8192, "vocab": 32_000}


def with_optimizer(settings: Recipe, **changes: Any) -> Recipe:
    optimizer = settings.train.optimizer.model_copy(update=changes)
    return settings.model_copy(update={"train": settings.train.model_copy(update={"optimizer": optimizer})})


def gpt(kind: str, **llm: Any) -> Recipe:
    parallel = {"placement": "unified", "llm": {"tp": 2, "vpp": 1, **llm}}
    recipe = factory.recipe(vision=None, llm=GPT, parallel=parallel, global_batch=16, seq_len=4096)
    return with_optimizer(recipe, kind=kind)


def predicted(kind: str, **llm: Any) -> tuple[float, float, float]:
    """Return the estimated and the simulated seconds of a step, and those of Muon in it."""
    evaluator = Evaluator(factory.problem_for(gpt(kind, **llm), "h100-80g", 16))
    [assignment] = mesh_assignments(evaluator.problem.choices, 16)
    chains = layer_chains(assignment, evaluator.layer_costs, evaluator.problem.choices)
    partition = tuple(chain.anchor for chain in chains)
    [estimate_s] = evaluator.estimator(None).estimate(assignment, chains, [partition], [None] * len(chains))
    layer_costs = evaluator.layer_costs
    candidate = factory.simulated(partitioned_layout(assignment, layer_costs, partition), evaluator)
    of_ranks = muon_seconds(candidate.graph, layer_costs.shape, layer_costs.costs, layer_costs.precision, 8)
    return estimate_s, candidate.step_time_s, max(of_ranks.values())


@pytest.mark.parametrize("llm", [{"pp": 1}, {"pp": 2}, {"pp": 2, "vpp": 2}], ids=str)
def test_a_step_is_longer_by_what_muon_takes_in_the_estimate_as_in_the_simulation(llm: dict[str, Any]) -> None:
    _, adam_s, _ = predicted("adamw", **llm)
    estimate_s, muon_step_s, muon_s = predicted("muon", **llm)
    assert muon_s > 0
    # Ranks whose AdamW takes longest, with the vocabulary, have less to orthogonalize.
    assert adam_s + 0.5 * muon_s < muon_step_s <= adam_s + muon_s * (1 + 1e-9)
    assert muon_step_s * 0.97 <= estimate_s <= muon_step_s * (1 + 1e-9)


def test_plans_state_what_muon_takes_and_that_its_state_is_smaller() -> None:
    plans = {kind: plan(factory.problem_for(gpt(kind), "h100-80g", 4)) for kind in ("adamw", "muon")}
    adam, muon = (made.predicted for made in plans.values())
    assert adam.muon_s is None
    assert muon.muon_s is not None
    assert 0 < muon.muon_s < muon.step_time_s
    optimizer_gib = [max(kinds["optimizer"] for kinds in p.memory_kinds_gib.values()) for p in (adam, muon)]
    assert optimizer_gib[1] < 0.85 * optimizer_gib[0]
    assert "Muon moves and orthogonalizes matrices for" in plan_table(plans["muon"], width=200)
    assert "Muon" not in plan_table(plans["adamw"], width=200)
