"""What the evaluator keeps of earlier simulations gives what simulating anew gives."""

import weakref
from collections import Counter
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from mmtrain.planning.evaluate.evaluator import Evaluator, RecomputeToFit
from mmtrain.planning.evaluate.layout_simulation import simulate_layout, simulate_unless_slow
from mmtrain.planning.layer_costs.layer_costs import UnitLayerCosts
from mmtrain.planning.layer_costs.layer_partition import LayerChain, layer_chains
from mmtrain.planning.planner import search_placements
from mmtrain.planning.search.replicated import enumerate_replicated, fit_replicated
from mmtrain.planning.search.strategies import StrategySearches
from mmtrain.planning.search.variants import variants_of, with_activations_again, with_expert_ranks
from mmtrain.planning.space.budget import DEFAULT_BUDGET, QUICK_BUDGET, SearchBudget
from mmtrain.planning.space.candidate import AssignmentSizes, Candidate, SearchResults, Simulation
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.program import Program
from mmtrain.program.schedules.lower import lower
from tests.planning.exhaustive import all_candidates, everything, random_instance
from tests.planning.factory import evaluator_for, problem_for, recipe


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_kept_programs_and_simulations_change_nothing(seed: int) -> None:
    instance = random_instance(seed, max_partitions=60)
    evaluator = instance.evaluator
    steps = []
    for candidate in islice(everything(instance), 12):
        anew = simulate_layout(candidate.layout, candidate.schedule, evaluator.layer_costs, evaluator.problem.hardware)
        again = evaluator.simulate(candidate)
        for simulation in (candidate.simulation, again.simulation):
            assert simulation is not None
            assert simulation.step_time_s == anew.step_time_s
            assert simulation.bubbles == anew.bubbles
            assert simulation.graph == anew.graph
        steps.append(anew.step_time_s)
    assert len(set(steps)) > 2


