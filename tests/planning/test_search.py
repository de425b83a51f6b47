"""The search against exhaustive search, and its estimates against the simulator."""

import math
from dataclasses import replace
from itertools import starmap
from typing import Any

import numpy as np
import pytest

from mmtrain.planning.artifact.plan import AS_FAST_RATIO
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_partition import (
    chain_time_lower_bound,
    layout_graph,
    partition_time_lower_bound,
    partitioned_layout,
    whole_root,
)
from mmtrain.planning.search.best_first_search import AllocatedCandidates, BestFirstSearch, SearchNode
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.candidate import EQUAL_STEP_TIME_RATIO, Candidate
from mmtrain.program.schedules.builder import in_flight_microbatches
from tests.planning.exhaustive import (
    Instance,
    all_candidates,
    all_partitions,
    by_placement,
    everything,
    least_step,
    random_instance,
    squeezed,
)
from tests.planning.factory import evaluator_for, recipe, simulated, with_memory
from tests.plans import best_first_search

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "cpu": ({}, "cpu-core"),
    "frozen": ({"vision": {"layers": 3, "hidden": 96, "heads": 4, "ffn": 256, "freeze": True}}, "cpu-core"),
    "gpu_nodes_of_two": ({"cluster": {"ranks_per_node": 2}}, "h100-80g"),
    "merged": ({"parallel": {"vision": {"num_microbatches": 2}}}, "cpu-core"),
    "split": ({"parallel": {"vision": {"num_microbatches": 16}}}, "h100-80g"),
    "recomputed": ({"parallel": {"llm": {"recompute": "all"}}}, "cpu-core"),
    "small_buckets": (
        {"parallel": {"bucket_parameters": 1, "llm": {"recompute": "all"}}, "cluster": {"ranks_per_node": 1}},
        "h100-80g",
    ),
    "buckets_of_some_layers": ({"parallel": {"bucket_parameters": 300_000}}, "cpu-core"),
}


def holds(instance: Instance, fastest_s: float) -> None:
    """Check that the search finds the fastest plan, which takes `fastest_s`, ranks by step time and chooses by that."""
    results = best_first_search(AllocatedCandidates(instance.candidates), instance.evaluator, num_simulated=1)
    if fastest_s == math.inf:
        assert not results.candidates
        return
    best, *others = results.candidates
    found_s = min(candidate.step_time_s for candidate in results.candidates)
    assert fastest_s <= found_s <= fastest_s * EQUAL_STEP_TIME_RATIO
    assert best.step_time_s <= found_s * AS_FAST_RATIO
    assert best.peak_bytes <= instance.evaluator.memory_bytes
    assert sorted(other.step_time_s for other in others) == [other.step_time_s for other in others]
    num_explained = len(results.candidates) + len(results.rejected)
    max_unsearched = DEFAULT_BUDGET.explanations.max_unsearched
    assert min(len(instance.candidates), max_unsearched) <= num_explained <= len(instance.candidates)


@pytest.mark.parametrize("seed", [0, 3, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 4))])
def test_the_search_finds_the_fastest_of_all_plans(seed: int) -> None:
    instance = random_instance(seed, max_partitions=120)
    holds(instance, least_step(instance))


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 2))])
def test_every_placement_is_ranked_by_its_best_plan(seed: int) -> None:
    instance = random_instance(seed, max_partitions=120)
    results = best_first_search(AllocatedCandidates(instance.candidates), instance.evaluator, num_simulated=1)
    for alone in by_placement(instance):
        placement = alone.candidates[0].placement
        ranked_s = min((c.step_time_s for c in results.candidates if c.placement == placement), default=math.inf)
        assert ranked_s <= least_step(alone) * EQUAL_STEP_TIME_RATIO


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 3, 4, 5))])
def test_within_one_percent_the_simplest_mechanism_is_chosen(seed: int) -> None:
    """Compare with the fastest plan of each complexity level, found by exhaustive search."""
    instance = random_instance(seed, max_partitions=60)
    fastest_s: dict[int, float] = {}
    for candidate in everything(instance):
        level = candidate.assignment.complexity_level
        fastest_s[level] = min(candidate.step_time_s, fastest_s.get(level, math.inf))
    limit_s = min(fastest_s.values()) * AS_FAST_RATIO
    best = best_first_search(AllocatedCandidates(instance.candidates), instance.evaluator, num_simulated=1).best
    assert best is not None
    assert best.assignment.complexity_level == min(
        number for number, seconds in fastest_s.items() if seconds <= limit_s
    )
    assert best.step_time_s <= fastest_s[best.assignment.complexity_level] * EQUAL_STEP_TIME_RATIO


