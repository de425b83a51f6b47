"""Step targets of a plan: which work is balanced together, its costs, and whether the order in time matters."""

import itertools
from typing import Any

import numpy as np
import pytest

from mmtrain.balance import StepTargets
from mmtrain.costs import TokenLoad, costs_for, input_grad_needed, machine_for, precision_for
from mmtrain.costs.cost_model import LayerWork
from mmtrain.data.loading.step_format import from_json, to_json
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning import Plan, stage_graph
from mmtrain.planning.artifact.balancing_targets import derive_step_targets, marginal_cost, typical_loads
from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.program import build_1f1b
from mmtrain.program.ir.serialize import action_to_text
from mmtrain.recipe.settings.schema import Recipe
from tests.planning.factory import lengths, recipe
from tests.planning.test_three_units import heard, speech
from tests.plans import plan_recipe

UNITS = {"vision", "llm"}


def planned(settings: Recipe, ranks: int) -> Plan:
    return plan_recipe(settings, lengths(), world_size=ranks, hardware="cpu-core", recipe_sha256="f" * 64)


def planned_targets(parallel: dict[str, Any], ranks: int, **changes: Any) -> tuple[Plan, StepTargets]:
    settings = recipe(parallel=parallel, **changes)
    chosen = planned(settings, ranks)
    return chosen, derive_step_targets(settings, chosen, lengths())


def test_units_on_the_same_ranks_are_balanced_by_their_sum() -> None:
    sizes = {unit: {"tp": 1, "pp": 1, "dp": 4} for unit in UNITS}
    chosen, targets = planned_targets({"placement": "unified"} | sizes, 4)
    assert {u.dp for u in chosen.units.values()} == {4}
    assert [set(load.costs) for load in targets.loads] == [UNITS]
    assert not targets.pipeline, "no rank waits for another inside a replica"
    assert from_json(StepTargets, to_json(targets)) == targets


def test_units_on_separate_ranks_are_balanced_separately_and_ordered_in_time() -> None:
    sizes = {unit: {"tp": 1, "pp": 1, "dp": 2} for unit in UNITS}
    _, targets = planned_targets({"placement": "disaggregated"} | sizes, 4)
    assert [set(load.costs) for load in targets.loads] == [{"vision"}, {"llm"}], "encoders first"
    assert sum(load.weight for load in targets.loads) == pytest.approx(1, abs=1e-5)
    assert [set(rank.forward) for rank in targets.pipeline] == [{"vision"}, {"llm"}]


def test_an_encoder_that_serves_all_replicas_is_not_balanced_between_them() -> None:
    sizes = {"vision": {"tp": 1, "pp": 1, "dp": 1}, "llm": {"tp": 1, "pp": 1, "dp": 2}}
    _, targets = planned_targets({"placement": "disaggregated"} | sizes, 3)
    assert [set(load.costs) for load in targets.loads] == [{"llm"}]
    assert set(targets.item_costs) == {"vision"}
    assert len(targets.pipeline) == 2


def test_without_reordering_only_items_are_balanced() -> None:
    sizes = {unit: {"tp": 1, "pp": 1, "dp": 2} for unit in UNITS}
    settings = recipe(parallel={"placement": "disaggregated"} | sizes)
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"reorder": False})})
    targets = derive_step_targets(settings, planned(settings, 4), lengths())
    assert (targets.reorder, targets.loads, targets.pipeline, targets.schedule_table) == (False, (), (), None)
    assert set(targets.item_costs) == {"vision"}
    assert from_json(StepTargets, to_json(targets)) == targets


def test_a_single_replica_has_no_loads_to_balance() -> None:
    assert planned_targets({"placement": "unified"}, 1)[1].loads == ()


def test_pipeline_ranks_with_alike_work_are_one_load() -> None:
    sizes = {"vision": {"tp": 1, "pp": 1, "dp": 2}, "llm": {"tp": 1, "pp": 2, "dp": 2, "vpp": 1}}
    chosen, targets = planned_targets({"placement": "disaggregated"} | sizes, 6)
    assert [set(rank.forward) for rank in targets.pipeline] == [{"vision"}, {"llm"}, {"llm"}]
    assert len(targets.loads) == 2
    assert chosen.units["llm"].pp == 2


