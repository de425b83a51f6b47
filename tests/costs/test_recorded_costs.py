"""A cost table corrected by what a run recorded prices work as it was recorded, also after it was saved."""

from pathlib import Path

import pytest

from mmtrain.costs import AnalyticCosts, GroupLayout, TokenLoad, costs_for, preset
from mmtrain.costs.cost_model import LayerWork
from mmtrain.costs.cost_table import CostTable
from mmtrain.costs.recorded_costs import RecordedRatios, costs_of_table, recorded_table
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