@pytest.mark.parametrize("seed", [5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5))])
def test_the_oracle_skips_no_plan_that_could_be_the_fastest(seed: int) -> None:
    instance = random_instance(seed, max_partitions=60)
    assert least_step(instance) == min(candidate.step_time_s for candidate in everything(instance))


@pytest.mark.parametrize("seed", [103, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 103))])
def test_the_search_finds_the_fastest_of_all_plans_that_fit(seed: int) -> None:
    instance = squeezed(random_instance(seed, max_partitions=60), 0.8)
    holds(instance, least_step(instance))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_the_search_finds_the_fastest_of_all_plans_in_many_instances(seed: int) -> None:
    """Search half of the instances of `python -m scripts.bench_plan --only exact`, which the search tries in full."""
    full_instance = random_instance(seed)
    fastest_by_placement = [(part, least_step(part)) for part in by_placement(full_instance)]
    for instance, seconds in [
        *fastest_by_placement,
        (full_instance, min(seconds for _, seconds in fastest_by_placement)),
    ]:
        holds(instance, seconds)


@pytest.mark.parametrize("num_partitions", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["one", "two"])
@pytest.mark.parametrize("case", CASES)
def test_estimates_bound_the_simulator_and_lower_bounds_the_estimates(case: str, num_partitions: int) -> None:
    """Compare so many partitions of each assignment of meshes."""
    evaluator = evaluator_for(recipe(**CASES[case][0]), CASES[case][1])
    layer_costs = evaluator.layer_costs
    estimator = evaluator.estimator(None)
    slack = 1 + 1e-9
    rng = np.random.default_rng(0)
    errors = []
    for candidate in all_candidates(evaluator, 4):
        assignment = candidate.assignment
        chains = evaluator.layer_chains(candidate)
        partitions = list(all_partitions(chains))
        chosen = [partitions[i] for i in rng.permutation(len(partitions))[:num_partitions]]
        estimates = estimator.estimate(assignment, chains, chosen, [None] * len(chains))
        for partition, estimate_s in zip(chosen, estimates, strict=True):
            layout = partitioned_layout(assignment, layer_costs, partition)
            step_time_s = simulated(layout, evaluator).step_time_s
            assert 0 < max(map(chain_time_lower_bound, chains)) <= estimate_s * slack, assignment
            busiest_s = max(starmap(partition_time_lower_bound, zip(chains, partition, strict=True)))
            assert busiest_s <= estimate_s * slack, assignment
            assert estimate_s <= step_time_s * slack, assignment
            errors.append(step_time_s / estimate_s - 1)
            expected = in_flight_microbatches(layout_graph(layout, layer_costs))
            assert estimator.in_flight(assignment, partition) == expected
    assert np.median(errors) < 0.05


def fastest_fitting(candidates: list[Candidate], evaluator: Evaluator) -> Candidate:
    best = best_first_search(AllocatedCandidates(candidates), evaluator, num_simulated=1).best
    assert best is not None
    return best


def test_a_slower_layout_is_chosen_where_the_fastest_does_not_fit() -> None:
    """Set a limit between the need of the fastest layout and that of others, so that another layout is chosen."""
    settings = recipe(parallel={"vision": {"recompute": "none"}, "llm": {"recompute": "none"}})
    evaluator = evaluator_for(settings)
    candidates = all_candidates(evaluator, 3)
    fastest = fastest_fitting(candidates, evaluator)
    small = with_memory(evaluator, fastest.peak_bytes * 0.9)
    fitting = fastest_fitting(candidates, small)
    assert fitting.peak_bytes <= small.memory_bytes
    assert fitting.step_time_s > fastest.step_time_s