def test_other_pipelines_are_ordered_in_time_by_a_schedule_table() -> None:
    sizes = {"vision": {"tp": 1, "pp": 1, "dp": 1}, "llm": {"tp": 1, "pp": 2, "dp": 1, "vpp": 2}}
    chosen, targets = planned_targets({"placement": "disaggregated"} | sizes, 3)
    assert not targets.pipeline
    assert targets.schedule_table is not None
    assert [len(line.split()) for line in targets.schedule_table.actions] == [2 * 8, 4 * 8, 4 * 8], (
        "of vision and two chunks each"
    )
    assert {task.unit for task in targets.schedule_table.tasks} == UNITS
    assert from_json(StepTargets, to_json(targets)) == targets
    graph = stage_graph(chosen, build_model_shape(recipe(parallel={"placement": "disaggregated"} | sizes)))
    order = {rank: tuple(map(action_to_text, actions)) for rank, actions in build_1f1b(graph).actions.items()}
    explicit = SchedulePlan(kind="explicit", num_microbatches=chosen.schedule.num_microbatches, order=order)
    from_order = derive_step_targets(recipe(), chosen.model_copy(update={"schedule": explicit}), lengths())
    assert from_order.schedule_table == targets.schedule_table, "the same schedule as an explicit order"


def test_two_parallel_encoders_are_no_single_chain() -> None:
    settings = speech(parallel={"placement": "disaggregated"})
    chosen = plan_recipe(settings, heard(settings), world_size=3, hardware="cpu-core", recipe_sha256="f" * 64)
    targets = derive_step_targets(settings, chosen, heard(settings))
    assert not targets.pipeline
    assert targets.schedule_table is not None
    assert len(targets.schedule_table.actions) == 3


def test_all_of_three_units_have_costs() -> None:
    settings = speech(parallel={"placement": "unified"})
    chosen = plan_recipe(settings, heard(settings), world_size=2, hardware="cpu-core", recipe_sha256="f" * 64)
    targets = derive_step_targets(settings, chosen, heard(settings))
    assert set(targets.item_costs) == {"vision", "audio"}
    assert set(targets.replica_nodes) == set(chosen.units)


def test_integer_costs_agree_with_the_cost_model() -> None:
    """A quarter more or less in a microbatch changes its seconds in proportion to the integer costs."""
    sizes = {unit: {"tp": 1, "pp": 1, "dp": 2} for unit in UNITS}
    settings = recipe(parallel={"placement": "disaggregated"} | sizes)
    chosen = planned(settings, 4)
    targets = derive_step_targets(settings, chosen, lengths())
    model = build_model_shape(settings)
    machine = machine_for(settings, "cpu-core")
    costs = costs_for(machine, precision_for(settings, machine), None)
    input_grad = input_grad_needed(model)
    typical = typical_loads(stage_graph(chosen, model), lengths(), settings.data.seq_len)

    def seconds(unit: str, load: TokenLoad) -> float:
        layers = zip(model.unit(unit).layers, input_grad[unit], strict=True)
        return sum(
            costs.seconds(LayerWork(layer, 1, load, "forward"))
            + costs.seconds(LayerWork(layer, 1, load, "backward", input_grad=needed))
            for layer, needed in layers
        )

    seconds_per_unit = []
    for load in targets.loads:
        [(unit, cost)] = load.costs.items()
        n = typical[unit]
        more, less = (
            TokenLoad(n.tokens + s * n.tokens // 4, n.sum_sq + s * n.sum_sq // 4, n.max_len, n.num_sequences)
            for s in (1, -1)
        )
        difference = cost.linear * (more.tokens - less.tokens) + cost.quadratic * (more.sum_sq - less.sum_sq)
        seconds_per_unit.append((seconds(unit, more) - seconds(unit, less)) / difference)
    assert seconds_per_unit[0] == pytest.approx(seconds_per_unit[1], rel=0.05), "all costs are in the same unit of time"


@pytest.mark.parametrize(("linear", "quadratic"), list(itertools.product([0.0, 3e-6], [0.0, 2e-9])))
def test_marginal_costs_are_exact_for_linear_seconds(linear: float, quadratic: float) -> None:
    typical = TokenLoad(400, 40_000, 100, 4)
    cost = marginal_cost(lambda load: linear * load.tokens + quadratic * load.sum_sq, typical)
    assert cost.linear == pytest.approx(linear, abs=1e-15)
    assert cost.quadratic == pytest.approx(quadratic, abs=1e-18)


def test_constant_seconds_are_divided_by_tokens() -> None:
    cost = marginal_cost(lambda _: 0.2, TokenLoad(400, 40_000, 100, 4))
    assert cost.linear == pytest.approx(0.2 / 400)
    assert marginal_cost(lambda _: 0.2, TokenLoad(0, 0, 0, 0)).linear == 0


def test_sums_over_a_step_are_exact() -> None:
    """Costs are integers, and the sum of a step stays below 2^53, from where floating point rounds."""
    _, targets = planned_targets({"placement": "unified"}, 2)
    tokens = np.full(4096, 384, dtype=np.int64)
    for load in targets.loads:
        for cost in load.costs.values():
            assert 0 < int(cost.of(tokens).sum()) < 2**53
