"""What a plan asks of the loader: which work is summed, what it costs, and whether the order in time matters."""

import itertools
from typing import Any

import numpy as np
import pytest

from mmtrain.balance import StepTargets
from mmtrain.costs import TokenLoad, costs_for, input_grad_needed, machine_for, precision_for
from mmtrain.data.loading.step_format import from_json, to_json
from mmtrain.models.model_shape import build_model_shape
from mmtrain.plan import Plan, stage_graph
from mmtrain.plan.artifact.balancing_targets import derive_step_targets, typical_loads
from mmtrain.plan.artifact.marginal_cost import marginal_cost
from mmtrain.plan.artifact.plan import SchedulePlan
from mmtrain.plan.planner import plan
from mmtrain.program import build_1f1b
from mmtrain.program.ir.serialize import action_to_text
from mmtrain.recipe.schema import Recipe
from tests.plan.factory import lengths, recipe
from tests.plan.test_three_units import heard, speech

ALL = {"vision", "llm"}


def planned(settings: Recipe, ranks: int) -> Plan:
    return plan(settings, lengths(), world_size=ranks, hardware="cpu-core", recipe_sha256="f" * 64)


def aimed(parallel: dict[str, Any], ranks: int, **changes: Any) -> tuple[Plan, StepTargets]:
    settings = recipe(parallel=parallel, **changes)
    chosen = planned(settings, ranks)
    return chosen, derive_step_targets(settings, chosen, lengths())


def test_units_on_the_same_ranks_are_one_cost() -> None:
    sizes = {unit: {"tp": 1, "pp": 1, "dp": 4} for unit in ALL}
    chosen, targets = aimed({"placement": "unified"} | sizes, 4)
    assert {u.dp for u in chosen.units.values()} == {4}
    assert [set(load.costs) for load in targets.loads] == [ALL]
    assert not targets.pipeline, "nobody waits for anybody inside a replica"
    assert from_json(StepTargets, to_json(targets)) == targets


def test_units_on_ranks_of_their_own_are_evened_apart_and_ordered_in_time() -> None:
    sizes = {unit: {"tp": 1, "pp": 1, "dp": 2} for unit in ALL}
    _, targets = aimed({"placement": "disaggregated"} | sizes, 4)
    assert [set(load.costs) for load in targets.loads] == [{"vision"}, {"llm"}], "the coarser first"
    assert sum(load.weight for load in targets.loads) == pytest.approx(1, abs=1e-5)
    assert [set(place.forward) for place in targets.pipeline] == [{"vision"}, {"llm"}]


def test_an_encoder_that_serves_all_replicas_asks_nothing_of_them() -> None:
    sizes = {"vision": {"tp": 1, "pp": 1, "dp": 1}, "llm": {"tp": 1, "pp": 1, "dp": 2}}
    _, targets = aimed({"placement": "disaggregated"} | sizes, 3)
    assert [set(load.costs) for load in targets.loads] == [{"llm"}]
    assert set(targets.item_costs) == {"vision"}
    assert len(targets.pipeline) == 2


def test_a_single_replica_has_nobody_to_be_even_with() -> None:
    assert aimed({"placement": "unified"}, 1)[1].loads == ()


def test_ranks_of_a_pipeline_that_do_alike_are_one_load() -> None:
    sizes = {"vision": {"tp": 1, "pp": 1, "dp": 2}, "llm": {"tp": 1, "pp": 2, "dp": 2, "vpp": 1}}
    chosen, targets = aimed({"placement": "disaggregated"} | sizes, 6)
    assert [set(place.forward) for place in targets.pipeline] == [{"vision"}, {"llm"}, {"llm"}]
    assert len(targets.loads) == 2
    assert chosen.units["llm"].pp == 2


def test_other_pipelines_are_ordered_in_time_by_their_timetable() -> None:
    sizes = {"vision": {"tp": 1, "pp": 1, "dp": 1}, "llm": {"tp": 1, "pp": 2, "dp": 1, "vpp": 2}}
    chosen, targets = aimed({"placement": "disaggregated"} | sizes, 3)
    assert not targets.pipeline
    assert targets.schedule_table is not None
    assert [len(line.split()) for line in targets.schedule_table.actions] == [2 * 8, 4 * 8, 4 * 8], (
        "of vision and two chunks each"
    )
    assert {task.unit for task in targets.schedule_table.tasks} == ALL
    assert from_json(StepTargets, to_json(targets)) == targets
    graph = stage_graph(chosen, build_model_shape(recipe(parallel={"placement": "disaggregated"} | sizes)))
    lines = {rank: tuple(map(action_to_text, todo)) for rank, todo in build_1f1b(graph).actions.items()}
    written = SchedulePlan(kind="explicit", num_microbatches=chosen.schedule.num_microbatches, order=lines)
    same = derive_step_targets(recipe(), chosen.model_copy(update={"schedule": written}), lengths())
    assert same.schedule_table == targets.schedule_table, "an order that is written down is another way to say the same"