def test_as_few_layers_are_recomputed_as_memory_demands() -> None:
    evaluator = evaluator_for(recipe(vision=None, llm={"layers": 8}))
    candidates = [c for c in all_candidates(evaluator, 2) if str(c.assignment) == "unified: tp1 pp2 dp1"]
    num_recomputed = []
    free = fastest_fitting(candidates, evaluator)
    for share in (1.0, 0.9, 0.7):
        small = with_memory(evaluator, share * free.peak_bytes)
        fitting = fastest_fitting(candidates, small)
        assert fitting.peak_bytes <= small.memory_bytes
        num_recomputed.append(fitting.layout.units["llm"].num_recomputed)
    assert num_recomputed[0] == 0 < num_recomputed[1] < num_recomputed[2]


def test_the_heaviest_group_represents_all_of_a_very_large_batch() -> None:
    evaluator = evaluator_for(recipe())
    step_times: list[list[float]] = []
    for max_passes in (10**9, 0):
        evaluation = replace(DEFAULT_BUDGET.evaluation, max_passes_of_all_groups=max_passes)
        budget = replace(DEFAULT_BUDGET, evaluation=evaluation)
        limited = Evaluator(evaluator.problem, budget, evaluator.layer_costs)
        step_times.append([])
        for candidate in all_candidates(evaluator, 4):
            partition = next(all_partitions(evaluator.layer_chains(candidate)))
            layout = partitioned_layout(candidate.assignment, evaluator.layer_costs, partition)
            step_times[-1].append(simulated(layout, limited).step_time_s)
    assert step_times[1] == pytest.approx(step_times[0], rel=0.03)


@pytest.mark.parametrize(("value", "degree", "root"), [(64, 3, 4), (63, 3, 3), (160, 2, 12), (10**6, 6, 10), (1, 5, 1)])
def test_roots_of_powers_are_whole(value: int, degree: int, root: int) -> None:
    assert whole_root(value, degree) == root


def test_a_runner_up_that_does_not_fit_is_not_queued_again(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = random_instance(3, max_partitions=120)
    best = best_first_search(AllocatedCandidates(instance.candidates), instance.evaluator, num_simulated=1).best
    assert best is not None
    assert best.partition is not None
    faster = Candidate(best.id, best.assignment).partitioned(best.partition).estimated(best.step_time_s / 2)
    search = BestFirstSearch(AllocatedCandidates([]), instance.evaluator, num_simulated=1)
    search.is_exhaustive = False
    search.best = {best.id: best}
    search.runner_ups = {best.id: [faster, faster, faster]}
    tried: list[Candidate] = []
    monkeypatch.setattr(search, "_try_to_fit", tried.append)  # returns None: it does not fit
    search.simulate_runner_ups()
    assert len(tried) == 3
    assert not search.queue


def test_simulated_candidates_leave_room_for_explanations(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = random_instance(3, max_partitions=120)
    results = best_first_search(AllocatedCandidates(instance.candidates), instance.evaluator, num_simulated=1)
    assert results.best is not None
    budget = instance.evaluator.budget
    explanations = replace(budget.explanations, max_unsearched=1)
    monkeypatch.setattr(instance.evaluator, "budget", replace(budget, explanations=explanations))
    search = BestFirstSearch(AllocatedCandidates([]), instance.evaluator, num_simulated=1)
    search.best = {results.best.id: results.best}
    others = [candidate for candidate in instance.candidates if candidate.id != results.best.id]
    search.queue = [SearchNode(results.best.step_time_s, candidate) for candidate in others]
    assert [rejected.candidate.id for rejected in search.unsearched()] == [others[0].id]


@pytest.mark.parametrize("limits", [{"max_first_batch_ratio": 0.0}, {"max_passes_of_ranked": 0}])
def test_layouts_that_are_put_off_are_simulated_where_their_placement_is_searched(limits: dict[str, float]) -> None:
    instance = random_instance(3, max_partitions=120)
    partitions = replace(instance.evaluator.budget.partitions, max_partitions_to_try_all=0, **limits)
    evaluator = Evaluator(instance.evaluator.problem, replace(instance.evaluator.budget, partitions=partitions))
    search = BestFirstSearch(AllocatedCandidates(instance.candidates), evaluator, num_simulated=6)
    search.find_fastest()
    num_put_off = len(search.put_off)
    assert num_put_off
    search.search_losing_placements()
    assert len(search.put_off) < num_put_off
    ranked = {candidate.placement for candidate in search.results().candidates}
    assert ranked == {candidate.placement for candidate in instance.candidates}
