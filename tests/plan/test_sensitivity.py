"""The step of a plan under changed costs is the one that it has on hardware that is really changed."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmtrain.costs import AnalyticCosts, CostTable, preset
from mmtrain.costs.cost_table import MessageEntry
from mmtrain.costs.hardware import PRESETS, Hardware, Link
from mmtrain.costs.perturbed_costs import LARGEST_CHANGE
from mmtrain.costs.recorded_costs import RecordedRatios, recorded_table
from mmtrain.models.model_shape import build_model_shape
from mmtrain.plan import Plan
from mmtrain.plan.artifact.choice_sensitivity import Sensitivity
from mmtrain.plan.artifact.plan import AS_FAST_RATIO
from mmtrain.plan.budget import DEFAULT_BUDGET, SensitivityBudget
from mmtrain.plan.candidate import Candidate, SearchResults
from mmtrain.plan.estimate.evaluator import Evaluator
from mmtrain.plan.explain.sensitivity import choice_sensitivity, closest_rivals
from mmtrain.plan.planner import plan, search_placements
from mmtrain.plan.problem import PlanningProblem, PlanRequest
from mmtrain.recipe.schema import Recipe
from tests.plan.factory import problem_for, recipe, simulated

ALL_BATCHES = replace(DEFAULT_BUDGET, sensitivity=SensitivityBudget(first_batch_margin=math.inf))
# Two ranks on two nodes: data parallelism sends many gradients, and a pipeline waits for few microbatches.
APART: dict[str, Any] = {"vision": None, "global_batch": 2}
SMALL_LLM = {"vocab": 4096, "hidden": 256, "ffn": 768}
CASES = {
    "h100-80g": recipe(**APART, llm=SMALL_LLM, cluster={"ranks_per_node": 1}),
    "cpu-core": recipe(**APART, llm={**SMALL_LLM, "hidden": 512, "ffn": 1536}, cluster={"ranks_per_node": 1}),
}


def _faster(link: Link, ratio: float) -> Link:
    return Link(link.bytes_per_s * ratio, link.latency_s / ratio, link.step_s / ratio)


# Written apart from what is tested.
CHANGED: dict[str, Callable[[Hardware, float], Hardware]] = {
    "GEMM efficiency": lambda h, ratio: replace(h, gemm_efficiency=h.gemm_efficiency * ratio),
    "attention efficiency": lambda h, ratio: replace(
        h,
        attention_efficiency=h.attention_efficiency * ratio,
        attention_backward_efficiency=h.attention_backward_efficiency * ratio,
    ),
    "launch time": lambda h, ratio: replace(h, kernel_launch_s=h.kernel_launch_s * ratio),
    "link speeds": lambda h, ratio: replace(
        h,
        intra_node=_faster(h.intra_node, ratio),
        inter_node=_faster(h.inter_node, ratio),
        collective_start_s=h.collective_start_s / ratio,
    ),
}


def _searched(settings: Recipe, hardware: str) -> tuple[SearchResults, Evaluator]:
    """Search the placements whose best plans lie apart; `replicated` has several that are as fast as the chosen one."""
    problem = problem_for(settings, hardware, 2)
    placements = tuple(placement for placement in problem.constraints.placements if placement != "replicated")
    apart = replace(problem, constraints=replace(problem.constraints, placements=placements))
    evaluator, results = search_placements(apart, ALL_BATCHES)
    return results, evaluator


def _changes(sensitivity: Sensitivity) -> Iterator[tuple[str, float, list[float]]]:
    seen = [(ranking.constant, ranking.ratio) for ranking in sensitivity.rankings]
    assert seen == [(constant, ratio) for constant in CHANGED for ratio in (0.8, 1.25)]
    for ranking in sensitivity.rankings:
        yield ranking.constant, ranking.ratio, [step.step_time_s for step in ranking.steps]


def _same(candidate: Candidate, results: SearchResults) -> Candidate:
    [found] = [c for c in results.candidates if c.layout == candidate.layout and c.schedule == candidate.schedule]
    return found


@pytest.mark.parametrize("hardware", CASES)
def test_a_full_plan_on_changed_hardware_gives_the_same_steps_and_choice(
    hardware: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = preset(hardware)
    results, evaluator = _searched(CASES[hardware], hardware)
    compared = [results.candidates[0], *closest_rivals(results.candidates, evaluator)]
    sensitivity = choice_sensitivity(results.candidates, evaluator)
    assert [c.summary for c in sensitivity.plans] == [c.summary for c in compared]
    fragile = {r.constant for r in sensitivity.where_faster(1, AS_FAST_RATIO)}
    assert "link speeds" in fragile
    for constant, ratio, steps in _changes(sensitivity):
        monkeypatch.setitem(PRESETS, hardware, CHANGED[constant](stated, ratio))
        anew, _ = _searched(CASES[hardware], hardware)
        assert steps == pytest.approx([_same(c, anew).step_time_s for c in compared], rel=1e-9)
        wins = steps[1] * AS_FAST_RATIO < steps[0]
        assert anew.candidates[0].layout == compared[wins].layout or abs(steps[1] / steps[0] - 1) < AS_FAST_RATIO - 1
        assert not wins or anew.candidates[0].layout == compared[1].layout


@pytest.mark.parametrize("hardware", [pytest.param("h100-80g", marks=pytest.mark.slow), "cpu-core"])
def test_what_a_run_recorded_is_scaled_too(hardware: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A table of corrections has no entries, so that everything follows the hardware."""
    stated, file = preset(hardware), tmp_path / "costs.json"
    settings = CASES[hardware]
    precision = "fp32" if hardware == "cpu-core" else "bf16"
    ratios = RecordedRatios(forward={"llm": 1.2}, backward={"llm": 1.1}, messages=1.5, reductions=1.1)
    shape = build_model_shape(settings)
    recorded_table(AnalyticCosts(stated, precision), stated, precision, shape, ratios).save(file)
    _compare_with_full_plans(_with_costs(settings, file), hardware, monkeypatch, lambda constant, ratio: None)