def test_a_layout_that_a_limit_ended_is_simulated_again_for_a_higher_limit_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instance = random_instance(4, max_partitions=60)
    evaluator, candidate = instance.evaluator, next(iter(everything(instance)))
    fitted = evaluator.simulate(candidate)
    assert fitted.simulation is not None
    first_batch_s = fitted.simulation.first_batch_step_s
    anew = Evaluator(evaluator.problem, evaluator.budget, evaluator.layer_costs)
    limits = []

    def counted(*args: object, max_first_batch_s: float, **kwargs: object) -> Simulation | None:
        limits.append(max_first_batch_s)
        return simulate_unless_slow(*args, max_first_batch_s=max_first_batch_s, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("mmtrain.planning.evaluate.evaluator.simulate_unless_slow", counted)
    shares = (0.5, 0.9, 0.7, 0.9, 1.1, 0.9, 2.0)
    found = [anew.simulate_unless_slow(candidate, share * first_batch_s) for share in shares]
    assert limits == [share * first_batch_s for share in (0.5, 0.9, 1.1)]
    assert [candidate is not None for candidate in found] == [share > 1 for share in shares]


def test_sizes_of_shards_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = Evaluator(problem_for(recipe(parallel={"placement": "replicated"}), "h100-80g", 16))
    candidates = [candidate for [candidate, *_] in enumerate_replicated(evaluator.problem, evaluator)]
    of_ranks = [c.assignment for c in candidates if c.assignment.meshes["llm"].tp == 2]
    alike = [a for a in of_ranks if a.dispatch == "all" and not a.encoder_first]
    by_shard = {assignment.shard: evaluator.enumerated(assignment) for assignment in alike}
    assert len(by_shard) > 2
    num_built = 0

    def counted(*args: Any, **kwargs: Any) -> Program:
        nonlocal num_built
        num_built += 1
        return lower(*args, **kwargs)

    monkeypatch.setattr("mmtrain.planning.evaluate.layout_simulation.lower", counted)
    steps = {}
    for shard, candidate in by_shard.items():
        fitted = fit_replicated(candidate, evaluator)
        assert isinstance(fitted, Candidate)
        steps[shard] = evaluator.simulate(fitted).step_time_s
    assert num_built == 1
    for shard, candidate in by_shard.items():
        anew = Evaluator(evaluator.problem, evaluator.budget, evaluator.layer_costs)
        fitted = fit_replicated(candidate, anew)
        assert isinstance(fitted, Candidate)
        assert anew.simulate(fitted).step_time_s == steps[shard]
    assert len(set(steps.values())) > 1


def test_chains_that_assignments_share_are_those_of_each_by_itself() -> None:
    evaluator = evaluator_for(recipe())
    of_units = [c for c in all_candidates(evaluator, 8) if c.placement == "disaggregated"]
    shared: set[LayerChain] = set()
    num_chains = 0
    for candidate in of_units:
        anew = layer_chains(candidate.assignment, evaluator.layer_costs, evaluator.problem.choices)
        known = evaluator.layer_chains(candidate)
        num_chains += len(known)
        for chain, other in zip(known, anew, strict=True):
            shared.add(chain)
            assert (chain.units, chain.bounds, chain.masks) == (other.units, other.bounds, other.masks)
            assert (chain.pp, chain.vpp, chain.num_microbatches) == (other.pp, other.vpp, other.num_microbatches)
            assert np.array_equal(chain.round_trip_s, other.round_trip_s)
            names = [field.name for field in fields(UnitLayerCosts)]
            assert all(np.array_equal(getattr(chain.costs, name), getattr(other.costs, name)) for name in names)
            assert chain.anchor == other.anchor
    assert len(shared) < num_chains / 2


def test_what_a_first_search_keeps_is_freed_before_one_with_other_activations_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = problem_for(recipe(), "h100-80g", 4)
    first: list[weakref.ref[Evaluator]] = []
    is_kept: list[bool] = []
    search = StrategySearches.search

    def again(evaluator: Evaluator, found: SearchResults) -> Evaluator:
        first.append(weakref.ref(evaluator))
        assert found.best is not None
        return Evaluator(problem)

    def watched(searches: StrategySearches, max_strategies: int | None = None) -> SearchResults:
        if max_strategies is None:
            is_kept.append(first[0]() is not None)
        return search(searches, max_strategies)

    monkeypatch.setattr("mmtrain.planning.planner.with_faster_activations", again)
    monkeypatch.setattr(StrategySearches, "search", watched)
    _, results = search_placements(problem, DEFAULT_BUDGET)
    assert results.best is not None
    assert is_kept == [False]


def near_anchors_only(budget: SearchBudget) -> SearchBudget:
    """Return the budget of a search that tries no model in full, however small."""
    return replace(budget, partitions=replace(budget.partitions, max_partitions_to_try_all=0))


def steps(results: SearchResults) -> list[tuple[str, float]]:
    return [(str(candidate.assignment), candidate.step_time_s) for candidate in results.candidates]


def test_a_whole_search_after_a_quick_one_finds_the_same_and_works_out_less(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_for(recipe(parallel={"placement": "unified"}, global_batch=32), "h100-80g", 16)
    worked_out: Counter[AssignmentSizes] = Counter()
    find = Evaluator._find_recompute_to_fit

    def counted(evaluator: Evaluator, candidate: Candidate) -> RecomputeToFit:
        worked_out[candidate.assignment.sizes] += 1
        return find(evaluator, candidate)

    monkeypatch.setattr(Evaluator, "_find_recompute_to_fit", counted)
    budget = near_anchors_only(DEFAULT_BUDGET)
    anew = StrategySearches(Evaluator(problem, budget)).search()
    num_anew = worked_out.total()
    worked_out.clear()
    evaluator = Evaluator(problem, budget)
    quick = evaluator.with_budget(near_anchors_only(QUICK_BUDGET), PlanRequest(num_alternatives=0))
    assert StrategySearches(quick).search().best is not None
    num_quick = worked_out.total()
    assert num_quick > 0
    assert steps(StrategySearches(evaluator).search()) == steps(anew)
    assert worked_out.total() < num_quick + num_anew
    assert set(worked_out.values()) == {1}


def test_variants_of_activations_share_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_for(recipe(parallel={"placement": "unified"}), "h100-80g", 4)
    again = with_activations_again(problem)
    assert again is not None
    evaluator = next(variants_of(problem, DEFAULT_BUDGET))
    running_again = next(variants_of(again, DEFAULT_BUDGET, evaluator.layer_costs.loads, evaluator.known_schedules))
    built: list[Program] = []

    def counted(program: Program, *args: Any) -> Program:
        built.append(program)
        return lower(program, *args)

    monkeypatch.setattr("mmtrain.planning.evaluate.layout_simulation.lower", counted)
    first = StrategySearches(evaluator).search().candidates
    num_built = len(built)
    assert num_built > 0
    others = StrategySearches(running_again).search().candidates
    assert len(built) < num_built + len(others)
    unshared = StrategySearches(Evaluator(again, DEFAULT_BUDGET, running_again.layer_costs)).search().candidates
    assert [c.step_time_s for c in others] == [c.step_time_s for c in unshared]
    assert [c.step_time_s for c in others] != [c.step_time_s for c in first]


def test_the_search_of_a_mixture_goes_on_from_what_the_choice_of_expert_ranks_knows() -> None:
    mixture = {"layers": 4, "moe": {"experts": 8, "top_k": 2, "ffn": 64}}
    settings = recipe(vision=None, llm=mixture, parallel={"placement": "unified"})
    problem, known = with_expert_ranks(problem_for(settings, world_size=4), DEFAULT_BUDGET)
    assert known is not None
    assert known.problem is problem
    assert problem.choices["llm"].ep == known.problem.choices["llm"].ep
    _, anew = search_placements(problem, DEFAULT_BUDGET)
    evaluator, results = search_placements(problem, DEFAULT_BUDGET, known)
    assert evaluator is known
    assert steps(results) == steps(anew)
    dense = problem_for(recipe(), world_size=4)
    assert with_expert_ranks(dense, DEFAULT_BUDGET) == (dense, None)
