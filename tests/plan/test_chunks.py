"""Chunks of encoders on ranks of their own, and of all units where the recipe fixes them."""

import math
from typing import Any

import pytest

from mmtrain.costs import machine_for
from mmtrain.plan import Plan
from mmtrain.plan.estimate.time_lower_bound import unit_time_bound
from mmtrain.plan.planner import plan
from mmtrain.plan.search.best_first_search import best_first_search
from mmtrain.plan.search.mesh_enumeration import bounded_mesh_assignments, mesh_assignments
from tests.plan.exhaustive import Instance, everything
from tests.plan.factory import VISION, layer_costs_for, lengths, recipe

DEEP: dict[str, Any] = {**VISION, "layers": 8, "hidden": 256, "ffn": 1024}
OWN: dict[str, Any] = {"tp": 1, "pp": 2, "dp": 1}


def planned(vision: dict[str, Any], world_size: int = 3) -> Plan:
    parallel = {"placement": "disaggregated", "vision": vision, "llm": {"tp": 1, "dp": 1, "vpp": 1}}
    settings = recipe(vision=DEEP, global_batch=4, parallel=parallel)
    return plan(settings, lengths(), world_size=world_size, hardware="cpu-core", recipe_sha256="f" * 64)


def test_a_deep_encoder_fills_its_pipeline_sooner_in_chunks() -> None:
    chosen = planned(OWN)
    assert chosen.units["vision"].vpp == 2
    assert [s.chunk for s in chosen.units["vision"].stages] == [0, 0, 1, 1]
    assert chosen.predicted.step_time_s < 0.99 * planned({**OWN, "vpp": 1}).predicted.step_time_s


def test_chunks_are_few_and_even() -> None:
    settings = recipe(vision={**VISION, "layers": 8})
    _, choices = layer_costs_for(settings)
    found = list(mesh_assignments(choices, 8))
    apart = {(s.meshes["vision"].pp, s.meshes["vision"].vpp) for s in found if s.placement == "disaggregated"}
    assert {(pp, vpp) for pp, vpp in apart if vpp > 1} == {(2, 2), (4, 2)}
    assert len(set(map(str, found))) == len(found)
    for assignment in found:
        size = assignment.meshes["vision"]
        if assignment.placement == "disaggregated" and size.vpp > 1:
            assert assignment.num_microbatches["vision"] >= size.pp


@pytest.mark.parametrize(("vision", "found"), [({**VISION, "layers": 4, "hidden": 32}, {1}), (DEEP, {1, 2})])
def test_among_many_sizes_only_pipelines_that_take_long_to_fill_have_chunks(
    vision: dict[str, Any], found: set[int]
) -> None:
    wide = {"layers": 24, "hidden": 1024, "ffn": 4096}
    settings = recipe(vision=vision, llm=wide, parallel={"placement": "disaggregated", "vision": OWN})
    layer_costs, choices = layer_costs_for(settings)
    bound = unit_time_bound(layer_costs, choices, machine_for(settings, "cpu-core"))
    apart = [s for _, s in bounded_mesh_assignments(choices, 12, bound) if s.placement == "disaggregated"]
    assert {s.meshes["vision"].vpp for s in apart} == found


def test_the_best_of_all_chunks_is_found() -> None:
    """Against every cut of every size simulated, encoders in one chunk and in two."""
    parallel = {"placement": "disaggregated", "vision": OWN, "llm": {"tp": 1, "dp": 1, "pp": 1}}
    settings = recipe(vision={**DEEP, "layers": 4}, llm={"layers": 2}, global_batch=4, parallel=parallel)
    layer_costs, choices = layer_costs_for(settings)
    machine = machine_for(settings, "cpu-core")
    given = Instance(
        layer_costs,
        choices,
        machine,
        [(b, s) for b, s in bounded_mesh_assignments(choices, 3) if s.meshes["llm"].pp == 1],
    )
    assert {s.meshes["vision"].vpp for _, s in given.assignments if s.placement == "disaggregated"} == {1, 2}
    best = min(judged.step_time_s for judged in everything(given))
    found = best_first_search(given.assignments, layer_costs, choices, machine, at_least=1)
    assert math.isclose(found.candidates[0].step_time_s, best, rel_tol=1e-3)


@pytest.mark.parametrize(
    ("placement", "parallel", "world_size", "found"),
    [
        ("colocated", {"llm": {"pp": 2, "vpp": 3}}, 2, {"llm": 3}),
        ("colocated", {"llm": {"pp": 2, "vpp": 1}}, 2, {"llm": 1}),
        ("unified", {"vision": {"vpp": 2}, "llm": {"dp": 1, "tp": 1}}, 2, {"llm": 2}),
        ("disaggregated", {"vision": {"pp": 2, "vpp": 2}}, 3, {"vision": 2}),
        ("auto", {"vision": {"pp": 2, "vpp": 2, "dp": 1, "tp": 1}}, 3, {"vision": 2}),
    ],
)
def test_fixed_chunks_are_honoured(
    placement: str, parallel: dict[str, Any], world_size: int, found: dict[str, int]
) -> None:
    settings = recipe(parallel={"placement": placement, **parallel})
    chosen = plan(settings, lengths(), world_size=world_size, hardware="cpu-core", recipe_sha256="f" * 64)
    assert placement in ("auto", chosen.placement)
    assert {unit: chosen.units[unit].vpp for unit in found} == found