def test_measured_messages_are_scaled_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The full plan reads a table whose messages and collectives were really measured faster or slower."""
    file = tmp_path / "costs.json"

    def write(constant: str, ratio: float) -> None:
        factor = 1 / ratio if constant == "link speeds" else 1.0
        entries = tuple(
            MessageEntry(
                kind=kind,
                size=2,
                nodes=2,
                nbytes=(1_000, 1_000_000, 10_000_000),
                seconds=(2e-4 * factor, 2e-3 * factor, 1e-2 * factor),
            )
            for kind in ("p2p", "reduce_scatter", "all_gather")
        )
        fields = {"hardware": "cpu-core", "device": "one core", "precision": "fp32", "software": {}, "date": "today"}
        CostTable.model_validate({**fields, "messages": entries}).save(file)

    write("link speeds", 1.0)
    _compare_with_full_plans(_with_costs(CASES["cpu-core"], file), "cpu-core", monkeypatch, write)


def _with_costs(settings: Recipe, table: Path) -> Recipe:
    return settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"costs": table})})


def _compare_with_full_plans(
    settings: Recipe, hardware: str, monkeypatch: pytest.MonkeyPatch, write_table: Callable[[str, float], None]
) -> None:
    stated = preset(hardware)
    results, evaluator = _searched(settings, hardware)
    compared = [results.candidates[0], *closest_rivals(results.candidates, evaluator)]
    assert len(compared) > 1
    for constant, ratio, steps in _changes(choice_sensitivity(results.candidates, evaluator)):
        write_table(constant, ratio)
        monkeypatch.setitem(PRESETS, hardware, CHANGED[constant](stated, ratio))
        anew, _ = _searched(settings, hardware)
        assert steps == pytest.approx([_same(c, anew).step_time_s for c in compared], rel=1e-9)


@pytest.fixture(scope="module")
def with_encoder() -> tuple[SearchResults, Evaluator]:
    return _searched(recipe(global_batch=4), "h100-80g")


def test_explicit_orders_are_simulated_as_they_are(with_encoder: tuple[SearchResults, Evaluator]) -> None:
    """A full plan orders encoders anew, so the same order is simulated on the changed hardware here."""
    results, evaluator = with_encoder
    compared = [results.candidates[0], *closest_rivals(results.candidates, evaluator)]
    assert "explicit" in {c.schedule.kind for c in compared}
    for constant, ratio, steps in _changes(choice_sensitivity(results.candidates, evaluator)):
        changed = CHANGED[constant](evaluator.problem.hardware, ratio)
        cluster = replace(evaluator.problem.cluster, hardware=changed)
        anew = Evaluator(replace(evaluator.problem, cluster=cluster, costs=AnalyticCosts(changed, "bf16")))
        expected = [simulated(c.layout, anew, c.schedule).step_time_s for c in compared]
        assert steps == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("hardware", CASES)
def test_the_first_batch_decides_who_may_win(hardware: str) -> None:
    results, evaluator = _searched(CASES[hardware], hardware)
    exact = choice_sensitivity(results.candidates, evaluator)
    screening = Evaluator(evaluator.problem, DEFAULT_BUDGET, evaluator.layer_costs)
    quick = choice_sensitivity(results.candidates, screening)
    assert [str(r) for r in quick.where_faster(1, 1.0)] == [str(r) for r in exact.where_faster(1, 1.0)]
    steps = [step for ranking in quick.rankings for step in ranking.steps]
    assert 0 < sum(step.from_first_batch for step in steps) < len(steps)
    for (*_, quickly), (*_, exactly), ranking in zip(_changes(quick), _changes(exact), quick.rankings, strict=True):
        assert quickly == pytest.approx(exactly, rel=0.01)
        assert ranking.steps[0].from_first_batch or quickly == exactly
    assert not any(step.from_first_batch for ranking in exact.rankings for step in ranking.steps)


def test_only_near_plans_of_other_degrees_are_rivals(with_encoder: tuple[SearchResults, Evaluator]) -> None:
    results, evaluator = with_encoder
    chosen = results.candidates[0]
    rivals = closest_rivals(results.candidates, evaluator)
    assert 0 < len(rivals) <= DEFAULT_BUDGET.sensitivity.max_rivals
    assert len({rival.placement for rival in rivals}) == len(rivals)
    band = min(evaluator.problem.hardware.expected_ratio, LARGEST_CHANGE)
    assert all(rival.step_time_s <= band * chosen.step_time_s for rival in rivals)
    assert closest_rivals(results.candidates[:1], evaluator) == []
    alone = choice_sensitivity(results.candidates[:1], evaluator)
    assert (len(alone.plans), alone.rankings) == (1, ())


def _planned(problem: PlanningProblem, **request: Any) -> Plan:
    return plan(replace(problem, request=PlanRequest(**request)))


def test_a_plan_states_its_sensitivity_where_it_is_asked_for(tmp_path: Path) -> None:
    problem = problem_for(CASES["h100-80g"], "h100-80g", 2)
    without, with_it = _planned(problem), _planned(problem, sensitivity=True)
    assert without.sensitivity is None
    assert with_it.sensitivity is not None
    assert with_it.sensitivity.plans[0].step_time_s == with_it.predicted.step_time_s
    assert with_it.model_copy(update={"sensitivity": None}) == without
    with_it.save(tmp_path / "plan.json")
    assert Plan.model_validate_json((tmp_path / "plan.json").read_text()) == with_it
