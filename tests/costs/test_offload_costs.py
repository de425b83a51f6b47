"""Costs of activations in host memory: copies run beside the compute, and nothing stays on the device."""

from dataclasses import replace

import numpy as np
import pytest

from mmtrain.costs import AnalyticCosts, Hardware, TokenLoad, preset
from mmtrain.costs.context_parallel_costs import ContextGroup, context_seconds
from mmtrain.costs.cost_model import LayerWork, TokenSplit
from mmtrain.costs.layer_arithmetic import context_parallel_load
from mmtrain.models.shapes.layer_shape import LayerShape
from tests.models.factory import settings, shape_of

LOAD = TokenLoad.of(np.array([3000, 2120]))
BLOCK = shape_of(settings()).unit("llm").layers[1]


def costs_of(host_bytes_per_s: float | None) -> AnalyticCosts:
    hardware: Hardware = replace(preset("h100-80g"), host_bytes_per_s=host_bytes_per_s)
    return AnalyticCosts(hardware, "bf16")


@pytest.mark.parametrize("mode", ["inputs", "all"])
def test_copies_that_end_with_the_compute_beside_them_cost_nothing(mode: str) -> None:
    costs, block = costs_of(1e18), replace(BLOCK, offload=mode)
    for kind in ("forward", "backward"):
        assert costs.seconds(LayerWork(block, 1, LOAD, kind)) == costs.seconds(LayerWork(BLOCK, 1, LOAD, kind))
    again_s = costs.seconds(LayerWork(BLOCK, 1, LOAD, "recompute")) if mode == "inputs" else 0.0
    assert costs.seconds(LayerWork(block, 1, LOAD, "recompute")) == again_s


@pytest.mark.parametrize("sp", [False, True])
def test_a_slow_link_holds_both_passes_up(sp: bool) -> None:
    """A copy takes its bytes over the link's rate, of which each pass hides as long as it takes itself."""
    rate, tp, split = 1e6, 2, TokenSplit(sp=sp)
    costs = costs_of(rate)
    passes_s = sum(costs.seconds(LayerWork(BLOCK, tp, LOAD, kind, split=split)) for kind in ("forward", "backward"))
    kept = costs.activation_bytes(BLOCK, tp, LOAD, False)
    if sp:  # each rank keeps its slice of four tensors as wide as the hidden states
        kept -= 4 * LOAD.tokens * BLOCK.hidden * 2 // 2
    wait_s = 2 * kept / rate - passes_s
    assert costs.seconds(LayerWork(replace(BLOCK, offload="all"), tp, LOAD, "recompute", split=split)) == pytest.approx(
        wait_s
    )
    input_bytes = LOAD.tokens * BLOCK.hidden * 2 // (tp if sp else 1)
    wait_s = 2 * input_bytes / rate - passes_s + costs.seconds(LayerWork(BLOCK, tp, LOAD, "recompute", split=split))
    assert costs.seconds(
        LayerWork(replace(BLOCK, offload="inputs"), tp, LOAD, "recompute", split=split)
    ) == pytest.approx(wait_s)


def test_an_activation_function_does_not_run_again_where_its_output_comes_back() -> None:
    costs, again = costs_of(1e18), replace(BLOCK, recomputes_activation=True)
    difference_s = costs.seconds(LayerWork(again, 1, LOAD, "backward")) - costs.seconds(
        LayerWork(BLOCK, 1, LOAD, "backward")
    )
    assert difference_s > 0
    assert costs.seconds(LayerWork(replace(again, offload="all"), 1, LOAD, "recompute")) == pytest.approx(-difference_s)


def test_ranks_that_share_sequences_exchange_nothing_again_for_what_comes_back() -> None:
    costs, group, load = costs_of(1e18), ContextGroup.of_mesh(1, 4, False, 8), context_parallel_load(LOAD, 4)

    def exchanged_s(block: LayerShape) -> float:
        return context_seconds(LayerWork(block, 1, load, "recompute"), costs, group, 2)

    assert exchanged_s(BLOCK) == exchanged_s(replace(BLOCK, offload="inputs")) > 0
    assert exchanged_s(replace(BLOCK, offload="all")) == 0.0


def test_only_a_gpu_has_nothing_left_on_the_device() -> None:
    """On a CPU both memories are one, and a copy keeps the core from computing."""
    for mode, recomputed in (("inputs", True), ("all", False)):
        block = replace(BLOCK, offload=mode)
        assert costs_of(1e9).activation_bytes(block, 1, LOAD, True) == 0
        assert costs_of(1e9).activation_bytes(block, 1, LOAD, False) == costs_of(1e9).activation_bytes(
            BLOCK, 1, LOAD, False
        )
        on_cpu = costs_of(None)
        kept = on_cpu.activation_bytes(block, 1, LOAD, True)
        assert kept == on_cpu.activation_bytes(BLOCK, 1, LOAD, recomputed)
        again_s = on_cpu.seconds(LayerWork(BLOCK, 1, LOAD, "recompute")) if recomputed else 0.0
        copies_s = 4 * kept / on_cpu.hardware.moved_bytes_per_s
        assert on_cpu.seconds(LayerWork(block, 1, LOAD, "recompute")) == pytest.approx(again_s + copies_s)
