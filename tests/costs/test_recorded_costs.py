"""A cost table corrected by what a run recorded prices work as it was recorded, also after it was saved."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from mmtrain.costs import AnalyticCosts, GroupLayout, TokenLoad, costs_for, preset
from mmtrain.costs.choose import expert_spread, require_model_of_run
from mmtrain.costs.cost_model import LayerWork
from mmtrain.costs.cost_table import CostTable
from mmtrain.costs.recorded_costs import RECORDED_COSTS_FILE, RecordedRatios, costs_of_table, recorded_table
from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import build_model_shape
from tests.planning.factory import recipe

MACHINE = preset("cpu-core")
LOAD = TokenLoad(64, 64 * 64, 64, 1)
RATIOS = RecordedRatios(forward={"vision": 3.0}, backward={"vision": 2.0, "llm": 0.5}, reductions=4.0, messages=5.0)


def test_each_kind_of_work_is_scaled_by_what_was_recorded(tmp_path: Path) -> None:
    shape = build_model_shape(recipe())
    base = AnalyticCosts(MACHINE, "fp32")
    recorded_table(base, MACHINE, "fp32", shape, RATIOS).save(tmp_path / "costs.json")
    costs = costs_for(MACHINE, "fp32", tmp_path / "costs.json")
    assert costs.source.startswith("modelled: cpu-core, corrected by what a run recorded on")
    for unit, forward, backward in (("vision", 3.0, 2.0), ("llm", 1.0, 0.5)):
        for layer in shape.unit(unit).layers:
            for tp in (1, 2):
                expected = forward * base.seconds(LayerWork(layer, tp, LOAD, "forward"))
                assert costs.seconds(LayerWork(layer, tp, LOAD, "forward")) == pytest.approx(expected)
                expected = backward * base.seconds(LayerWork(layer, tp, LOAD, "backward"))
                assert costs.seconds(LayerWork(layer, tp, LOAD, "backward")) == pytest.approx(expected)
    assert costs.transfer(1 << 20, True) == pytest.approx(5.0 * base.transfer(1 << 20, True))
    reduction_s = base.collective("reduce_scatter", 1 << 20, GroupLayout(2))
    assert costs.collective("reduce_scatter", 1 << 20, GroupLayout(2)) == pytest.approx(4.0 * reduction_s)
    assert costs.optimizer(1000) == pytest.approx(4.0 * base.optimizer(1000))


def test_the_folder_of_a_run_is_a_cost_table_for_its_own_model(tmp_path: Path) -> None:
    run = tmp_path / "try"
    run.mkdir()
    with pytest.raises(
        PlanError, match=r"try is a folder without recorded_costs.json. A run writes that when it is don"
    ):
        costs_for(MACHINE, "fp32", run)
    shape, base = build_model_shape(recipe()), AnalyticCosts(MACHINE, "fp32")
    recorded_table(base, MACHINE, "fp32", shape, RATIOS, "runs/try").save(run / RECORDED_COSTS_FILE)
    costs = costs_for(MACHINE, "fp32", run)
    assert costs.source.startswith("modelled: cpu-core, corrected by what the run runs/try recorded on 20")
    require_model_of_run(costs, shape)
    require_model_of_run(base, shape)
    message = r"the run runs/try trained another model, .* of these layers \(.*llm: embedding, decoder_block"
    with pytest.raises(PlanError, match=message):
        require_model_of_run(costs, build_model_shape(recipe(llm={"hidden": 96})))


def test_a_folder_of_one_word_is_a_run_where_no_table_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `--set cluster.costs=try` beside the folder of the run."""
    monkeypatch.chdir(tmp_path)
    Path("try").mkdir()
    recorded_table(AnalyticCosts(MACHINE, "fp32"), MACHINE, "fp32", build_model_shape(recipe()), RATIOS, "try").save(
        Path("try") / RECORDED_COSTS_FILE
    )
    assert "the run try recorded" in costs_for(MACHINE, "fp32", Path("try")).source
    Path("cpu-core").mkdir()
    assert "the run" not in costs_for(MACHINE, "fp32", Path("cpu-core")).source


def test_unequal_loads_of_experts_are_as_stated_else_as_recorded_else_a_default(tmp_path: Path) -> None:
    moe = {"moe": {"experts": 8, "top_k": 2, "ffn": 32}}
    auto, stated = recipe(llm=moe), recipe(llm=moe, parallel={"llm": {"expert_spread": 0.0}})
    base, path = AnalyticCosts(MACHINE, "fp32"), tmp_path / "costs.json"
    recorded_table(base, MACHINE, "fp32", build_model_shape(auto), RATIOS, "try", 0.75).save(path)
    recorded = costs_for(MACHINE, "fp32", path)
    assert expert_spread(stated, recorded) == (0.0, "recipe")
    assert expert_spread(auto, recorded) == (0.75, "run")
    assert expert_spread(auto, base) == (0.3, "default")
    assert build_model_shape(auto).unit("llm").layers[1].mlp.load_spread == 0.3  # type: ignore[union-attr]
    with pytest.raises(ValidationError, match=r"expert_spread.*\n.*less than or equal to 10"):
        recipe(llm=moe, parallel={"llm": {"expert_spread": 11}})


def test_a_table_is_corrected_further_by_a_later_record() -> None:
    shape = build_model_shape(recipe())
    base = AnalyticCosts(MACHINE, "fp32")
    table: CostTable = recorded_table(base, MACHINE, "fp32", shape, RATIOS)
    again = recorded_table(costs_of_table(table, MACHINE, "fp32"), MACHINE, "fp32", shape, RATIOS)
    layer = shape.unit("vision").layers[1]
    expected = 9.0 * base.seconds(LayerWork(layer, 1, LOAD, "forward"))
    assert costs_of_table(again, MACHINE, "fp32").seconds(LayerWork(layer, 1, LOAD, "forward")) == pytest.approx(
        expected
    )
    assert (again.message_scale, again.reduction_scale) == (25.0, 16.0)
