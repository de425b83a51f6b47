"""Planning requests: fewer ranks, every rejected plan, a measured order, progress."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import pytest

from mmtrain.costs.hardware import GIB
from mmtrain.errors import PlanError
from mmtrain.models import build_model_shape
from mmtrain.planning import Plan
from mmtrain.planning.artifact.plan import StepMeasurement
from mmtrain.planning.artifact.plan_memory import DeviceMemory, prove_memory
from mmtrain.planning.planner import plan
from mmtrain.planning.space.problem import MeasurePlans, PlanRequest
from mmtrain.recipe.settings.schema import Recipe
from tests.planning.factory import problem_for, recipe

SETTINGS = recipe(global_batch=4)  # with half the microbatches of the other tests, since these plan twice


def of_each(measure: Callable[[Plan], StepMeasurement]) -> MeasurePlans:
    """Return what measures plans one by one."""
    return lambda plans: [measure(candidate) for candidate in plans]


def planned(settings: Recipe, world_size: int = 4, **request: Any) -> Plan:
    return plan(replace(problem_for(settings, world_size=world_size), request=PlanRequest(**request)))


def test_fewer_ranks_are_used_only_where_the_recipe_allows_it() -> None:
    """Use fewer ranks for one group a step: the LLM has one replica, and a longer pipeline is no faster."""
    tiny: dict[str, Any] = {"vision": None, "global_batch": 1, "seq_len": 224}
    assert planned(recipe(**tiny, parallel={"llm": {"tp": 1}})).world_size == 4
    free = planned(recipe(**tiny, parallel={"llm": {"tp": 1}, "max_gpus": 4}))
    assert free.world_size == len(free.units["llm"].ranks) < 4
    assert planned(recipe(parallel={"max_gpus": 2})).world_size <= 2


@pytest.mark.slow  # 4 s
def test_all_losers_are_explained_on_demand() -> None:
    brief, complete = planned(SETTINGS, num_alternatives=1), planned(SETTINGS, num_alternatives=1, explain=True)
    assert len(brief.alternatives) == 1 < len(complete.alternatives)
    assert all(a.reason for a in complete.alternatives)
    assert complete.model_copy(update={"alternatives": ()}) == brief.model_copy(update={"alternatives": ()})


def test_the_plan_that_measures_fastest_is_chosen() -> None:
    asked: list[Plan] = []

    def backwards(candidate: Plan) -> StepMeasurement:
        asked.append(candidate)
        return StepMeasurement(30.0 - len(asked) if len(asked) <= 4 else 40.0)  # then rules of thumb are run

    chosen = planned(SETTINGS, num_alternatives=3, num_measured=4, measure=of_each(backwards))
    predicted = [p.predicted.step_time_s for p in asked[:4]]
    assert predicted == sorted(predicted)
    assert chosen.units == asked[3].units
    reasons = [a.reason for a in chosen.alternatives]
    assert any(reason.startswith("1.12x slower as measured") for reason in reasons)
    num_rules = sum("baseline" in a.summary for a in chosen.alternatives)
    assert num_rules > 0
    assert sum("as measured" in reason for reason in reasons) == 3 + num_rules


def test_layer_partitions_of_the_best_sizes_are_measured() -> None:
    asked: list[Plan] = []

    def measure(candidate: Plan) -> StepMeasurement:
        asked.append(candidate)
        return StepMeasurement(1.0 + len(asked))

    settings = recipe(parallel={"placement": "disaggregated"})  # which has sizes of several cuts
    planned(settings, num_alternatives=2, num_measured=6, measure=of_each(measure))
    by_size = defaultdict(list)
    for run in asked[:6]:
        llm = run.units["llm"]
        cut = tuple(stage.layers for unit in run.units.values() for stage in unit.stages)
        by_size[run.placement, llm.tp, llm.pp].append(cut)
    assert len(by_size) == 2
    assert sum(map(len, by_size.values())) == sum(len(set(cuts)) for cuts in by_size.values()) == 6


def test_runs_that_the_best_sizes_do_not_need_go_to_the_next_sizes() -> None:
    """Without a pipeline the LLM's layers can be divided in one way, so the best size alone is one run."""
    asked: list[Plan] = []

    def measure(candidate: Plan) -> StepMeasurement:
        asked.append(candidate)
        return StepMeasurement(1.0)

    settings = recipe(vision=None, parallel={"placement": "unified", "llm": {"pp": 1}})
    ranking = planned(settings)
    planned(settings, num_alternatives=1, num_measured=3, measure=of_each(measure))
    predicted = [run.predicted.step_time_s for run in asked[:3]]
    assert len({(run.units["llm"].tp, run.units["llm"].dp) for run in asked[:3]}) == 3
    others = sorted(a.step_time_s for a in ranking.alternatives if a.step_time_s is not None)
    assert predicted[0] == ranking.predicted.step_time_s
    assert predicted[1:] == pytest.approx(others[:2])


@pytest.mark.slow  # 4 s
def test_a_rule_of_thumb_that_measures_fastest_is_chosen() -> None:
    rule = planned(SETTINGS, baseline="megatron")

    def measure(candidate: Plan) -> StepMeasurement:
        return StepMeasurement(1.0 if candidate.units == rule.units else 2.0)

    chosen = planned(SETTINGS, num_alternatives=2, num_measured=2, measure=of_each(measure))
    assert chosen.units == rule.units
    assert not any("megatron baseline" in a.summary for a in chosen.alternatives)


