"""Costs with one constant changed: modelled ones follow the hardware, measured ones scale as the model does."""

from dataclasses import replace

import pytest

from mmtrain.costs import AnalyticCosts, CostModel, GroupLayout, MeasuredCosts, TokenLoad, preset
from mmtrain.costs.cost_model import LayerWork
from mmtrain.costs.cost_table import CostTable, LayerEntry, LayerSample, MessageEntry, OptimizerEntry, layer_fields
from mmtrain.costs.layer_arithmetic import gemms
from mmtrain.models.shapes.model_shape import LayerShape, build_model_shape
from scripts.perturbed_costs import PERTURBATIONS, CostConstant, Perturbation, perturbed_costs, perturbed_hardware
from tests.planning.factory import recipe

MODEL = AnalyticCosts(preset("h100-80g"), "bf16")
BLOCK = next(layer for layer in build_model_shape(recipe()).unit("llm").layers if layer.kind == "decoder_block")
LOAD = TokenLoad(512, 512 * 512, 512, 1)
GROUPS = (GroupLayout(2), GroupLayout(16, 2))
NBYTES = 1 << 20


def _table() -> CostTable:
    sample = LayerSample(
        tokens=512,
        sum_sq=512 * 512,
        max_len=512,
        num_sequences=1,
        seconds={"forward": 0.002, "recompute": 0.0015, "backward": 0.005},
        activation_bytes=1 << 20,
    )
    return CostTable(
        hardware="h100-80g",
        device="NVIDIA H100",
        precision="bf16",
        software={"torch": "2"},
        date="2026-11-23",
        layers=(LayerEntry(layer=layer_fields(BLOCK), tp=1, samples=(sample,)),),
        messages=(
            MessageEntry(kind="p2p", size=2, nbytes=(1000, NBYTES), seconds=(1e-4, 1e-3)),
            MessageEntry(kind="all_reduce", size=2, nbytes=(1000, NBYTES), seconds=(2e-4, 3e-3)),
        ),
        optimizer=(OptimizerEntry(parameters=1000, seconds=1e-4),),
    )


MEASURED = MeasuredCosts(_table(), MODEL)


def _layer_seconds(costs: CostModel, tp: int = 1) -> list[float]:
    return [costs.seconds(LayerWork(BLOCK, tp, LOAD, kind)) for kind in ("forward", "backward", "recompute")]


def _link_seconds(costs: CostModel) -> list[float]:
    collectives = [costs.collective(kind, NBYTES, group) for kind in ("all_reduce", "all_gather") for group in GROUPS]
    exchanges = [costs.all_to_all(NBYTES, NBYTES, group) for group in GROUPS]
    return [costs.transfer(NBYTES, True), costs.transfer(NBYTES, False), *collectives, *exchanges]


@pytest.mark.parametrize("ratio", [0.8, 1.25])
@pytest.mark.parametrize("costs", [MODEL, MEASURED], ids=["modelled", "measured"])
def test_faster_links_shorten_every_message_and_collective_alike(costs: CostModel, ratio: float) -> None:
    changed = perturbed_costs(costs, Perturbation("link speeds", ratio))
    assert _link_seconds(changed) == pytest.approx([seconds / ratio for seconds in _link_seconds(costs)])
    assert _layer_seconds(changed) == pytest.approx(_layer_seconds(costs)), "on one rank nothing is sent"
    assert changed.collective("all_reduce", NBYTES, GroupLayout(1)) == 0


@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_each_constant_changes_its_own_part_of_a_layer(ratio: float) -> None:
    core = AnalyticCosts(preset("cpu-core"), "fp32")  # whose GEMMs are never bound by memory here

    def growth_s(constant: CostConstant) -> float:
        changed = perturbed_costs(core, Perturbation(constant, ratio))
        return changed.seconds(LayerWork(BLOCK, 1, LOAD, "forward")) - core.seconds(
            LayerWork(BLOCK, 1, LOAD, "forward")
        )

    gemms_s = sum(core._gemm(gemm) for gemm in gemms(BLOCK, LOAD, 1))
    assert growth_s("GEMM efficiency") == pytest.approx((1 / ratio - 1) * gemms_s)
    assert growth_s("attention efficiency") == pytest.approx(
        (1 / ratio - 1) * core._attention(BLOCK, 1, LOAD, "forward")
    )
    assert growth_s("launch time") == pytest.approx((ratio - 1) * core._launches(BLOCK, 1, "forward"))


@pytest.mark.parametrize("perturbation", PERTURBATIONS, ids=str)
def test_measured_seconds_of_a_layer_scale_as_modelled_ones(perturbation: Perturbation) -> None:
    changed, changed_model = perturbed_costs(MEASURED, perturbation), perturbed_costs(MODEL, perturbation)
    ratios = [c / m for c, m in zip(_layer_seconds(changed_model), _layer_seconds(MODEL), strict=True)]
    measured = _layer_seconds(MEASURED)
    expected = [seconds * ratio for seconds, ratio in zip(measured, ratios, strict=True)]
    assert _layer_seconds(changed) == pytest.approx(expected)
    assert _layer_seconds(changed, tp=2) == pytest.approx(_layer_seconds(changed_model, tp=2)), "in no entry"
    pieces = changed.pieces(LayerWork(BLOCK, 1, LOAD, "forward"))
    assert sum(map(sum, pieces)) == pytest.approx(expected[0])


@pytest.mark.parametrize("perturbation", PERTURBATIONS, ids=str)
@pytest.mark.parametrize("costs", [MODEL, MEASURED], ids=["modelled", "measured"])
def test_bytes_and_what_only_moves_memory_stay(costs: CostModel, perturbation: Perturbation) -> None:
    changed = perturbed_costs(costs, perturbation)
    assert changed.activation_bytes(BLOCK, 1, LOAD, False) == costs.activation_bytes(BLOCK, 1, LOAD, False)
    assert (changed.optimizer(10_000), changed.posting()) == (costs.optimizer(10_000), costs.posting())
    assert str(perturbation) in changed.source


def test_every_change_is_of_one_constant_and_undone_by_its_inverse() -> None:
    hardware = preset("a100-80g")
    for slower, faster in zip(PERTURBATIONS[::2], PERTURBATIONS[1::2], strict=True):
        assert (slower.constant, slower.ratio) == (faster.constant, 1 / faster.ratio)
        there = perturbed_hardware(hardware, slower)
        assert there != hardware
        back = replace(perturbed_hardware(there, faster), name=hardware.name)
        times = [getattr(back, name) for name in ("gemm_efficiency", "attention_efficiency", "kernel_launch_s")]
        assert times == pytest.approx(
            [hardware.gemm_efficiency, hardware.attention_efficiency, hardware.kernel_launch_s]
        )
        assert back.inter_node.seconds(NBYTES) == pytest.approx(hardware.inter_node.seconds(NBYTES))


def test_costs_of_unknown_parts_are_refused() -> None:
    class Given:
        def seconds(self, layer: LayerShape) -> float:
            return 1.0

    with pytest.raises(TypeError, match="Given has no constants to change"):
        perturbed_costs(Given(), PERTURBATIONS[0])  # type: ignore[arg-type]
