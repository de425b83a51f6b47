"""Baselines follow their rules, are simulated like any plan, and are never faster than the chosen plan."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from mmtrain.costs import model_flops
from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning import Plan, stage_graph
from mmtrain.planning.advise.baselines import (
    BASELINES,
    FLOPS_BASELINE,
    PARTITION_RULES,
    STAGES_BASELINE,
    BaselinePlanner,
)
from mmtrain.planning.advise.sharded_baselines import SHARDED_RULES
from mmtrain.planning.artifact.plan import AS_FAST_RATIO
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_costs import FORWARD
from mmtrain.planning.layer_costs.layer_partition import FloatArray, LayerChain, chunk_seconds
from mmtrain.planning.planner import plan
from mmtrain.planning.search.best_first_search import AllocatedCandidates, BestFirstSearch
from mmtrain.planning.search.strategies import allocate_ranks
from mmtrain.planning.space.candidate import EQUAL_STEP_TIME_RATIO, SearchResults
from mmtrain.planning.space.problem import PlanningProblem, PlanRequest
from mmtrain.planning.space.sample_batches import UnitSplit
from mmtrain.program import build_program
from mmtrain.recipe.settings.schema import Recipe
from tests.planning.factory import VISION, evaluator_for, problem_for, recipe, simulated, with_memory
from tests.plans import mesh_assignments

SMALL: dict[str, Any] = {"llm": {"layers": 2}, "vision": {"layers": 1, "hidden": 96, "heads": 4, "ffn": 256}}


def chain(pp: int, **vision: Any) -> tuple[LayerChain, FloatArray]:
    """Make a pipeline of 5 + 8 layers; return it with the forward seconds of each layer."""
    evaluator = evaluator_for(recipe(llm={"layers": 6}, vision=VISION | vision))
    assignments = mesh_assignments(evaluator.problem.choices, pp)
    assignment = next(a for a in assignments if str(a) == f"unified: tp1 pp{pp} dp1")
    times = [evaluator.layer_costs.unit_times(unit, 1, assignment.batch_split) for unit in ("vision", "llm")]
    (layer_chain,) = evaluator.layer_chains(evaluator.enumerated(assignment))
    return layer_chain, np.concatenate([of_unit.mean[:, FORWARD] for of_unit in times])


def baseline_planner(
    settings: Recipe, world_size: int, memory_bytes: float | None = None, hardware: str = "cpu-core"
) -> BaselinePlanner:
    evaluator = Evaluator(problem_for(settings, hardware, world_size))
    if memory_bytes is not None:
        evaluator = with_memory(evaluator, memory_bytes)
    listed, first, *_ = allocate_ranks(evaluator, evaluator.budget)
    return BaselinePlanner(evaluator, [*listed, *(candidate for _, candidate in first)])


def problem(settings: Recipe, world_size: int, **request: Any) -> PlanningProblem:
    return replace(problem_for(settings, world_size=world_size), request=PlanRequest(**request))


def planned(settings: Recipe, world_size: int, **request: Any) -> Plan:
    return plan(problem(settings, world_size, **request))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("megatron", (0, 7, 9, 11, 13)), ("megatron-extra", (0, 5, 8, 10, 13)), ("equal-layers", (0, 3, 6, 9, 13))],
)
def test_layers_are_divided_as_the_rule_says(name: str, expected: tuple[int, ...]) -> None:
    bounds = PARTITION_RULES[name].partition(*chain(4))
    assert bounds is not None
    assert sorted(np.diff(bounds)) == sorted(np.diff(expected))
    assert (bounds[0], bounds[-1]) == (0, 13)


def test_each_rule_balances_the_quantity_in_its_name() -> None:
    layer_chain, forward = chain(
        5, freeze=True, hidden=128
    )  # without a backward, forward time alone overrates the encoder
    partitions = {name: rule.partition(layer_chain, forward) for name, rule in PARTITION_RULES.items()}
    cumulative_forward = np.concatenate([[0.0], np.cumsum(forward)])

    def slowest(bounds: tuple[int, ...] | None) -> float:
        return float(chunk_seconds(layer_chain, np.asarray([bounds])).max())

    def slowest_forward(bounds: tuple[int, ...] | None) -> float:
        return float(np.diff(cumulative_forward[list(bounds or ())]).max())

    assert slowest(partitions["balanced"]) == min(map(slowest, partitions.values()))
    assert slowest_forward(partitions["profile-only"]) == min(map(slowest_forward, partitions.values()))
    assert partitions["profile-only"] != partitions["balanced"]


@pytest.mark.parametrize("world_size", [2, 5, 8, 16])
def test_ranks_are_in_proportion_to_flops(world_size: int) -> None:
    planner = baseline_planner(recipe(vision={**SMALL["vision"], "layers": 8}), world_size)
    baseline = planner.plan_baseline(FLOPS_BASELINE)
    assert baseline is not None
    evaluator = planner.evaluator
    choices = evaluator.problem.choices
    undivided = tuple(UnitSplit(unit, 1, 8) for unit in choices)
    flops = {}
    for unit in choices:
        loads = [evaluator.layer_costs.loads.of_unit(unit, undivided).total(batch) for batch in range(3)]
        flops[unit] = sum(model_flops(evaluator.problem.shape, {unit: load}) for load in loads)
    share = world_size * flops["vision"] / sum(flops.values())
    ranks = {name: len(unit.ranks) for name, unit in baseline.layout.units.items()}
    disaggregated = (s for s in mesh_assignments(choices, world_size) if s.placement == "disaggregated")
    possible = {s.meshes["vision"].ranks for s in disaggregated}
    assert abs(ranks["vision"] - share) == min(abs(count - share) for count in possible)
    assert sum(ranks.values()) == world_size


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_baselines_are_simulated_and_never_faster_than_the_plan(world_size: int) -> None:
    chosen = planned(recipe(**SMALL), world_size, explain=True)
    listed = {a.summary.split(" baseline")[0]: a for a in chosen.alternatives if " baseline" in a.summary}
    planner = baseline_planner(recipe(**SMALL), world_size)
    baselines = planner.plan_all()
    assert {"megatron", "equal-layers", FLOPS_BASELINE} <= set(baselines) <= set(BASELINES)
    assert "megatron" in listed
    assert set(listed) <= set(baselines)
    for name, baseline in baselines.items():
        again = simulated(baseline.layout, planner.evaluator)
        assert baseline.step_time_s == again.step_time_s
        assert baseline.step_time_s >= chosen.predicted.step_time_s / AS_FAST_RATIO
        if name in listed:
            assert listed[name].step_time_s == baseline.step_time_s
        else:
            assert baseline.step_time_s <= chosen.predicted.step_time_s * EQUAL_STEP_TIME_RATIO


def test_a_baseline_faster_than_everything_searched_becomes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose a baseline that a search that cannot try everything has overlooked."""
    baselines = baseline_planner(recipe(**SMALL), 2).plan_all()

    class SlowOnes(BestFirstSearch):
        def __init__(self, allocated: AllocatedCandidates, *more: Any) -> None:
            super().__init__(allocated.only("disaggregated"), *more)
            self.listed = tuple(allocated.listed)

        def results(self) -> SearchResults:
            return replace(super().results(), enumerated=self.listed)

    monkeypatch.setattr("mmtrain.planning.search.strategies.BestFirstSearch", SlowOnes)
    unrestricted = problem(recipe(**SMALL), 2)
    constraints = replace(unrestricted.constraints, placements=("unified", "disaggregated"))
    fastest = min(baseline.step_time_s for name, baseline in baselines.items() if name not in SHARDED_RULES)
    assert plan(replace(unrestricted, constraints=constraints)).predicted.step_time_s == fastest


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_encoders_and_generator_get_stages_beside_tp_8(num_replicas: int) -> None:
    """Share 32 ranks as MMScale's baseline does: one stage holds no layers of the LLM, whose tp is 8."""
    settings = recipe(llm={"heads": 8, "kv_heads": 8}, global_batch=16, parallel={"llm": {"dp": num_replicas}})
    num_stages = 32 // 8 // num_replicas
    planner = baseline_planner(settings, 32, hardware="a100-80g")
    baseline = planner.plan_baseline(STAGES_BASELINE)
    assert baseline is not None
    vision, llm = baseline.layout.units["vision"], baseline.layout.units["llm"]
    assert (vision.tp, vision.pp, vision.dp) == (1, 1, 8 * num_replicas)
    assert (llm.tp, llm.pp, llm.dp) == (8, num_stages - 1, num_replicas)
    sizes = [hi - lo for lo, hi in (stage.layers for stage in llm.stages)]
    assert max(sizes) - min(sizes) <= 1
    assert baseline.schedule.num_microbatches == dict.fromkeys(("vision", "llm"), 16 // num_replicas)
    assert sorted(vision.ranks + llm.ranks) == list(range(32))


@cache
def small_plan() -> Plan:
    """Return what is planned for two ranks without a baseline."""
    return planned(recipe(**SMALL), 2)


@pytest.mark.parametrize("name", [name for name in BASELINES if name != STAGES_BASELINE])
def test_a_baseline_can_be_requested(name: str) -> None:
    settings = recipe(**SMALL)
    chosen = small_plan()
    baseline = planned(settings, 2, baseline=name)
    build_program(stage_graph(baseline, build_model_shape(settings)))
    other_placements = {FLOPS_BASELINE: "disaggregated"} | dict.fromkeys(SHARDED_RULES, "replicated")
    assert baseline.placement == other_placements.get(name, "unified")
    [alternative] = baseline.alternatives
    assert alternative.step_time_s == chosen.predicted.step_time_s
    assert "x faster: what is planned without a baseline" in alternative.reason


@pytest.mark.parametrize("name", ["balanced", FLOPS_BASELINE])
def test_another_mesh_is_used_where_the_fastest_does_not_fit(name: str) -> None:
    settings = recipe(parallel={"vision": {"recompute": "none"}, "llm": {"recompute": "none"}})
    fastest = baseline_planner(settings, 8).plan_baseline(name)
    assert fastest is not None
    limit = 0.9 * fastest.peak_bytes
    fitting = baseline_planner(settings, 8, limit).plan_baseline(name)
    assert fitting is not None
    assert fitting.peak_bytes <= limit
    assert fitting.step_time_s > fastest.step_time_s


def test_baselines_keep_what_the_recipe_fixes() -> None:
    fixed = recipe(parallel={"placement": "unified", "vision": {"pp": 2}, "llm": {"pp": 2, "dp": 1}})
    for baseline in baseline_planner(fixed, 3).plan_all().values():
        assert [unit.pp for unit in baseline.layout.units.values()] == [2, 2]


def test_the_error_for_an_impossible_baseline_names_the_possible_ones() -> None:
    disaggregated = recipe(parallel={"placement": "disaggregated"})
    with pytest.raises(PlanError, match=r"--baseline megatron: no plan .* possible here: flops\."):
        planned(disaggregated, 2, baseline="megatron")


def test_fsdp_and_ddp_are_plans_of_replicated_that_balance_nothing() -> None:
    """They take what `replicated` takes with these settings, and are listed where such a plan is chosen."""
    baselines = baseline_planner(recipe(**SMALL), 4).plan_all()
    for name, shard in {"fsdp": "all", "ddp": 1}.items():
        parallel = {"placement": "replicated", "shard": shard, "dispatch": "none", "schedule": "1f1b"}
        same = planned(recipe(**SMALL, parallel=parallel), 4)
        assert baselines[name].step_time_s == same.predicted.step_time_s
        assert baselines[name].layout.units == same.units
        assert same.dispatch == "none"
    chosen = planned(recipe(**SMALL, parallel={"placement": "replicated"}), 4)
    for name in SHARDED_RULES:
        [listed] = [other for other in chosen.alternatives if other.summary.startswith(f"{name} baseline, replicated")]
        assert listed.step_time_s == baselines[name].step_time_s
        assert listed.reason.endswith(SHARDED_RULES[name])


def test_ddp_is_left_out_where_only_shards_fit() -> None:
    keep_all = {"vision": {"recompute": "none"}, "llm": {"recompute": "none"}}
    settings = recipe(**SMALL, parallel=keep_all)
    peaks = [
        baseline.peak_bytes
        for name, baseline in baseline_planner(settings, 4).plan_all().items()
        if name in SHARDED_RULES
    ]
    assert peaks[0] < peaks[1]
    between = baseline_planner(settings, 4, sum(peaks) / 2)
    assert set(between.plan_all()) & set(SHARDED_RULES) == {"fsdp"}


@pytest.mark.parametrize(
    ("parallel", "possible"),
    [
        ({}, {"fsdp", "ddp"}),
        ({"placement": "unified"}, set()),
        ({"placement": "replicated"}, {"fsdp", "ddp"}),
        ({"placement": "replicated", "shard": 4}, {"fsdp"}),
        ({"placement": "replicated", "shard": "all"}, {"fsdp"}),
        ({"placement": "replicated", "shard": 1}, {"ddp"}),
        ({"placement": "replicated", "shard": 2}, set()),
        ({"placement": "replicated", "dispatch": "none"}, {"fsdp", "ddp"}),
        ({"placement": "replicated", "dispatch": "all"}, set()),
        ({"placement": "replicated", "schedule": "encoder_first"}, set()),
    ],
)
def test_sharded_baselines_keep_what_the_recipe_fixes(parallel: dict[str, Any], possible: set[str]) -> None:
    assert set(baseline_planner(recipe(**SMALL, parallel=parallel), 4).plan_all()) & set(SHARDED_RULES) == possible
