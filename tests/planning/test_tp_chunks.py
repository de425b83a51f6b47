"""Linears run in chunks of tokens where that hides more communication than it costs, or where the recipe says so."""

from dataclasses import replace

import pytest

from mmtrain.costs import AnalyticCosts
from mmtrain.planning import Plan
from mmtrain.planning.artifact.plan_difference import plan_differences
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.token_splits import CHUNK_COUNTS, choose_tp_chunks, with_token_splits
from tests.planning.factory import anchor_layout, lengths, problem_for, recipe, simulated
from tests.plans import mesh_assignments, plan_recipe

WIDE = {"hidden": 8192, "heads": 64, "ffn": 32768}


def planned(tp_overlap: object, hardware: str = "cpu-core") -> Plan:
    parallel = {
        "placement": "unified",
        "vision": {"sp": False, "recompute": "none"},
        "llm": {"tp": 2, "dp": 1, "sp": False, "recompute": "none", "tp_overlap": tp_overlap},
    }
    return plan_recipe(recipe(parallel=parallel), lengths(), world_size=2, hardware=hardware, recipe_sha256="f" * 64)


def test_on_processor_cores_which_compute_nothing_beside_a_collective_there_are_no_chunks() -> None:
    plan = planned("auto")
    assert {unit.tp_chunks for unit in plan.units.values()} == {1}
    assert [difference.part for difference in plan_differences(plan, planned(False))] == ["setting"]


def test_the_recipe_may_demand_chunks_and_the_prediction_knows_what_they_cost() -> None:
    plan = planned(True)
    assert plan.units["llm"].tp_chunks in CHUNK_COUNTS
    assert plan.units["vision"].tp_chunks == 1
    assert plan.predicted.step_time_s > planned(False).predicted.step_time_s
    assert Plan.model_validate_json(plan.file_text()) == plan


def test_many_tokens_of_a_wide_model_run_in_chunks_on_gpus_and_plans_are_faster_for_it() -> None:
    problem = problem_for(recipe(llm=WIDE, seq_len=8192, global_batch=2), "h100-80g")
    chosen = with_token_splits(problem, LayerCosts(problem))
    whole = chosen.with_settings(chunks={})
    assert chosen.num_chunks("llm", 4) in CHUNK_COUNTS
    assert chosen.num_chunks("llm", 1) == 1
    unhidden, overlapping = (Evaluator(problem, layer_costs=costs) for costs in (whole, chosen))
    compared = 0
    for assignment in mesh_assignments(problem.choices, 4):
        layouts = [anchor_layout(assignment, costs, problem.choices) for costs in (whole, chosen)]
        if layouts[0] is None or layouts[1] is None or assignment.meshes["llm"].tp < 4:
            continue
        compared += 1
        hidden, waiting = simulated(layouts[1], overlapping), simulated(layouts[0], unhidden)
        assert hidden.step_time_s < waiting.step_time_s
        assert 0 < hidden.bubbles["tp_layers"] < 0.75 * waiting.bubbles["tp_layers"]
    assert compared


def test_the_number_of_chunks_is_the_fastest_of_a_microbatch() -> None:
    problem = problem_for(recipe(llm=WIDE, seq_len=8192, global_batch=2), "h100-80g")
    starting_nothing = replace(problem.hardware, kernel_launch_s=0.0, collective_start_s=0.0, half_efficiency_side=0.0)
    free = replace(problem, costs=AnalyticCosts(replace(starting_nothing, num_multiprocessors=0), "bf16"))
    slow_starts = replace(problem.hardware, collective_start_s=1e-3)
    slow = replace(problem, costs=AnalyticCosts(slow_starts, "bf16"))
    most, fewest = (choose_tp_chunks(p, LayerCosts(p)).get("llm", {}).get(2, 1) for p in (free, slow))
    assert most == max(CHUNK_COUNTS)
    assert fewest < most


def test_chunks_without_tensor_parallelism_are_rejected_by_name() -> None:
    with pytest.raises(ValueError, match="tp_chunks is 2 with tp 1"):
        Plan.model_validate(planned("auto").model_dump() | {"units": _with_chunks_on_one_rank()})


def _with_chunks_on_one_rank() -> dict[str, object]:
    units = {name: unit.model_dump() for name, unit in planned("auto").units.items()}
    units["llm"] |= {"tp": 1, "dp": 2, "tp_chunks": 2}
    return units
