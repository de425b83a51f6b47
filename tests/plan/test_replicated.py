"""The prediction of the replicated placement: against explicit sums, exhaustive dispatch, and limits it must keep."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import SampleLengths
from mmtrain.costs import TokenLoad, input_grad_needed, machine_for, num_trained_parameters, preset
from mmtrain.costs.hardware import GIB
from mmtrain.costs.sharded_layers import overlapped_seconds
from mmtrain.errors import PlanError
from mmtrain.models.model_shape import UnitShape
from mmtrain.plan.budget import DEFAULT_BUDGET
from mmtrain.plan.estimate.evaluator import Evaluator
from mmtrain.plan.formulate import formulate_problem
from mmtrain.plan.planner import plan_recipe
from mmtrain.plan.replicated.replicated_search import ReplicatedStrategy
from mmtrain.plan.replicated.replicated_step import (
    NUM_REPLICATED_COMMUNICATORS,
    ReplicatedLayout,
    ReplicatedPredictor,
)
from tests.plan import factory


def predictor(
    num_ranks: int, *, hardware: str = "h100-80g", frozen: bool = False, **recipe: object
) -> ReplicatedPredictor:
    settings = factory.recipe(**recipe)
    layer_costs, _ = factory.layer_costs_for(settings, hardware)
    model = layer_costs.shape
    if frozen:
        model = replace(model, units=tuple(_frozen(u) if u.name == "vision" else u for u in model.units))
    return ReplicatedPredictor(
        model,
        layer_costs.costs,
        layer_costs.precision,
        layer_costs.state_bytes,
        layer_costs.batches,
        machine_for(settings, hardware),
        num_ranks,
    )


def _frozen(unit: UnitShape) -> UnitShape:
    return replace(unit, layers=tuple(replace(layer, trainable=False) for layer in unit.layers))


def test_one_rank_and_one_round_runs_every_layer_once() -> None:
    single = predictor(1)
    prediction = single.predict(ReplicatedLayout(1, 1, 1, frozenset()))
    expected = 0.0
    lengths = single.batches.lengths
    target_share = lengths.targets.sum() / lengths.tokens.sum()
    for groups in single.batches.groups:
        samples = np.concatenate(groups)
        tokens = lengths.tokens[samples]
        items = lengths.items["vision"]
        rows = np.concatenate([np.arange(items.first[s], items.first[s + 1]) for s in samples]).astype(np.int64)
        loads = {
            "llm": replace(TokenLoad.of(tokens), targets=round(tokens.sum() * target_share)),
            "vision": TokenLoad.of(items.tokens[rows]),
        }
        for unit in single.shape.units:
            for layer, needed in zip(unit.layers, input_grad_needed(single.shape)[unit.name], strict=True):
                expected += single.costs.seconds(layer, 1, loads[unit.name], "forward")
                expected += single.costs.seconds(layer, 1, loads[unit.name], "backward", input_grad=needed)
    num_trained = sum(num_trained_parameters(layer) for unit in single.shape.units for layer in unit.layers)
    expected_s = expected / len(single.batches.groups) + single.costs.optimizer(num_trained)
    assert prediction.step_time_s == pytest.approx(expected_s)
    assert prediction.exposed_s == pytest.approx(0.0, abs=1e-12)
    assert prediction.dispatch_s == 0.0
    assert prediction.max_over_mean == {"vision": 1.0, "llm": 1.0}


def test_the_optimizer_updates_a_shard_after_all_ranks_have_summed_the_norm() -> None:
    replicated = predictor(16)
    whole, shared = (replicated.predict(ReplicatedLayout(16, shard, 1, frozenset())) for shard in (1, 16))
    num_trained = sum(num_trained_parameters(layer) for unit in replicated.shape.units for layer in unit.layers)
    update_s = replicated.costs.optimizer(num_trained)
    computed = [p.step_time_s - sum(p.phase_s.values()) - p.dispatch_s for p in (whole, shared)]
    assert computed[0] - computed[1] == pytest.approx(update_s * 15 / 16)
    assert computed[1] > update_s / 16, "the norm takes a collective of all ranks"


@given(st.lists(st.tuples(*[st.floats(0, 9)] * 3), min_size=1, max_size=6), st.floats(0, 1))
def test_overlapped_layers_follow_their_dependencies(layers: list[tuple[float, float, float]], slowdown: float) -> None:
    compute, gathers, reductions = (list(column) for column in zip(*layers, strict=True))
    # Event by event: one compute stream, one communication stream, and a barrier where layers change.
    clock = gathers[0]
    for i, seconds in enumerate(compute):
        comm = clock
        if i + 1 < len(compute):
            comm += gathers[i + 1]
        if i > 0:
            comm += reductions[i - 1]
        clock = max(clock + seconds + slowdown * min(seconds, comm - clock), comm)
    elapsed = overlapped_seconds(np.array(compute), np.array(gathers), np.array(reductions), slowdown)
    assert elapsed == pytest.approx(clock + reductions[-1])


def test_a_frozen_encoder_has_no_backward() -> None:
    trained, frozen = (predictor(4, frozen=f).predict(ReplicatedLayout(4, 4, 1, frozenset())) for f in (False, True))
    assert frozen.phase_s["vision"] < 0.6 * trained.phase_s["vision"]
    assert frozen.memory.optimizer < trained.memory.optimizer


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_items_are_balanced_within_four_thirds_of_the_best(num_ranks: int) -> None:
    replicated = predictor(num_ranks, global_batch=1, seq_len=200)
    max_over_mean = replicated.predict(ReplicatedLayout(num_ranks, 1, 1, frozenset())).max_over_mean["vision"]
    best = []
    for groups in replicated.batches.groups:
        items = replicated.batches.lengths.items["vision"]
        rows = np.concatenate([np.arange(items.first[s], items.first[s + 1]) for s in np.concatenate(groups)])
        tokens = items.tokens[rows.astype(np.int64)]
        item_costs = replicated.dispatcher.unit_costs["vision"].of_samples(tokens)
        assignments = np.array(list(product(range(num_ranks), repeat=len(tokens))))
        max_costs = np.max([(assignments == rank) @ item_costs for rank in range(num_ranks)], axis=0)
        best.append(float(max_costs.min() / item_costs.sum() * num_ranks))
    assert np.mean(best) - 1e-9 <= max_over_mean <= np.mean(best) * (4 / 3)


def test_larger_shard_groups_hold_less_state_and_dispatch_the_same() -> None:
    replicated = predictor(16)
    predictions = [replicated.predict(ReplicatedLayout(16, shard, 1, frozenset())) for shard in (1, 2, 4, 8, 16)]
    state = [p.memory.parameters + p.memory.gradients + p.memory.optimizer for p in predictions]
    assert state == sorted(state, reverse=True)
    assert state[0] == pytest.approx(16 * state[-1])
    dispatch = {(p.dispatch_s, p.max_over_mean["llm"]) for p in predictions}
    assert len(dispatch) == 1, "sharding moves no sample"


def test_predicted_layouts_fit_and_the_fastest_comes_first() -> None:
    communicators_gib = NUM_REPLICATED_COMMUNICATORS * preset("h100-80g").communicator_bytes / GIB
    limited = predictor(8, cluster={"memory_gib": 0.012 + communicators_gib})
    fitting, smallest = limited.predict_all()
    assert smallest is None
    assert all(p.memory.total <= limited.machine.memory_bytes for p in fitting)
    times = [p.step_time_s for p in fitting]
    assert times == sorted(times)
    assert len(fitting) < len(list(limited.layouts())), "some exceed the limit"
    tight = predictor(8, cluster={"memory_gib": 0.001 + communicators_gib})
    fitting, smallest = tight.predict_all()
    assert fitting == []
    assert smallest is not None
    alternative = tight.alternative(1.0)
    assert alternative.step_time_s is None
    assert alternative.reason.startswith("does not fit: every rank needs ")


def test_the_plan_lists_it_among_the_alternatives() -> None:
    settings = factory.recipe()
    chosen = plan_recipe(settings, factory.lengths(), world_size=4, hardware="h100-80g", recipe_sha256="x")
    [alternative] = [a for a in chosen.alternatives if a.placement == "replicated"]
    assert chosen.placement != "replicated"
    assert alternative.summary.startswith("replicated: 4 ranks, shard ")
    assert alternative.reason.endswith("predicted only, not runnable yet")
    forced = factory.recipe(parallel={"placement": "unified"})
    chosen = plan_recipe(forced, factory.lengths(), world_size=4, hardware="h100-80g", recipe_sha256="x")
    assert not [a for a in chosen.alternatives if a.placement == "replicated"]


def _uniform_texts() -> SampleLengths:
    """Return samples of one length, so that dispatch has nothing to balance."""
    tokens = np.full(300, 96, dtype=np.int64)
    return SampleLengths(tokens, tokens // 2, {})


def test_the_simulated_step_is_the_predicted_one_where_there_is_nothing_to_dispatch() -> None:
    settings = factory.recipe(vision=None, parallel={"placement": "replicated"}, global_batch=32)
    problem = formulate_problem(settings, _uniform_texts(), world_size=16, hardware="h100-80g", recipe_sha256="x")
    evaluator = Evaluator(problem)
    results = ReplicatedStrategy().search(problem, evaluator, DEFAULT_BUDGET, None)
    predictor = ReplicatedPredictor.of(problem)
    assert {candidate.assignment.shard for candidate in results.candidates} == {1, 2, 4, 8, 16}
    for candidate in results.candidates:
        num_rounds = candidate.layout.num_microbatches["llm"]
        layout = ReplicatedLayout(16, candidate.assignment.shard or 0, num_rounds, frozenset())
        prediction = predictor.predict(layout)
        assert candidate.step_time_s == pytest.approx(prediction.step_time_s, rel=1e-6)
        held, expected = candidate.memory[0], prediction.memory
        state = (held.parameters, held.gradients, held.optimizer)
        assert state == pytest.approx((expected.parameters, expected.gradients, expected.optimizer))


def test_a_plan_of_the_placement_is_proved_and_says_its_shards() -> None:
    settings = factory.recipe(parallel={"placement": "replicated", "shard": 2})
    chosen = plan_recipe(settings, factory.lengths(), world_size=4, hardware="cpu-core", recipe_sha256="x")
    assert chosen.placement == "replicated"
    assert {unit.shard for unit in chosen.units.values()} == {2}
    whole = settings.model_copy(update={"parallel": settings.parallel.model_copy(update={"shard": "all"})})
    sharded = plan_recipe(whole, factory.lengths(), world_size=4, hardware="cpu-core", recipe_sha256="x")
    kinds = [next(iter(p.predicted.memory_kinds_gib.values()))["optimizer"] for p in (chosen, sharded)]
    assert kinds[0] == pytest.approx(2 * kinds[1], abs=2e-4)


def test_without_a_mesh_of_the_placement_the_plan_is_refused() -> None:
    settings = factory.recipe(parallel={"placement": "replicated"})
    with pytest.raises(PlanError, match=r"replicated: every unit runs on all 3 ranks with tp 1, pp 1 and dp 3"):
        plan_recipe(settings, factory.lengths(), world_size=3, hardware="cpu-core", recipe_sha256="x")
    three = factory.recipe(parallel={"placement": "replicated", "shard": 3})
    with pytest.raises(PlanError, match=r"parallel.shard 3 does not divide 4 ranks"):
        plan_recipe(three, factory.lengths(), world_size=4, hardware="cpu-core", recipe_sha256="x")
    tight = factory.recipe(parallel={"placement": "replicated"}, cluster={"memory_gib": 0.004})
    with pytest.raises(
        PlanError, match=r"replicated: 4 ranks, shard 4, 2 mini-batches, dispatch all: does not fit with"
    ):
        plan_recipe(tight, factory.lengths(), world_size=4, hardware="cpu-core", recipe_sha256="x")
