"""The search against simulating everything; what it rates against the simulator."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmtrain.costs import machine_for
from mmtrain.plan.estimate.evaluate import evaluate_layout
from mmtrain.plan.estimate.step_time_estimator import StepTimeEstimator
from mmtrain.plan.search.best_first_search import EQUAL_STEP_TIME_RATIO, MAX_EXPLAINED_ASSIGNMENTS, best_first_search
from mmtrain.plan.search.layer_partition import chain_time_lower_bound, layer_chains, layout_graph, partitioned_layout
from mmtrain.plan.search.mesh_enumeration import bounded_mesh_assignments
from mmtrain.program.schedules.builder import in_flight_microbatches
from tests.plan.exhaustive import Instance, all_cuts, everything, least_step, placed, random_instance, squeezed
from tests.plan.factory import layer_costs_for, recipe

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "cpu": ({}, "cpu-core"),
    "frozen": ({"vision": {"layers": 3, "hidden": 96, "heads": 4, "ffn": 256, "freeze": True}}, "cpu-core"),
    "gpu_nodes_of_two": ({"cluster": {"ranks_per_node": 2}}, "h100-80g"),
    "merged": ({"parallel": {"vision": {"num_microbatches": 2}}}, "cpu-core"),
    "split": ({"parallel": {"vision": {"num_microbatches": 16}}}, "h100-80g"),
    "recomputed": ({"parallel": {"llm": {"recompute": "all"}}}, "cpu-core"),
}


def holds(given: Instance, least: float) -> None:
    """The search finds the best of everything, which takes `least` seconds, and ranks by step time."""
    outcome = best_first_search(given.assignments, given.layer_costs, given.choices, given.machine, at_least=1)
    if least == math.inf:
        assert not outcome.candidates
        return
    assert least <= outcome.candidates[0].step_time_s <= least * EQUAL_STEP_TIME_RATIO
    assert outcome.candidates[0].peak_bytes <= given.machine.memory_bytes
    assert sorted(j.step_time_s for j in outcome.candidates[1:]) == [j.step_time_s for j in outcome.candidates[1:]]
    told = len(outcome.candidates) + len(outcome.rejected)
    assert min(len(given.assignments), MAX_EXPLAINED_ASSIGNMENTS) <= told <= len(given.assignments)


@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_all_is_found(seed: int) -> None:
    given = random_instance(seed, most_cuts=120)
    holds(given, least_step(given))


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_simulates_all_that_could_be_best(seed: int) -> None:
    given = random_instance(seed, most_cuts=60)
    assert least_step(given) == min(judged.step_time_s for judged in everything(given))


@pytest.mark.parametrize("seed", range(100, 104))
def test_the_best_of_all_that_fit_is_found(seed: int) -> None:
    given = squeezed(random_instance(seed, most_cuts=60), 0.8)
    holds(given, least_step(given))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_the_best_of_all_is_found_at_length(seed: int) -> None:
    """The instances of `python -m scripts.bench_plan --only exact`: up to all that the search tries in full."""
    given = random_instance(seed)
    least = [(alone, least_step(alone)) for alone in placed(given)]
    for alone, own in [*least, (given, min(own for _, own in least))]:
        holds(alone, own)


@pytest.mark.parametrize("case", CASES)
def test_ratings_bound_the_simulator_and_bounds_the_ratings(case: str) -> None:
    settings, hardware = recipe(**CASES[case][0]), CASES[case][1]
    layer_costs, choices = layer_costs_for(settings, hardware)
    machine = machine_for(settings, hardware)
    rater, slack, rng = StepTimeEstimator(layer_costs, machine, None), 1 + 1e-9, np.random.default_rng(0)
    errors = []
    for _, assignment in bounded_mesh_assignments(choices, 4):
        chains = layer_chains(assignment, layer_costs, choices)
        cuts = list(all_cuts(chains))
        some = [cuts[at] for at in rng.permutation(len(cuts))[:2]]
        rated = rater.estimate(assignment, chains, some, [None] * len(chains))
        for chosen, rating in zip(some, rated, strict=True):
            layout = partitioned_layout(assignment, layer_costs, chosen)
            simulated = evaluate_layout(layout, layer_costs, machine).step_time_s
            assert 0 < max(map(chain_time_lower_bound, chains)) <= rating * slack, assignment
            assert rating <= simulated * slack, assignment
            errors.append(simulated / rating - 1)
            assert rater.in_flight(assignment, chosen) == in_flight_microbatches(layout_graph(layout, layer_costs))
    assert np.median(errors) < 0.05


def test_memory_decides_where_time_would_not() -> None:
    """A limit between the need of the fastest layout and that of others: another one, that fits, is chosen."""
    settings = recipe(parallel={"vision": {"recompute": "none"}, "llm": {"recompute": "none"}})
    layer_costs, choices = layer_costs_for(settings)
    candidates, machine = list(bounded_mesh_assignments(choices, 3)), machine_for(settings, "cpu-core")
    fastest = best_first_search(candidates, layer_costs, choices, machine, at_least=1).candidates[0]
    small = replace(machine, memory_bytes=fastest.peak_bytes * 0.9)
    outcome = best_first_search(candidates, layer_costs, choices, small, at_least=1)
    assert outcome.candidates[0].peak_bytes <= small.memory_bytes
    assert outcome.candidates[0].step_time_s > fastest.step_time_s


def test_what_memory_demands_is_recomputed_and_no_more() -> None:
    layer_costs, choices = layer_costs_for(recipe(vision=None, llm={"layers": 8}))
    machine = machine_for(recipe(), "cpu-core")
    candidates = [(b, s) for b, s in bounded_mesh_assignments(choices, 2) if str(s) == "unified: tp1 pp2 dp1"]
    peaks, recomputed = [], []
    free = best_first_search(candidates, layer_costs, choices, machine, at_least=1).candidates[0]
    for share in (1.0, 0.9, 0.7):
        small = replace(machine, memory_bytes=share * free.peak_bytes)
        found = best_first_search(candidates, layer_costs, choices, small, at_least=1).candidates[0]
        assert found.peak_bytes <= small.memory_bytes
        peaks.append(found.peak_bytes)
        recomputed.append(sum(len(stage.recompute) for stage in found.layout.units["llm"].stages))
    assert recomputed[0] == 0 < recomputed[1] < recomputed[2]


def test_the_heaviest_group_stands_for_all_where_they_are_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    layer_costs, choices = layer_costs_for(recipe())
    machine = machine_for(recipe(), "cpu-core")
    for _, assignment in bounded_mesh_assignments(choices, 6):
        layout = partitioned_layout(
            assignment, layer_costs, next(all_cuts(layer_chains(assignment, layer_costs, choices)))
        )
        monkeypatch.setattr("mmtrain.plan.estimate.evaluate.MAX_PASSES_OF_ALL_GROUPS", 10**9)
        whole = evaluate_layout(layout, layer_costs, machine).step_time_s
        monkeypatch.setattr("mmtrain.plan.estimate.evaluate.MAX_PASSES_OF_ALL_GROUPS", 0)
        assert evaluate_layout(layout, layer_costs, machine).step_time_s == pytest.approx(whole, rel=0.03), assignment
