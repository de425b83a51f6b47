"""Plans of whole recipes: fixed settings hold, losers have reasons, errors say what to change."""

import gc
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from mmtrain.balance import ItemLengths, SampleLengths
from mmtrain.costs import preset
from mmtrain.costs.framework import Execution
from mmtrain.costs.published_errors import LayoutKind, expected_error
from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning import Plan, stage_graph
from mmtrain.planning.planner import plan
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.program import build_program
from mmtrain.recipe.settings.schema import Recipe
from tests.planning.factory import lengths, problem_for, recipe, text_lengths
from tests.plans import plan_recipe


def planned(settings: Recipe, world_size: int, hardware: str = "cpu-core", top: int = 50) -> Plan:
    problem = problem_for(settings, hardware, world_size)
    return plan(replace(problem, request=PlanRequest(num_alternatives=top)))


def test_the_same_recipe_is_planned_the_same_each_time() -> None:
    assert planned(recipe(global_batch=4), 2, top=5) == planned(recipe(global_batch=4), 2, top=5)


def test_what_planning_made_is_freed_with_its_last_reference() -> None:
    """`make_plan` looks for no reference cycles, so what lies in one would stay until the plan is made."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        planned(recipe(), 4)
        gc.collect()
        left = {type(found).__qualname__ for found in gc.garbage if type(found).__module__.startswith("mmtrain")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        if was_enabled:
            gc.enable()
    assert left == set()


def test_a_plan_is_complete() -> None:
    chosen = planned(recipe(), 4, top=5)
    assert chosen.world_size == 4
    assert chosen.recipe_sha256 == "f" * 64
    assert chosen.predicted.cost_source == "modelled: cpu-core, our own runs took 1.1 to 2.9 times as long"
    assert 0 < chosen.predicted.mfu < 1
    assert chosen.predicted.step_time_s > 0
    assert chosen.predicted.tokens_per_s_per_gpu > 0
    assert 0 <= sum(chosen.predicted.bubbles.values()) < 1
    assert chosen.predicted.peak_memory_gib
    dp = chosen.units["llm"].dp
    assert chosen.schedule.num_microbatches == {"vision": 8 // dp, "llm": 8 // dp}
    for other in chosen.alternatives:
        assert other.step_time_s is None or other.step_time_s >= chosen.predicted.step_time_s / 1.001
        assert other.reason
    placements = {chosen.placement, *(other.placement for other in chosen.alternatives)}
    assert placements == {"unified", "disaggregated", "colocated", "replicated"}
    assert stage_graph(chosen, build_model_shape(recipe())).world_size == 4


@pytest.mark.parametrize(
    ("parallel", "layout"),
    [
        ({"placement": "unified", "llm": {"pp": 1}}, "tp x dp"),
        ({"placement": "unified", "llm": {"pp": 2}}, "pipeline"),
        ({"placement": "disaggregated", "llm": {"pp": 1}}, "pipeline"),
        ({"placement": "replicated", "shard": "all"}, "FSDP"),
        ({"placement": "replicated", "zero": 1}, "tp x dp"),
    ],
)
def test_a_modelled_plan_states_the_errors_of_runs_like_it(parallel: dict[str, Any], layout: LayoutKind) -> None:
    chosen = planned(recipe(parallel=parallel), 4, "h100-80g", top=1)
    expected = expected_error(preset("h100-80g"), layout, is_multimodal=True)
    assert chosen.predicted.cost_source == f"modelled: h100-80g, {expected}"


def test_other_kernels_than_ours_state_no_error() -> None:
    problem = problem_for(recipe(), "h100-80g", 2)
    costs = replace(problem.costs, execution=Execution(dropout=True))  # type: ignore[type-var]
    assert plan(replace(problem, costs=costs)).predicted.cost_source == "modelled: h100-80g"


@pytest.mark.parametrize("placement", ["unified", "disaggregated"])
@pytest.mark.parametrize("num_microbatches", [1, 4, 16])
def test_a_number_of_microbatches_fixed_for_a_unit_is_used(num_microbatches: int, placement: str) -> None:
    parallel = {"placement": placement, "vision": {"num_microbatches": num_microbatches}, "llm": {"dp": 1, "pp": 2}}
    chosen = planned(recipe(parallel=parallel), 3)
    assert chosen.schedule.num_microbatches == {"vision": num_microbatches, "llm": 8}
    graph = stage_graph(chosen, build_model_shape(recipe()))
    assert [m.num_microbatches for m in graph.meshes] == [num_microbatches, 8]
    build_program(graph)


def test_a_number_of_microbatches_of_the_llm_decides_its_replicas() -> None:
    chosen = planned(recipe(parallel={"llm": {"num_microbatches": 2}}), 4)
    assert chosen.units["llm"].dp == 4
    assert set(chosen.schedule.num_microbatches.values()) == {2}


def test_merged_microbatches_need_more_memory() -> None:
    parallel: dict[str, Any] = {"placement": "disaggregated", "llm": {"dp": 1}, "vision": {"dp": 1, "pp": 1}}
    peaks = []
    for num_microbatches in (8, 4, 1):
        sizes = {**parallel, "vision": {**parallel["vision"], "num_microbatches": num_microbatches}}
        chosen = planned(recipe(parallel=sizes), 2)
        peaks.append(chosen.predicted.peak_memory_gib["0"])
    assert peaks[0] < peaks[1] < peaks[2]


def test_the_number_of_alternatives_can_be_reduced() -> None:
    assert len(planned(recipe(), 2, top=2).alternatives) == 2


def test_one_rank_has_one_plan() -> None:
    chosen = planned(recipe(), 1)
    assert chosen.placement == "unified"
    assert {name: (u.tp, u.pp, u.dp, u.ranks) for name, u in chosen.units.items()} == {
        "vision": (1, 1, 1, (0,)),
        "llm": (1, 1, 1, (0,)),
    }
    assert chosen.alternatives == ()


def test_sequence_parallelism_is_planned_where_it_is_asked_for_and_possible() -> None:
    parallel = {"placement": "disaggregated", "vision": {"tp": 1}, "llm": {"tp": 2, "sp": True}}
    units = planned(recipe(parallel=parallel), 3).units
    assert (units["vision"].sp, units["llm"].sp) == (False, True)
    alone = planned(recipe(parallel={"llm": {"sp": True}}), 1).units
    assert not alone["llm"].sp


@pytest.mark.parametrize(
    ("parallel", "world_size"),
    [
        ({"placement": "unified", "llm": {"pp": 2}}, 2),
        ({"placement": "unified", "vision": {"pp": 1}, "llm": {"pp": 3}}, 3),
        ({"placement": "unified", "vision": {"pp": 2}, "llm": {"pp": 2}}, 3),
        ({"placement": "unified", "vision": {"pp": 2}, "llm": {"pp": 1}}, 3),
        ({"placement": "disaggregated", "vision": {"dp": 1}, "llm": {"dp": 2}}, 3),
        ({"placement": "disaggregated", "vision": {"dp": 2}, "llm": {"dp": 1}}, 3),
        ({"llm": {"tp": 2, "pp": 1}}, 4),
        ({"vision": {"tp": 1, "dp": 4}}, 6),
    ],
)
def test_fixed_sizes_are_used(parallel: dict[str, Any], world_size: int) -> None:
    chosen = planned(recipe(parallel=parallel), world_size)
    assert chosen.placement == parallel.get("placement", chosen.placement)
    for unit in ("vision", "llm"):
        for key, value in parallel.get(unit, {}).items():
            assert getattr(chosen.units[unit], key) == value
    assert len({r for u in chosen.units.values() for r in u.ranks}) == world_size


def test_recompute_is_in_the_plan() -> None:
    chosen = planned(recipe(parallel={"vision": {"recompute": "all"}}), 2)
    assert all(s.recompute == tuple(range(*s.layers)) for s in chosen.units["vision"].stages)
    assert all(s.recompute == () for s in chosen.units["llm"].stages)


def test_fewer_layers_are_recomputed_where_activation_functions_run_again() -> None:
    with_room = planned(recipe(parallel={"placement": "unified"}), 1)
    assert not any(unit.recompute_activation_function for unit in with_room.units.values())
    cluster = {"memory_gib": 0.95 * with_room.predicted.peak_memory_gib["0"]}
    fixed = [{unit: {"recompute_activation_function": value} for unit in ("vision", "llm")} for value in (False, True)]
    usual, saving, chosen = (
        planned(recipe(parallel={"placement": "unified"} | units, cluster=cluster), 1) for units in (*fixed, {})
    )
    assert sum(unit.num_recomputed for unit in usual.units.values()) > 0
    assert sum(unit.num_recomputed for unit in saving.units.values()) == 0
    assert with_room.predicted.step_time_s < saving.predicted.step_time_s < usual.predicted.step_time_s
    assert (chosen.units, chosen.predicted) == (saving.units, saving.predicted)
    assert all(unit.recompute_activation_function for unit in chosen.units.values())


def test_selective_recomputation_is_that_of_activation_functions_and_no_layers() -> None:
    units = ("vision", "llm")
    named, spelled_out, full, kept = (
        planned(recipe(parallel={"placement": "unified"} | dict.fromkeys(units, settings)), 2)
        for settings in (
            {"recompute": "selective"},
            {"recompute": "none", "recompute_activation_function": True},
            {"recompute": "all"},
            {"recompute": "none", "recompute_activation_function": False},
        )
    )
    assert (named.units, named.predicted) == (spelled_out.units, spelled_out.predicted)
    assert all(unit.recompute_activation_function and not unit.num_recomputed for unit in named.units.values())
    peaks = [max(p.predicted.peak_memory_gib.values()) for p in (full, named, kept)]
    assert peaks[0] < peaks[1] < peaks[2]
    assert kept.predicted.step_time_s < named.predicted.step_time_s < full.predicted.step_time_s


def test_activation_functions_run_again_where_nothing_fits_otherwise() -> None:
    parallel: dict[str, Any] = {"placement": "unified", "vision": {"recompute": "none"}, "llm": {"recompute": "none"}}
    peak_gib = planned(recipe(parallel=parallel), 1).predicted.peak_memory_gib["0"]
    chosen = planned(recipe(parallel=parallel, cluster={"memory_gib": 0.95 * peak_gib}), 1)
    assert all(unit.recompute_activation_function for unit in chosen.units.values())


def test_a_text_model_has_one_unit() -> None:
    chosen = planned(recipe(vision=None), 4)
    assert list(chosen.units) == ["llm"]
    assert chosen.placement == "unified"


@pytest.mark.parametrize(
    ("change", "world_size", "message"),
    [
        (
            {"parallel": {"placement": "disaggregated"}},
            1,
            "on separate ranks need at least 2 ranks; parallel.placement: unified lets them share",
        ),
        (
            {"parallel": {"placement": "unified", "vision": {"tp": 2}, "llm": {"tp": 1}}},
            2,
            r"parallel\.vision\.tp \(2\) and parallel\.llm\.tp \(1\) do not go together: .* a divisor of it",
        ),
        (
            {"parallel": {"placement": "unified", "llm": {"tp": 2, "dp": 2}}},
            6,
            r"parallel\.llm\.tp x parallel\.llm\.dp make 4 ranks, which does not divide 6",
        ),
        ({"parallel": {"llm": {"tp": 3}}}, 2, r"parallel\.llm\.tp: 3 is not a power of two .* allowed: 1, 2, 4"),
        ({"parallel": {"vision": {"dp": 3}}}, 2, r"parallel\.vision\.dp: 3 does not divide train\.global_batch \(8\)"),
        (
            {"parallel": {"vision": {"num_microbatches": 3}, "llm": {"num_microbatches": 2}}},
            2,
            r"parallel\.vision\.num_microbatches 3, parallel\.llm\.num_microbatches 2: no size of parallel\.llm\.dp",
        ),
        (
            {"vision": None, "parallel": {"vision": {"num_microbatches": 2}}},
            2,
            r"parallel\.vision\.num_microbatches is set, but model\.vision",
        ),
        (
            {"parallel": {"placement": "disaggregated", "vision": {"num_microbatches": 3}, "llm": {"tp": 2, "pp": 2}}},
            6,
            r"fixed by .*parallel\.vision\.num_microbatches",
        ),
        ({"parallel": {"llm": {"pp": 9}}}, 2, r"parallel\.llm\.pp: 9 is more than llm's 6 layers; allowed: 1-6"),
        ({"parallel": {"placement": "disaggregated", "vision": {"pp": 1, "tp": 1, "dp": 1}}}, 500, "500 ranks"),
        ({"vision": None, "parallel": {"placement": "disaggregated"}}, 2, r"needs an encoder, but the model has none"),
        ({"vision": None, "parallel": {"vision": {"tp": 2}}}, 2, r"parallel\.vision\.tp is set, but model\.vision"),
        pytest.param(
            {"cluster": {"memory_gib": 0.01}},
            2,
            r"(?s)no plan fits 2 ranks.*most of it \w+ \(.*memory_gib",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_impossible_problem_is_explained(change: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(recipe(**change), world_size)


def test_fixed_pipeline_sizes_without_a_partition_are_named() -> None:
    settings = recipe(parallel={"placement": "unified", "vision": {"pp": 1}, "llm": {"pp": 1}})
    with pytest.raises(PlanError, match=r"parallel\.vision\.pp.*parallel\.llm\.pp"):
        planned(settings, 3)


def test_planning_without_samples_is_an_error() -> None:
    none = np.empty(0, dtype=np.int64)
    with pytest.raises(PlanError, match=r"data\.sources: no usable sample"):
        plan_recipe(
            recipe(vision=None),
            SampleLengths(none, none, {}),
            world_size=1,
            hardware="cpu-core",
            recipe_sha256="f",
        )


def test_data_without_images_can_be_planned_for_a_model_with_vision() -> None:
    none = np.empty(0, dtype=np.int64)
    text = text_lengths(50)
    samples = SampleLengths(text.tokens, text.targets, {"vision": ItemLengths(np.zeros(51, np.int64), *[none] * 4)})
    mesh = {"llm": {"tp": 1, "pp": 1, "dp": 2}, "placement": "unified"}
    without, with_images = (
        plan_recipe(recipe(parallel=mesh), data, world_size=2, hardware="cpu-core", recipe_sha256="f")
        for data in (samples, lengths())
    )
    assert 0 < without.predicted.mfu < 1
    assert without.predicted.tokens_per_s_per_gpu > with_images.predicted.tokens_per_s_per_gpu, "text alone is cheaper"


@pytest.mark.slow
def test_a_large_cluster_takes_nodes_into_account() -> None:
    big = recipe(
        vision={"layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096},
        llm={"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 11008, "vocab": 32000},
        global_batch=16,
    )
    chosen = planned(big, 16, "a100-80g", top=3)
    graph = stage_graph(chosen, build_model_shape(big))
    for tp_group in chain.from_iterable(stage.tp_groups for stage in graph.stages):
        assert len({rank // 8 for rank in tp_group}) == 1, "a tensor-parallel group lies inside a node of eight"
    assert max(chosen.predicted.peak_memory_gib.values()) < 80e9 / 2**30


def test_planning_imports_no_torch() -> None:
    code = "import sys, mmtrain.planning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
