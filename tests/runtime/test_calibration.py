"""What a calibration of this machine does to costs."""

import pytest

from mmtrain.costs import AnalyticCosts, CostTable, GroupLayout, MeasuredCosts, TokenLoad, preset
from mmtrain.runtime.profiling.calibration import Calibration, calibrated_table
from tests.models.factory import settings, shape_of

COSTS = AnalyticCosts(preset("cpu-core"), "fp32")
LOAD = TokenLoad(128, 128 * 64, 64, 2)


def calibrated(costs: AnalyticCosts | MeasuredCosts, gemm: float, copy: float) -> MeasuredCosts:
    table = calibrated_table(costs, shape_of(settings()), Calibration(gemm, copy, 3.0, 4.0), 128)
    return MeasuredCosts(CostTable.model_validate_json(table.model_dump_json()), COSTS)


def test_a_core_of_half_the_speed_takes_twice_as_long() -> None:
    slow = calibrated(COSTS, 2.0, 2.0)
    for unit in shape_of(settings()).units:
        for layer in unit.layers:
            for kind in ("forward", "backward"):
                assert slow.seconds(layer, 1, LOAD, kind) == pytest.approx(
                    2 * COSTS.seconds(layer, 1, LOAD, kind), rel=0.02
                )
    assert slow.transfer(1000, True) == pytest.approx(3 * COSTS.transfer(1000, True))
    pair = GroupLayout(2)
    assert slow.collective("all_reduce", 1000, pair) == pytest.approx(4 * COSTS.collective("all_reduce", 1000, pair))
    assert slow.source.startswith("modelled: cpu-core, corrected by a calibration on ")


def test_slower_memory_lengthens_only_what_moves_through_it() -> None:
    slow = calibrated(COSTS, 1.0, 2.0)
    block = shape_of(settings()).unit("llm").layers[1]
    assert 1 < slow.seconds(block, 1, LOAD, "forward") / COSTS.seconds(block, 1, LOAD, "forward") < 1.5