def test_two_encoders_side_by_side_are_no_chain() -> None:
    settings = speech(parallel={"placement": "disaggregated"})
    chosen = plan(settings, heard(settings), world_size=3, hardware="cpu-core", recipe_sha256="f" * 64)
    targets = derive_step_targets(settings, chosen, heard(settings))
    assert not targets.pipeline
    assert targets.schedule_table is not None
    assert len(targets.schedule_table.actions) == 3


def test_three_units_are_all_priced() -> None:
    settings = speech(parallel={"placement": "unified"})
    chosen = plan(settings, heard(settings), world_size=2, hardware="cpu-core", recipe_sha256="f" * 64)
    targets = derive_step_targets(settings, chosen, heard(settings))
    assert set(targets.item_costs) == {"vision", "audio"}
    assert set(targets.replica_nodes) == set(chosen.units)


def test_prices_add_up_to_what_the_cost_model_says() -> None:
    """A quarter more or less in a microbatch changes its seconds as the prices say."""
    sizes = {unit: {"tp": 1, "pp": 1, "dp": 2} for unit in ALL}
    settings = recipe(parallel={"placement": "disaggregated"} | sizes)
    chosen = planned(settings, 4)
    targets, model, machine = (
        derive_step_targets(settings, chosen, lengths()),
        build_model_shape(settings),
        machine_for(settings, "cpu-core"),
    )
    costs = costs_for(machine, precision_for(settings, machine), None)
    needs, typical = (
        input_grad_needed(model),
        typical_loads(stage_graph(chosen, model), lengths(), settings.data.seq_len),
    )

    def seconds(unit: str, load: TokenLoad) -> float:
        layers = zip(model.unit(unit).layers, needs[unit], strict=True)
        return sum(
            costs.seconds(layer, 1, load, "forward") + costs.seconds(layer, 1, load, "backward", input_grad=needed)
            for layer, needed in layers
        )

    units_of_cost = []
    for load in targets.loads:
        [(unit, price)] = load.costs.items()
        n = typical[unit]
        more, less = (
            TokenLoad(n.tokens + s * n.tokens // 4, n.sum_sq + s * n.sum_sq // 4, n.max_len, n.num_sequences)
            for s in (1, -1)
        )
        told = price.linear * (more.tokens - less.tokens) + price.quadratic * (more.sum_sq - less.sum_sq)
        units_of_cost.append((seconds(unit, more) - seconds(unit, less)) / told)
    assert units_of_cost[0] == pytest.approx(units_of_cost[1], rel=0.05), "all prices are in the same unit of time"


@pytest.mark.parametrize(("linear", "quadratic"), list(itertools.product([0.0, 3e-6], [0.0, 2e-9])))
def test_a_slope_is_exact_where_costs_are_straight(linear: float, quadratic: float) -> None:
    at = TokenLoad(400, 40_000, 100, 4)
    found = marginal_cost(lambda load: linear * load.tokens + quadratic * load.sum_sq, at)
    assert found.linear == pytest.approx(linear, abs=1e-15)
    assert found.quadratic == pytest.approx(quadratic, abs=1e-18)


def test_where_time_does_not_grow_the_mean_is_the_price() -> None:
    found = marginal_cost(lambda _: 0.2, TokenLoad(400, 40_000, 100, 4))
    assert found.linear == pytest.approx(0.2 / 400)
    assert marginal_cost(lambda _: 0.2, TokenLoad(0, 0, 0, 0)).linear == 0


def test_sums_over_a_step_are_exact() -> None:
    """Costs are whole numbers, and a step's sum is far from where floating point would round."""
    _, targets = aimed({"placement": "unified"}, 2)
    tokens = np.full(4096, 384, dtype=np.int64)
    for load in targets.loads:
        for price in load.costs.values():
            assert 0 < int(price.of(tokens).sum()) < 2**53
