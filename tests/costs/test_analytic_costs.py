"""Hardware presets, and the roofline model with them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmtrain.costs import PRESETS, AnalyticCosts, GroupLayout, TokenLoad, preset
from mmtrain.costs import layer_arithmetic as analytic
from mmtrain.costs.block_pieces import collective_kinds
from mmtrain.costs.cost_model import LayerWork, PassDirection, TokenSplit
from mmtrain.costs.framework import OWN_RUNTIME, Execution
from mmtrain.costs.hardware import GEMM_TILE_ELEMENTS, Precision
from mmtrain.models.shapes.layer_shape import BLOCK_PIECES, MLP_CHUNK_TOKENS, Attention, DenseMlp, LayerShape
from tests.models.factory import settings, shape_of

LOAD = TokenLoad.of(np.array([300, 212]))
LAYERS = [layer for unit in shape_of(settings()).units for layer in unit.layers]


@pytest.fixture(params=PRESETS)
def costs(request: pytest.FixtureRequest) -> AnalyticCosts:
    return AnalyticCosts(preset(request.param), "fp32" if request.param == "cpu-core" else "bf16")


def test_source_says_that_nothing_was_measured(costs: AnalyticCosts) -> None:
    assert costs.source == f"modelled: {costs.hardware.name}"


def test_no_layer_is_faster_than_the_peak(costs: AnalyticCosts) -> None:
    for layer in LAYERS:
        forward = costs.seconds(LayerWork(layer, 1, LOAD, "forward"))
        backward = costs.seconds(LayerWork(layer, 1, LOAD, "backward"))
        peak = costs.hardware.peak_flops(costs.precision)
        assert forward >= analytic.forward_flops(layer, LOAD) / peak
        assert backward >= analytic.backward_flops(layer, LOAD, weight_grad=True, input_grad=True) / peak
        assert costs.seconds(LayerWork(layer, 1, LOAD, "recompute")) == forward


def test_more_tokens_never_cost_less(costs: AnalyticCosts) -> None:
    for layer in LAYERS:
        seconds = [
            costs.seconds(LayerWork(layer, 1, TokenLoad.of(np.array([n])), "forward")) for n in (0, 64, 256, 1024)
        ]
        assert seconds == sorted(seconds)
        assert seconds[0] == 0.0


def test_images_that_see_both_ways_cost_more_attention_and_no_more_flops(costs: AnalyticCosts) -> None:
    block = shape_of(settings()).unit("llm").layers[1]
    seeing = replace(block, mixer=replace(block.attention, image_spans=True))
    assert analytic.forward_flops(seeing, LOAD) == analytic.forward_flops(block, LOAD)
    for kind in ("forward", "backward"):
        more_s = costs.seconds(LayerWork(seeing, 1, LOAD, kind)) - costs.seconds(LayerWork(block, 1, LOAD, kind))
        attention_s = costs.pieces(LayerWork(block, 1, LOAD, kind))[BLOCK_PIECES.index("attention")].compute_s
        assert 0 < more_s <= attention_s


def test_layers_without_gradients_cost_no_backward(costs: AnalyticCosts) -> None:
    for layer in LAYERS:
        frozen = replace(layer, trainable=False)
        assert costs.seconds(LayerWork(frozen, 1, LOAD, "backward", input_grad=False)) == 0.0
        assert costs.activation_bytes(frozen, 1, LOAD, False, input_grad=False) == 0
        assert costs.seconds(LayerWork(frozen, 1, LOAD, "backward")) <= costs.seconds(
            LayerWork(layer, 1, LOAD, "backward")
        )


def test_large_gemms_reach_the_stated_share_of_the_peak() -> None:
    for hardware in PRESETS.values():
        large, small = hardware.efficiency_at(8192, 8192, 8192), hardware.efficiency_at(512, 64, 64)
        sustained = hardware.clock * hardware.gemm_efficiency
        assert small < large <= sustained < 1
        assert large > 0.85 * sustained


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"cpu-core"}))
def test_the_last_wave_of_tiles_costs_half_a_wave(name: str) -> None:
    hardware = preset(name)
    rows = GEMM_TILE_ELEMENTS // 8
    wave = hardware.num_multiprocessors * 8  # a tile for each multiprocessor
    one, many = hardware.efficiency_at(rows, wave, 4096), hardware.efficiency_at(rows, 100 * wave, 4096)
    assert many / one == pytest.approx((1 + 0.5) / (1 + 0.5 / 100))
    assert hardware.efficiency_at(8192, 8192, 32) < 0.5 * hardware.gemm_efficiency, "shallow products do not pay"


@pytest.mark.parametrize(
    ("execution", "seconds"),
    [
        (Execution(norm_moves=3), 2 * LOAD.tokens * 2),  # two norms, a number more each, of two bytes
        (Execution(dropout=True), LOAD.tokens * 2),  # two masks of one byte
        (Execution(activation_extra_moves=1), LOAD.tokens * 2 * 4),  # of an MLP that is four times as wide
    ],
)
def test_what_a_framework_does_not_fuse_passes_through_memory(execution: Execution, seconds: float) -> None:
    hardware = preset("h100-80g")
    block = LayerShape("decoder_block", hidden=64, out=64, mixer=Attention(4, 4, 16), mlp=DenseMlp(256))
    fused, other = (AnalyticCosts(hardware, "bf16", e) for e in (Execution(), execution))
    added = [
        other.seconds(LayerWork(block, 1, LOAD, kind)) - fused.seconds(LayerWork(block, 1, LOAD, kind))
        for kind in ("forward", "backward")
    ]
    assert added[0] == pytest.approx(seconds * 64 / hardware.moved_bytes_per_s)
    assert added[1] == pytest.approx(2 * added[0])


def test_backward_computes_again_what_the_framework_did_not_keep() -> None:
    hardware = preset("a100-80g")
    block = LayerShape("decoder_block", hidden=64, out=64, mixer=Attention(4, 4, 16), mlp=DenseMlp(256))
    forward_s = AnalyticCosts(hardware, "bf16").pieces(LayerWork(block, 1, LOAD, "forward"))
    again = Execution(recomputed_gemms=1.0, recomputes_elementwise=True, recomputes_attention=True)
    kept_s, again_s = (
        AnalyticCosts(hardware, "bf16", e).seconds(LayerWork(block, 1, LOAD, "backward")) for e in (Execution(), again)
    )
    starts_s = 20 * hardware.kernel_launch_s  # recomputation is not charged with starting kernels
    assert again_s - kept_s == pytest.approx(sum(map(sum, forward_s)) - starts_s)


@pytest.mark.parametrize(("precision", "bytes_of_weight"), [("bf16", 4 + 4 - 2), ("fp32", 4 + 4 - 4)])
def test_a_gradient_added_to_an_fp32_sum_reads_and_writes_the_sum(precision: Precision, bytes_of_weight: int) -> None:
    """Only where weights train, and as much for few tokens as for many."""
    hardware = preset("h100-80g")
    block = LayerShape("decoder_block", hidden=64, out=64, mixer=Attention(4, 4, 16), mlp=DenseMlp(256))
    fused, written = (AnalyticCosts(hardware, precision, e) for e in (Execution(fuses_gradients=True), Execution()))
    for tokens in (1, 4096):
        work = LayerWork(block, 1, TokenLoad.of(np.array([tokens])), "backward")
        added_s = fused.seconds(work) - written.seconds(work)
        expected_s = bytes_of_weight * analytic.num_parameters(block, 1) / hardware.moved_bytes_per_s
        assert added_s == pytest.approx(expected_s)
        frozen = work._replace(layer=replace(block, trainable=False))
        assert fused.seconds(frozen) == written.seconds(frozen)


def test_a_fixed_order_of_gradients_leaves_multiprocessors_idle() -> None:
    """32 heads on 132 multiprocessors: 160 blocks of threads in two waves. 132 heads fill one wave."""
    fixed = Execution(is_deterministic=True)
    assert fixed.deterministic_share(32, 132) == pytest.approx(160 / 264)
    assert fixed.deterministic_share(132, 132) == Execution().deterministic_share(32, 132) == 1.0
    # Measured with two samples of 8,192 tokens: 166 TFLOP/s (Dao-AILab/flash-attention#1893).
    hardware = replace(preset("h100-80g"), power_watts=0, training_watts=0)
    block = LayerShape(
        "decoder_block", hidden=2048, out=2048, mixer=Attention(16, 16, 128, causal=True), mlp=DenseMlp(8192)
    )
    load = TokenLoad.of(np.array([8192] * 2))
    orders = (Execution(attention_kernel="flash_attn"), replace(fixed, attention_kernel="flash_attn"))
    free_s, fixed_s = (
        AnalyticCosts(hardware, "bf16", e).seconds(LayerWork(block, 1, load, "backward")) for e in orders
    )
    flops, share = 2.5 * 4 * 2 * (8192**2 / 2) * 2048, 160 / 264
    moved_s = fixed.deterministic_bytes(32, 132, 2 * 8192 * 2048) / hardware.moved_bytes_per_s
    unordered_s = (fixed_s - free_s - moved_s) / (1 / share - 1)
    assert flops / (unordered_s / share + moved_s) / 1e12 == pytest.approx(166, rel=0.02)


def test_a_fixed_order_keeps_gradients_of_queries_for_every_block() -> None:
    """32 heads on 132 multiprocessors have five blocks each, so four more gradients in fp32, zeroed and read."""
    fixed = Execution(is_deterministic=True)
    assert fixed.deterministic_bytes(32, 132, 1000) == 4 * 2 * 4 * 1000
    assert fixed.deterministic_bytes(132, 132, 1000) == Execution().deterministic_bytes(32, 132, 1000) == 0
    assert fixed.deterministic_bytes(32, 0, 1000) == 0, "of hardware whose multiprocessors are not known"


@pytest.mark.parametrize("gb_per_s", [5.0, 60.0, 450.0])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_user_buffers_hide_what_goes_round_the_ranks_beside_gemms(direction: PassDirection, gb_per_s: float) -> None:
    """Compare with the parts one after another: a rank computes its own part while the first of others travels."""
    tp, hardware = 4, preset("h100-80g")
    hardware = replace(hardware, intra_node=replace(hardware.intra_node, bytes_per_s=gb_per_s * 1e9))
    block = LayerShape("decoder_block", hidden=2048, out=2048, mixer=Attention(16, 16, 128), mlp=DenseMlp(8192))
    work = LayerWork(block, tp, TokenLoad.of(np.array([4096])), direction, split=TokenSplit(True))
    own, hiding = (AnalyticCosts(hardware, "bf16", e) for e in (OWN_RUNTIME, replace(OWN_RUNTIME, user_buffers=True)))
    nbytes = work.load.tokens * block.hidden * 2
    saved_s = 0.0
    for piece, kind in collective_kinds(direction, sp=True).items():
        gemm_s, _, after_s = own.compute_beside(work)[piece]
        if after_s:  # the gradient of a weight is beside it in any case
            continue
        collective_s = own.collective(kind, nbytes, GroupLayout(tp))
        arrived_s = computed_s = 0.0
        for part in range(tp):
            arrived_s += collective_s / (tp - 1) if part else 0.0
            computed_s = max(computed_s, arrived_s) + gemm_s / tp
        saved_s += (1 - hardware.overlap_slowdown) * (collective_s + gemm_s - computed_s)
    assert saved_s > 0
    assert own.seconds(work) - hiding.seconds(work) == pytest.approx(saved_s)
    of_pieces = [sum(piece.total_s for piece in costs.pieces(work)) for costs in (own, hiding)]
    assert of_pieces[0] - of_pieces[1] == pytest.approx(saved_s)


@pytest.mark.parametrize("work", [{"tp": 1}, {"split": TokenSplit(False)}])
def test_user_buffers_need_sequence_parallelism(work: dict[str, Any]) -> None:
    block = LayerShape("decoder_block", hidden=2048, out=2048, mixer=Attention(16, 16, 128), mlp=DenseMlp(8192))
    asked = LayerWork(block, 4, LOAD, "forward", split=TokenSplit(True))._replace(**work)
    executions = OWN_RUNTIME, Execution(user_buffers=True)
    seconds = [AnalyticCosts(preset("h100-80g"), "bf16", e).seconds(asked) for e in executions]
    assert seconds[0] == seconds[1]


def test_scores_that_pass_through_memory_cost_more_than_fused_attention() -> None:
    block = LayerShape("decoder_block", hidden=2048, out=2048, mixer=Attention(16, 16, 128), mlp=DenseMlp(8192))
    load = TokenLoad.of(np.array([2048] * 4))
    seconds = [
        AnalyticCosts(preset("a100-80g"), "bf16", e).seconds(LayerWork(block, 1, load, "forward"))
        for e in (OWN_RUNTIME, Execution(fused_attention=False), Execution(fused_attention=False, dropout=True))
    ]
    assert seconds == sorted(seconds)


def test_collectives_take_the_time_of_their_rings() -> None:
    costs = AnalyticCosts(preset("h100-80g"), "bf16")
    link = costs.hardware.intra_node
    nbytes = 8 * 10**9
    start_s = costs.hardware.collective_start_s
    [*_, (ranks, gather_share, all_reduce_share)] = costs.hardware.group_rates
    assert ranks == 8

    def once(share: float) -> float:
        return 7 * (link.step_s + nbytes / 8 / (share * link.bytes_per_s))

    assert costs.collective("all_gather", nbytes, GroupLayout(8)) == pytest.approx(start_s + once(gather_share))
    assert costs.collective("all_reduce", nbytes, GroupLayout(8)) == pytest.approx(start_s + 2 * once(all_reduce_share))
    assert costs.collective("all_reduce", nbytes, GroupLayout(1)) == 0.0
    assert costs.transfer(nbytes, False) > costs.transfer(nbytes, True)


def test_a_head_that_computes_by_chunks_has_its_gradients_in_forward() -> None:
    costs = AnalyticCosts(preset("h100-80g"), "bf16", Execution())
    head = LayerShape("head", hidden=1536, out=1536, vocab=151_936, rms_norm=True)
    frozen = replace(head, trainable=False)
    at_once, by_chunks = (TokenLoad(8192, 8192**2, 8192, 1, targets=targets) for targets in (1024, 8192))
    assert not analytic.loss_sizes(head, at_once, 2).uses_chunks
    assert analytic.loss_sizes(head, by_chunks, 2).uses_chunks

    def shares(layer: LayerShape, load: TokenLoad, input_grad: bool) -> tuple[float, float]:
        """Return the seconds of forward and backward, in forwards without a backward."""
        evaluation = costs.seconds(LayerWork(frozen, 1, load, "forward", input_grad=False))
        forward = costs.seconds(LayerWork(layer, 1, load, "forward", input_grad=input_grad))
        return forward / evaluation, costs.seconds(
            LayerWork(layer, 1, load, "backward", input_grad=input_grad)
        ) / evaluation

    assert shares(head, at_once, True) == pytest.approx((1, 2), abs=0.1)
    assert shares(head, by_chunks, True) == pytest.approx((2.7, 0.3), abs=0.3)
    assert sum(shares(head, by_chunks, True)) == pytest.approx(sum(shares(head, at_once, True)), rel=0.05)
    assert 1.5 < shares(frozen, by_chunks, True)[0] < shares(head, by_chunks, True)[0]
    assert shares(frozen, by_chunks, False) == (1, 0)


def test_an_mlp_in_chunks_reads_and_writes_sums_of_gradients_for_each_more() -> None:
    """Only where the block is recomputed, and its weights train."""
    hardware = preset("h100-80g")
    costs = AnalyticCosts(hardware, "bf16")
    [block] = {layer for layer in shape_of(settings()).unit("llm").layers if layer.kind == "decoder_block"}
    num_weights = 3 * block.hidden * block.dense_mlp.ffn
    sums_s = 2 * 4 * num_weights / hardware.moved_bytes_per_s
    for num_tokens, num_more in ((MLP_CHUNK_TOKENS, 0), (MLP_CHUNK_TOKENS + 1, 1), (3 * MLP_CHUNK_TOKENS, 2)):
        load = TokenLoad.of(np.array([num_tokens]))
        assert costs.mlp_chunk_sums(block, 1, load, "recompute") == pytest.approx(num_more * sums_s)
        assert costs.mlp_chunk_sums(block, 1, load, "backward") == 0.0
        forward_s, recompute_s = (costs.seconds(LayerWork(block, 1, load, kind)) for kind in ("forward", "recompute"))  # type: ignore[arg-type]
        assert recompute_s - forward_s == pytest.approx(num_more * sums_s, abs=1e-9)
        frozen = replace(block, trainable=False)
        assert costs.mlp_chunk_sums(frozen, 1, load, "recompute") == 0.0