def test_plans_that_cannot_be_run_are_not_chosen() -> None:
    seconds = chain([math.inf, 1.0], repeat(math.inf))
    chosen = planned(
        SETTINGS, num_alternatives=3, num_measured=3, measure=of_each(lambda _: StepMeasurement(next(seconds)))
    )
    reasons = [a.reason for a in chosen.alternatives]
    assert reasons.count("could not be run here") == 2
    assert len({*reasons}) > 1  # rules of thumb, which could not be run either
    with pytest.raises(PlanError, match="none of the 2 plans predicted to be fastest could be run"):
        planned(SETTINGS, num_alternatives=2, num_measured=2, measure=of_each(lambda _: StepMeasurement(math.inf)))


@pytest.fixture(scope="module")
def tight() -> tuple[Recipe, Plan]:
    """A recipe whose ranks have too little memory to run without recomputation, and its plan."""
    settings = recipe(parallel={"placement": "unified", "llm": {"tp": 1, "pp": 2}}, cluster={"memory_gib": 0.026})
    return settings, planned(settings, world_size=2)


def _num_recomputed(plan: Plan) -> int:
    return sum(len(stage.recompute) for unit in plan.units.values() for stage in unit.stages)


def test_recomputation_is_taken_back_where_runs_leave_room(tight: tuple[Recipe, Plan]) -> None:
    """Runs hold 0.8 of what is counted, so plans may count 1.25 times what a rank has, and no more."""
    settings, modelled = tight

    def measure(candidate: Plan) -> StepMeasurement:
        held_gib = 0.8 * max(candidate.predicted.peak_memory_gib.values())
        if held_gib > 0.026:
            return StepMeasurement(math.inf, is_out_of_memory=True)
        return StepMeasurement(1.0 + _num_recomputed(candidate), memory_ratio=0.8)

    chosen = planned(settings, world_size=2, num_alternatives=1, num_measured=1, measure=of_each(measure))
    assert _num_recomputed(chosen) < _num_recomputed(modelled)
    assert 0.026 < max(chosen.predicted.peak_memory_gib.values()) <= 0.026 / 0.8
    assert chosen.measured is not None
    assert chosen.measured.memory_ratio == 0.8
    shape = build_model_shape(settings)
    prove_memory(settings, chosen, shape, DeviceMemory(0.026 * GIB, "a rank"))
    as_counted = chosen.model_copy(update={"measured": None})
    with pytest.raises(PlanError, match="does not fit this device"):
        prove_memory(settings, as_counted, shape, DeviceMemory(0.026 * GIB, "a rank"))


def test_recomputation_is_added_where_a_run_ends_without_memory(tight: tuple[Recipe, Plan]) -> None:
    settings, modelled = tight

    def measure(candidate: Plan) -> StepMeasurement:
        held_gib = 1.15 * max(candidate.predicted.peak_memory_gib.values())
        if held_gib > 0.026:
            return StepMeasurement(math.inf, is_out_of_memory=True)
        return StepMeasurement(1.0, memory_ratio=1.15)

    chosen = planned(settings, world_size=2, num_alternatives=1, num_measured=1, measure=of_each(measure))
    assert _num_recomputed(chosen) > _num_recomputed(modelled)
    assert chosen.measured is not None
    assert chosen.measured.memory_ratio is None  # it fits as counted


def test_what_is_run_again_is_compared_with_a_plan_that_is_run_beside_it(tight: tuple[Recipe, Plan]) -> None:
    """The machine takes twice as long by then, so 1.5 s beside a plan that took 1 s and now takes 2 s are 0.75 s."""
    settings, _ = tight
    calls: list[Sequence[Plan]] = []

    def measure(plans: Sequence[Plan]) -> list[StepMeasurement]:
        calls.append(plans)
        if len(calls) == 1:
            misfit = StepMeasurement(math.inf, 1.1, is_out_of_memory=True)
            return [misfit, *(StepMeasurement(1.0) for _ in plans[1:])]
        return [StepMeasurement(2.0), StepMeasurement(1.5)]

    chosen = planned(settings, world_size=2, num_alternatives=2, num_measured=2, measure=measure)
    first, (reference, again) = calls
    assert reference.units == first[1].units
    assert chosen.units == again.units
    assert _num_recomputed(chosen) > _num_recomputed(first[0])
    assert chosen.measured is not None
    assert chosen.measured.step_time_s == 0.75


def test_meshes_whose_state_alone_is_too_large_are_rejected_for_memory() -> None:
    """Report no ratio, as their lower bound is infinite."""
    large: dict[str, Any] = {"vocab": 8192, "hidden": 256, "layers": 14}
    chosen = planned(recipe(vision=None, llm=large, cluster={"memory_gib": 0.09}), explain=True)
    why = {other.summary: other.reason for other in chosen.alternatives}
    assert why["unified: tp1 pp1 dp4"] == "does not fit: even the least that its ranks must hold is too much"
    assert not any("inf" in reason for reason in why.values())


@pytest.mark.parametrize("parallel", [{}, {"max_gpus": 4}, {"placement": "unified"}])
def test_progress_runs_to_its_end_through_all_searches(parallel: dict[str, Any]) -> None:
    reported: list[tuple[int, int]] = []
    planned(recipe(global_batch=4, parallel=parallel), progress=lambda done, total: reported.append((done, total)))
    totals = {total for _, total in reported}
    assert len(totals) == 1
    assert reported[0][0] == 0
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert reported[-1][0] == totals.pop()
