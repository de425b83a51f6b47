"""Hardware presets, and the roofline model with them."""

from dataclasses import replace

import numpy as np
import pytest

from mmtrain.costs import PRESETS, AnalyticCosts, TokenLoad, preset, preset_for_device
from mmtrain.costs import layer_arithmetic as analytic
from mmtrain.errors import PlanError
from mmtrain.models.layer_shape import BLOCK_PIECES
from tests.models.factory import settings, shape_of

LOAD = TokenLoad.of(np.array([300, 212]))
LAYERS = [layer for unit in shape_of(settings()).units for layer in unit.layers]


@pytest.fixture(params=PRESETS)
def costs(request: pytest.FixtureRequest) -> AnalyticCosts:
    return AnalyticCosts(preset(request.param), "fp32" if request.param == "cpu-core" else "bf16")


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"cluster\.hardware: `h100` is not a known preset; did you mean `h100-80g`\?"):
        preset("h100")


def test_the_device_name_decides_on_the_preset() -> None:
    assert preset_for_device(None) == "cpu-core"
    assert preset_for_device("NVIDIA H200") == "h200-141g"
    assert preset_for_device("NVIDIA A100-SXM4-80GB") == "a100-80g"
    with pytest.raises(PlanError, match="GH200"):
        preset_for_device("NVIDIA GH200 480GB")
    with pytest.raises(PlanError, match="no preset for this machine's device `Tesla T4`"):
        preset_for_device("Tesla T4")


def test_source_says_that_nothing_was_measured(costs: AnalyticCosts) -> None:
    assert costs.source == f"modelled: {costs.hardware.name}"


def test_no_layer_is_faster_than_the_peak(costs: AnalyticCosts) -> None:
    for layer in LAYERS:
        forward = costs.seconds(layer, 1, LOAD, "forward")
        backward = costs.seconds(layer, 1, LOAD, "backward")
        peak = costs.hardware.peak_flops(costs.precision)
        assert forward >= analytic.forward_flops(layer, LOAD) / peak
        assert backward >= analytic.backward_flops(layer, LOAD, weight_grad=True, input_grad=True) / peak
        assert costs.seconds(layer, 1, LOAD, "recompute") == forward


def test_more_tokens_never_cost_less(costs: AnalyticCosts) -> None:
    for layer in LAYERS:
        seconds = [costs.seconds(layer, 1, TokenLoad.of(np.array([n])), "forward") for n in (0, 64, 256, 1024)]
        assert seconds == sorted(seconds)
        assert seconds[0] == 0.0


def test_images_that_see_both_ways_cost_more_attention_and_no_more_flops(costs: AnalyticCosts) -> None:
    block = shape_of(settings()).unit("llm").layers[1]
    seeing = replace(block, image_spans=True)
    assert analytic.forward_flops(seeing, LOAD) == analytic.forward_flops(block, LOAD)
    for kind in ("forward", "backward"):
        more_s = costs.seconds(seeing, 1, LOAD, kind) - costs.seconds(block, 1, LOAD, kind)
        attention_s = costs.pieces(block, 1, LOAD, kind)[BLOCK_PIECES.index("attention")].compute_s
        assert 0 < more_s <= attention_s


def test_layers_without_gradients_cost_no_backward(costs: AnalyticCosts) -> None:
    for layer in LAYERS:
        frozen = replace(layer, trainable=False)
        assert costs.seconds(frozen, 1, LOAD, "backward", input_grad=False) == 0.0
        assert costs.activation_bytes(frozen, 1, LOAD, False, input_grad=False) == 0
        assert costs.seconds(frozen, 1, LOAD, "backward") <= costs.seconds(layer, 1, LOAD, "backward")


def test_large_gemms_reach_the_stated_share_of_the_peak() -> None:
    for hardware in PRESETS.values():
        large, small = hardware.efficiency_at(8192, 8192, 8192), hardware.efficiency_at(512, 64, 64)
        assert small < large <= hardware.gemm_efficiency < 1
        assert large > 0.85 * hardware.gemm_efficiency


def test_collectives_take_the_time_of_their_rings() -> None:
    costs = AnalyticCosts(preset("h100-80g"), "bf16")
    link = costs.hardware.intra_node
    nbytes = 8 * 10**9
    once = 7 * (link.latency_s + nbytes / 8 / link.bytes_per_s)
    assert costs.collective("all_gather", nbytes, 8, True) == pytest.approx(once)
    assert costs.collective("all_reduce", nbytes, 8, True) == pytest.approx(2 * once)
    assert costs.collective("all_reduce", nbytes, 1, True) == 0.0
    assert costs.transfer(nbytes, False) > costs.transfer(nbytes, True)
