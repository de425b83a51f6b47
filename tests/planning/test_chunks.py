"""Model chunks of encoders on separate ranks, and of all units where the recipe fixes their number."""

import math
from typing import Any

import pytest

from mmtrain.errors import PlanError
from mmtrain.planning import Plan
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.search.strategies import allocate_ranks
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from tests.planning.exhaustive import Instance, all_candidates, everything, fastest_found
from tests.planning.factory import VISION, evaluator_for, lengths, problem_for, recipe
from tests.plans import mesh_assignments, plan_recipe

DEEP: dict[str, Any] = {**VISION, "layers": 8, "hidden": 256, "ffn": 1024}
OWN: dict[str, Any] = {"tp": 1, "pp": 2, "dp": 1}


def planned(vision: dict[str, Any], world_size: int = 3) -> Plan:
    parallel = {"placement": "disaggregated", "vision": vision, "llm": {"tp": 1, "dp": 1, "vpp": 1}}
    settings = recipe(vision=DEEP, global_batch=4, parallel=parallel)
    return plan_recipe(settings, lengths(), world_size=world_size, hardware="cpu-core", recipe_sha256="f" * 64)


def planned_here(parallel: dict[str, Any], world_size: int) -> Plan:
    settings = recipe(parallel=parallel)
    return plan_recipe(settings, lengths(), world_size=world_size, hardware="cpu-core", recipe_sha256="f" * 64)


def test_a_deep_encoder_fills_its_pipeline_sooner_in_chunks() -> None:
    chosen = planned(OWN)
    assert chosen.units["vision"].vpp == 2
    assert [s.chunk for s in chosen.units["vision"].stages] == [0, 0, 1, 1]
    assert chosen.predicted.step_time_s < 0.99 * planned({**OWN, "vpp": 1}).predicted.step_time_s


def test_encoders_are_divided_into_few_equal_chunks() -> None:
    settings = recipe(vision={**VISION, "layers": 8})
    assignments = list(mesh_assignments(problem_for(settings).choices, 8))
    apart = {(s.meshes["vision"].pp, s.meshes["vision"].vpp) for s in assignments if s.placement == "disaggregated"}
    assert {(pp, vpp) for pp, vpp in apart if vpp > 1} == {(2, 2), (4, 2)}
    assert len(set(map(str, assignments))) == len(assignments)
    for assignment in assignments:
        size = assignment.meshes["vision"]
        if assignment.placement == "disaggregated" and size.vpp > 1:
            assert assignment.num_microbatches["vision"] >= size.pp


@pytest.mark.parametrize(("vision", "expected"), [({**VISION, "layers": 4, "hidden": 32}, {1}), (DEEP, {1, 2})])
def test_on_large_clusters_only_pipelines_that_take_long_to_fill_have_chunks(
    vision: dict[str, Any], expected: set[int]
) -> None:
    wide = {"layers": 24, "hidden": 1024, "ffn": 4096}
    settings = recipe(vision=vision, llm=wide, parallel={"placement": "disaggregated", "vision": OWN})
    evaluator = Evaluator(problem_for(settings, world_size=12))
    _, apart, *_ = allocate_ranks(evaluator, DEFAULT_BUDGET)
    assert {candidate.assignment.meshes["vision"].vpp for _, candidate in apart} == expected


def test_the_search_finds_the_best_number_of_chunks() -> None:
    """Compare with a simulation of every partition of every mesh, with encoders in one chunk and in two."""
    parallel = {"placement": "disaggregated", "vision": OWN, "llm": {"tp": 1, "dp": 1, "pp": 1}}
    settings = recipe(vision={**DEEP, "layers": 4}, llm={"layers": 2}, global_batch=4, parallel=parallel)
    evaluator = evaluator_for(settings)
    candidates = [c for c in all_candidates(evaluator, 3) if c.assignment.meshes["llm"].pp == 1]
    instance = Instance(evaluator, candidates)
    apart = [c.assignment for c in candidates if c.placement == "disaggregated"]
    assert {assignment.meshes["vision"].vpp for assignment in apart} == {1, 2}
    best = min(candidate.step_time_s for candidate in everything(instance))
    assert math.isclose(fastest_found(instance), best, rel_tol=1e-3)


@pytest.mark.parametrize("vision_pp", [None, 1])
def test_an_interleaved_llm_of_fixed_pp_lies_on_all_ranks_in_every_round_behind_its_encoder(
    vision_pp: int | None,
) -> None:
    """As in Megatron-LM, where pp and vpp divide the LLM and an encoder lies in the first chunk."""
    llm = {"tp": 1, "pp": 2, "vpp": 2, "dp": 2}
    chosen = planned_here({"placement": "unified", "llm": llm, "vision": {"pp": vision_pp}}, 4)
    unit = chosen.units["llm"]
    assert (unit.tp, unit.pp, unit.vpp, unit.dp) == (1, 2, 2, 2)
    assert len(unit.stages) == 4
    assert len(chosen.units["vision"].stages) == 1


def test_an_encoder_cannot_lie_on_all_ranks_in_every_round_too() -> None:
    parallel = {"placement": "unified", "llm": {"tp": 1, "pp": 2, "vpp": 2, "dp": 2}, "vision": {"pp": 2}}
    with pytest.raises(PlanError, match="contradict each other"):
        planned_here(parallel, 4)


@pytest.mark.parametrize(
    ("placement", "parallel", "world_size", "expected"),
    [
        ("colocated", {"llm": {"pp": 2, "vpp": 3}}, 2, {"llm": 3}),
        ("colocated", {"llm": {"pp": 2, "vpp": 1}}, 2, {"llm": 1}),
        ("unified", {"vision": {"vpp": 2}, "llm": {"dp": 1, "tp": 1}}, 2, {"llm": 2}),
        ("disaggregated", {"vision": {"pp": 2, "vpp": 2}}, 3, {"vision": 2}),
        ("auto", {"vision": {"pp": 2, "vpp": 2, "dp": 1, "tp": 1}}, 3, {"vision": 2}),
    ],
)
def test_a_fixed_number_of_chunks_is_used(
    placement: str, parallel: dict[str, Any], world_size: int, expected: dict[str, int]
) -> None:
    settings = recipe(parallel={"placement": placement, **parallel})
    chosen = plan_recipe(settings, lengths(), world_size=world_size, hardware="cpu-core", recipe_sha256="f" * 64)
    assert placement in ("auto", chosen.placement)
    assert {unit: chosen.units[unit].vpp for unit in expected} == expected
