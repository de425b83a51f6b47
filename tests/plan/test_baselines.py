"""Baselines: each is what its name says, simulated like any plan, and none stands before what was planned."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmtrain.costs import machine_for, model_flops
from mmtrain.errors import PlanError
from mmtrain.models.model_shape import build_model_shape
from mmtrain.plan import Plan, stage_graph
from mmtrain.plan.estimate.evaluate import evaluate_layout
from mmtrain.plan.estimate.layer_costs import FORWARD
from mmtrain.plan.estimate.time_lower_bound import unit_time_bound
from mmtrain.plan.explain.baselines import BASELINES, FLOPS_BASELINE, PARTITION_RULES, BaselinePlanner
from mmtrain.plan.planner import plan
from mmtrain.plan.search.best_first_search import EQUAL_STEP_TIME_RATIO, SearchResults, best_first_search
from mmtrain.plan.search.layer_partition import FloatArray, LayerChain, chunk_seconds, layer_chains
from mmtrain.plan.search.mesh_enumeration import bounded_mesh_assignments, mesh_assignments
from mmtrain.program import build_program
from mmtrain.recipe.schema import Recipe
from tests.plan.factory import VISION, layer_costs_for, lengths, recipe

SMALL: dict[str, Any] = {"llm": {"layers": 2}, "vision": {"layers": 1, "hidden": 96, "heads": 4, "ffn": 256}}


def chain(pp: int, **vision: Any) -> tuple[LayerChain, FloatArray]:
    """A pipeline of 5 + 8 layers, and what their forwards take."""
    layer_costs, choices = layer_costs_for(recipe(llm={"layers": 6}, vision=VISION | vision))
    assignment = next(s for s in mesh_assignments(choices, pp) if str(s) == f"unified: tp1 pp{pp} dp1")
    forward = [layer_costs.unit_times(name, 1, assignment.batch_split).mean[:, FORWARD] for name in ("vision", "llm")]
    return layer_chains(assignment, layer_costs, choices)[0], np.concatenate(forward)


def folklore(settings: Recipe, world_size: int, hardware: str = "cpu-core") -> BaselinePlanner:
    layer_costs, choices = layer_costs_for(settings, hardware)
    machine = machine_for(settings, hardware)
    bound = unit_time_bound(layer_costs, choices, machine)
    return BaselinePlanner(list(bounded_mesh_assignments(choices, world_size, bound)), layer_costs, choices, machine)


def planned(settings: Recipe, world_size: int, **asked: Any) -> Plan:
    return plan(settings, lengths(), world_size=world_size, hardware="cpu-core", recipe_sha256="", **asked)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("megatron", (0, 7, 9, 11, 13)), ("megatron-extra", (0, 5, 8, 10, 13)), ("equal-layers", (0, 3, 6, 9, 13))],
)
def test_layers_lie_where_the_rule_says(name: str, expected: tuple[int, ...]) -> None:
    found = PARTITION_RULES[name](*chain(4))
    assert found is not None
    assert sorted(np.diff(found)) == sorted(np.diff(expected))
    assert (found[0], found[-1]) == (0, 13)


def test_each_rule_evens_out_what_its_name_says() -> None:
    one, forward = chain(3, freeze=True)  # no backward: a profile of forwards takes it for dearer than it is
    cuts = {name: rule(one, forward) for name, rule in PARTITION_RULES.items()}
    of_forward = np.concatenate([[0.0], np.cumsum(forward)])

    def slowest(found: tuple[int, ...] | None) -> float:
        return float(chunk_seconds(one, np.asarray([found])).max())

    def slowest_forward(found: tuple[int, ...] | None) -> float:
        return float(np.diff(of_forward[list(found or ())]).max())

    assert slowest(cuts["balanced"]) == min(map(slowest, cuts.values()))
    assert slowest_forward(cuts["profile-only"]) == min(map(slowest_forward, cuts.values()))
    assert cuts["profile-only"] != cuts["balanced"]


@pytest.mark.parametrize("world_size", [2, 5, 8, 16])
def test_ranks_are_in_proportion_to_flops(world_size: int) -> None:
    given = folklore(recipe(vision={**SMALL["vision"], "layers": 8}), world_size)
    found = given.find(FLOPS_BASELINE)
    assert found is not None
    alone = tuple((name, 1, 8) for name in given.choices)
    flops = {}
    for name in given.choices:
        loads = [given.layer_costs.microbatch_loads(name, alone).total(batch) for batch in range(3)]
        flops[name] = sum(model_flops(given.layer_costs.shape, {name: load}) for load in loads)
    share = world_size * flops["vision"] / sum(flops.values())
    ranks = {name: len(unit.ranks) for name, unit in found.layout.units.items()}
    apart = (s for s in mesh_assignments(given.choices, world_size) if s.placement == "disaggregated")
    possible = {s.meshes["vision"].ranks for s in apart}
    assert abs(ranks["vision"] - share) == min(abs(own - share) for own in possible)
    assert sum(ranks.values()) == world_size


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_baselines_are_simulated_and_never_stand_before_the_plan(world_size: int) -> None:
    chosen = planned(recipe(**SMALL), world_size, explain=True)
    told = {a.summary.split(" baseline")[0]: a for a in chosen.alternatives if " baseline" in a.summary}
    given = folklore(recipe(**SMALL), world_size)
    rules = given.all()
    assert {"megatron", "equal-layers", FLOPS_BASELINE} <= set(rules) <= set(BASELINES)
    assert "megatron" in told
    assert set(told) <= set(rules)
    for name, judged in rules.items():
        assert judged.step_time_s == evaluate_layout(judged.layout, given.layer_costs, given.machine).step_time_s
        assert judged.step_time_s >= chosen.predicted.step_time_s / EQUAL_STEP_TIME_RATIO
        if name in told:
            assert told[name].step_time_s == judged.step_time_s
        else:
            assert judged.step_time_s <= chosen.predicted.step_time_s * EQUAL_STEP_TIME_RATIO


def test_a_baseline_that_is_faster_than_all_that_was_found_is_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a search that cannot try everything overlooks it."""
    rules = folklore(recipe(**SMALL), 2).all()
    fastest = min(judged.step_time_s for judged in rules.values())
    slow = ("disaggregated",)
    monkeypatch.setattr(
        "mmtrain.plan.planner.best_first_search",
        lambda assignments, *given, **more: best_first_search(
            [e for e in assignments if e[1].placement in slow], *given, **more
        ),
    )
    settings = recipe(**SMALL, parallel={"placement": "auto"})
    monkeypatch.setattr("mmtrain.plan.planner.search_colocated", lambda *_: SearchResults((), ()))
    assert planned(settings, 2).predicted.step_time_s == fastest


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_can_be_asked_for(name: str) -> None:
    settings = recipe(**SMALL)
    chosen = planned(settings, 2)
    found = planned(settings, 2, baseline=name)
    build_program(stage_graph(found, build_model_shape(settings)))
    assert found.placement == ("disaggregated" if name == FLOPS_BASELINE else "unified")
    [beside] = found.alternatives
    assert beside.step_time_s == chosen.predicted.step_time_s
    assert "x faster: what is planned without a baseline" in beside.reason


@pytest.mark.parametrize("name", ["balanced", FLOPS_BASELINE])
def test_where_the_quickest_sizes_do_not_fit_others_are_taken(name: str) -> None:
    given = folklore(recipe(parallel={"vision": {"recompute": "none"}, "llm": {"recompute": "none"}}), 8)
    free = given.find(name)
    assert free is not None
    small = replace(given, machine=replace(given.machine, memory_bytes=0.9 * free.peak_bytes))
    found = small.find(name)
    assert found is not None
    assert found.peak_bytes <= small.machine.memory_bytes
    assert found.step_time_s > free.step_time_s


def test_no_baseline_breaks_what_the_recipe_fixes() -> None:
    fixed = recipe(parallel={"placement": "unified", "vision": {"pp": 2}, "llm": {"pp": 2, "dp": 1}})
    for judged in folklore(fixed, 3).all().values():
        assert [unit.pp for unit in judged.layout.units.values()] == [2, 2]


def test_a_baseline_that_is_impossible_names_those_that_are_not() -> None:
    apart = recipe(parallel={"placement": "disaggregated"})
    with pytest.raises(PlanError, match=r"--baseline megatron: no plan .* possible here: flops\."):
        planned(apart, 2, baseline="megatron")
