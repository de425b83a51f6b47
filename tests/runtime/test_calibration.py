"""What a calibration of this machine does to costs."""

import pytest

from mmtrain.costs import AnalyticCosts, CostTable, GroupLayout, MeasuredCosts, TokenLoad, preset
from mmtrain.costs.core_ratios import CoreRatios, core_ratios
from mmtrain.costs.cost_table import CoreSpeed, LayerEntry, LayerSample, layer_fields
from mmtrain.runtime.profiling.calibration import Calibration, calibrated_table
from tests.models.factory import settings, shape_of

COSTS = AnalyticCosts(preset("cpu-core"), "fp32")
LOAD = TokenLoad(128, 128 * 64, 64, 2)


def calibrated(costs: AnalyticCosts | MeasuredCosts, gemm: float, copy: float) -> MeasuredCosts:
    calibration = Calibration(CoreRatios(gemm, copy), 3.0, 4.0)
    table = calibrated_table(costs, shape_of(settings()), calibration, 128)
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
    assert slow.shard_copies(1e6, 10) == pytest.approx(2 * COSTS.shard_copies(1e6, 10))
    assert slow.source.startswith("modelled: cpu-core, corrected by a calibration on ")


def test_slower_memory_lengthens_only_what_moves_through_it() -> None:
    slow = calibrated(COSTS, 1.0, 2.0)
    block = shape_of(settings()).unit("llm").layers[1]
    assert 1 < slow.seconds(block, 1, LOAD, "forward") / COSTS.seconds(block, 1, LOAD, "forward") < 1.5


def test_measured_layers_are_corrected_by_what_changed_since_they_were_measured() -> None:
    """The cores were half as fast as the preset's when the table was measured, and still are."""
    block = shape_of(settings()).unit("llm").layers[1]
    passes = ("forward", "recompute", "backward")
    table = CostTable(
        hardware="cpu-core",
        device="cpu-core",
        precision="fp32",
        software={},
        date="2026-11-25",
        layers=(
            LayerEntry(
                layer=layer_fields(block),
                tp=1,
                samples=tuple(
                    LayerSample(
                        tokens=tokens,
                        sum_sq=tokens * 64,
                        max_len=64,
                        num_sequences=tokens // 64,
                        seconds=dict.fromkeys(passes, tokens * 1e-4),
                        activation_bytes=tokens,
                    )
                    for tokens in (64, 128, 256)
                ),
            ),
        ),
        core_speed=CoreSpeed(gemm_s=1e-2, copy_s=0.1),
    )
    assert table.core_speed is not None
    measured = MeasuredCosts(table, COSTS)
    cores = core_ratios(table.core_speed, preset("cpu-core"), "fp32")
    assert cores.gemm > 1.5
    assert cores.copy > 1.5
    calibration = Calibration(cores, 1.0, 1.0, at_table=cores)
    shape = shape_of(settings())
    corrected = calibrated_table(measured, shape, calibration, 128)
    again = MeasuredCosts(CostTable.model_validate_json(corrected.model_dump_json()), COSTS)
    assert again.seconds(block, 1, LOAD, "forward") == pytest.approx(measured.seconds(block, 1, LOAD, "forward"))
    head = shape.unit("llm").layers[-1]  # has no entry: is modelled, for the preset's cores
    assert again.seconds(head, 1, LOAD, "forward") > 1.5 * measured.seconds(head, 1, LOAD, "forward")
    assert "GEMMs take 1.00x, copies 1.00x" in str(calibration)
