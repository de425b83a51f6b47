"""What the evaluator keeps of earlier simulations gives what simulating anew gives."""

import weakref
from dataclasses import fields
from itertools import islice
from typing import Any

import numpy as np
import pytest

from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import simulate_layout, simulate_unless_slow
from mmtrain.planning.layer_costs.layer_costs import UnitLayerCosts
from mmtrain.planning.layer_costs.layer_partition import LayerChain, layer_chains
from mmtrain.planning.planner import search_placements
from mmtrain.planning.search.replicated import enumerate_replicated, fit_replicated
from mmtrain.planning.search.strategies import StrategySearches
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.candidate import Candidate, SearchResults, Simulation
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
