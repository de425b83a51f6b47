"""The replicated placement's prediction: against sums written out, exhaustive dealing, and limits it must keep."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.costs import TokenLoad, input_grad_needed, machine_for
from mmtrain.models.model_shape import UnitShape
from mmtrain.plan.planner import plan
from mmtrain.plan.replicated.replicated_step import ReplicatedLayout, ReplicatedPredictor, overlapped_seconds
from tests.plan import factory


def phases(
    num_ranks: int, *, hardware: str = "h100-80g", frozen: bool = False, **recipe: object
) -> ReplicatedPredictor:
    settings = factory.recipe(**recipe)
    layer_costs, _ = factory.layer_costs_for(settings, hardware)
    model = layer_costs.shape
    if frozen:
        model = replace(model, units=tuple(_frozen(u) if u.name == "vision" else u for u in model.units))
    return ReplicatedPredictor(
        model, layer_costs.costs, layer_costs.precision, layer_costs.batches, machine_for(settings, hardware), num_ranks
    )


def _frozen(unit: UnitShape) -> UnitShape:
    return replace(unit, layers=tuple(replace(layer, trainable=False) for layer in unit.layers))


def test_one_rank_and_one_round_is_every_layer_once() -> None:
    one = phases(1)
    found = one.rehearse(ReplicatedLayout(1, 1, 1, frozenset()))
    expected = 0.0
    for groups in one.batches.groups:
        samples = np.concatenate(groups)
        items = one.batches.lengths.items["vision"]
        rows = np.concatenate([np.arange(items.first[s], items.first[s + 1]) for s in samples]).astype(np.int64)
        loads = {"llm": TokenLoad.of(one.batches.lengths.tokens[samples]), "vision": TokenLoad.of(items.tokens[rows])}
        for unit in one.shape.units:
            for layer, needed in zip(unit.layers, input_grad_needed(one.shape)[unit.name], strict=True):
                expected += one.costs.seconds(layer, 1, loads[unit.name], "forward")
                expected += one.costs.seconds(layer, 1, loads[unit.name], "backward", input_grad=needed)
    assert found.step_time_s == pytest.approx(expected / len(one.batches.groups))
    assert found.exposed_s == pytest.approx(0.0, abs=1e-12)
    assert found.dispatch_s == 0.0
    assert found.max_over_mean == {"vision": 1.0, "llm": 1.0}


@given(st.lists(st.tuples(*[st.floats(0, 9)] * 3), min_size=1, max_size=6))
def test_overlapped_layers_follow_their_dependencies(layers: list[tuple[float, float, float]]) -> None:
    compute, gathers, reductions = (list(column) for column in zip(*layers, strict=True))
    # Event by event: one compute stream, one communication stream, and a barrier where layers change.
    clock = gathers[0]
    for i, seconds in enumerate(compute):
        comm = clock
        if i + 1 < len(compute):
            comm += gathers[i + 1]
        if i > 0:
            comm += reductions[i - 1]
        clock = max(clock + seconds, comm)
    found = overlapped_seconds(np.array(compute), np.array(gathers), np.array(reductions))
    assert found == pytest.approx(clock + reductions[-1])


def test_a_frozen_encoder_has_no_backward() -> None:
    trained, frozen = (phases(4, frozen=f).rehearse(ReplicatedLayout(4, 4, 1, frozenset())) for f in (False, True))
    assert frozen.phase_s["vision"] < 0.6 * trained.phase_s["vision"]
    assert frozen.memory.optimizer < trained.memory.optimizer


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_dealing_of_the_items_is_much_evener(num_ranks: int) -> None:
    here = phases(num_ranks, global_batch=1, seq_len=200)
    found = here.rehearse(ReplicatedLayout(num_ranks, 1, 1, frozenset())).max_over_mean["vision"]
    best = []
    for groups in here.batches.groups:
        items = here.batches.lengths.items["vision"]
        rows = np.concatenate([np.arange(items.first[s], items.first[s + 1]) for s in np.concatenate(groups)])
        tokens = items.tokens[rows.astype(np.int64)]
        alone = here.dealing.unit_costs["vision"].of_samples(tokens)
        every = np.array(list(product(range(num_ranks), repeat=len(tokens))))
        fullest = np.max([(every == rank) @ alone for rank in range(num_ranks)], axis=0)
        best.append(float(fullest.min() / alone.sum() * num_ranks))
    assert np.mean(best) - 1e-9 <= found <= np.mean(best) * (4 / 3)


def test_more_ranks_to_a_shard_hold_less_and_never_gather_less() -> None:
    here = phases(16)
    found = [here.rehearse(ReplicatedLayout(16, shard, 1, frozenset())) for shard in (1, 2, 4, 8, 16)]
    state = [r.memory.parameters + r.memory.gradients + r.memory.optimizer for r in found]
    assert state == sorted(state, reverse=True)
    assert state[0] == pytest.approx(16 * state[-1])
    dealt = {(r.dispatch_s, r.max_over_mean["llm"]) for r in found}
    assert len(dealt) == 1, "sharding moves no sample"


def test_every_layout_shown_fits_and_the_fastest_leads() -> None:
    here = phases(8, cluster={"memory_gib": 0.012})
    fitting, smallest = here.best()
    assert smallest is None
    assert all(r.memory.total <= here.machine.memory_bytes for r in fitting)
    times = [r.step_time_s for r in fitting]
    assert times == sorted(times)
    assert len(fitting) < len(list(here.layouts())), "the limit shuts some out"
    tight = phases(8, cluster={"memory_gib": 0.001})
    fitting, smallest = tight.best()
    assert fitting == []
    assert smallest is not None
    line = tight.alternative(1.0)
    assert line.step_time_s is None
    assert line.reason.startswith("does not fit: every rank needs ")


def test_the_plan_shows_it_beside_what_can_be_run() -> None:
    settings = factory.recipe()
    found = plan(settings, factory.lengths(), world_size=4, hardware="h100-80g", recipe_sha256="x")
    [line] = [a for a in found.alternatives if a.placement == "replicated"]
    assert found.placement != "replicated"
    assert line.summary.startswith("replicated: 4 ranks, shard ")
    assert line.reason.endswith("predicted only, not runnable yet")
    forced = factory.recipe(parallel={"placement": "unified"})
    found = plan(forced, factory.lengths(), world_size=4, hardware="h100-80g", recipe_sha256="x")
    assert not [a for a in found.alternatives if a.placement == "replicated"]
