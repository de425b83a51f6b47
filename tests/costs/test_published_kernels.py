"""Modelled rates of GEMMs and attention beside published measurements: they come out within 10%."""

from dataclasses import replace

import numpy as np
import pytest

from mmtrain.costs import AnalyticCosts, TokenLoad, preset
from mmtrain.costs.analytic_costs import gemm_seconds
from mmtrain.costs.attention_kernels import (
    ANY_KERNEL,
    CUDNN_ON_HOPPER,
    FLASH_ATTENTION_2_ON_AMPERE,
    FLASH_ATTENTION_2_ON_HOPPER,
    FLASH_ATTENTION_3_ON_HOPPER,
    FLASH_ATTENTION_4_ON_BLACKWELL,
    AttentionKernel,
)
from mmtrain.costs.block_arithmetic import mixer_arithmetic
from mmtrain.costs.cost_model import LayerWork
from mmtrain.costs.framework import Execution
from mmtrain.costs.hardware import Hardware
from mmtrain.costs.part_records import Gemm
from mmtrain.models.shapes.layer_shape import Attention, DenseMlp, LayerShape

KERNEL_START_S = 3e-6  # which measurements of single GEMMs hold, and `kernel_launch_s` in a plan
# (m, n, k) -> TFLOP/s on an H100 and an A100, both the mean of two collections (ai-dynamo/aiconfigurator@095f58a5:
# SGLang, TensorRT-LLM), and on an H100 by XLA (openxla, matmul_interpolator_data.h; 0: it has no such shape).
GEMMS = {
    (4096, 4096, 4096): (780, 258, 786),
    (8192, 6144, 4096): (761, 249, 0),
    (8192, 4096, 6144): (792, 255, 0),
    (4096, 12288, 12288): (753, 253, 0),
    (8192, 1024, 8192): (801, 254, 0),
    (8192, 8192, 1024): (703, 245, 0),
    (4096, 4096, 1024): (642, 229, 681),
    (4096, 3072, 1024): (637, 214, 0),
    (8192, 8192, 256): (508, 182, 0),
}
SMALL_GEMMS = {(2048, 2048, 2048): 631, (2048, 4096, 1024): 594, (4096, 1024, 1024): 492}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# (kernel, width of heads, causal, backward) -> TFLOP/s at `LENGTHS`: FlashAttention-3, arXiv 2407.08608, figures 5, 6.
H100_ATTENTION = {
    ("flash_attn_3", 64, False, False): (333, 392, 460, 476, 496, 497),
    ("flash_attn_3", 64, True, False): (197, 265, 371, 420, 460, 473),
    ("flash_attn_3", 128, False, False): (467, 565, 625, 638, 646, 648),
    ("flash_attn_3", 128, True, False): (292, 423, 521, 579, 602, 616),
    ("flash_attn_3", 256, False, False): (482, 639, 707, 736, 746, 756),
    ("flash_attn_3", 256, True, False): (286, 427, 537, 612, 628, 642),
    ("flash_attn_3", 64, False, True): (272, 363, 422, 453, 472, 474),
    ("flash_attn_3", 128, False, True): (316, 424, 501, 542, 559, 561),
    ("flash_attn", 64, False, False): (282, 306, 318, 321, 322, 324),
    ("flash_attn", 64, True, False): (180, 229, 262, 284, 295, 299),
    ("flash_attn", 128, False, False): (309, 350, 362, 368, 370, 370),
    ("flash_attn", 128, True, False): (191, 260, 298, 319, 333, 335),
    ("flash_attn", 64, False, True): (198, 238, 264, 279, 287, 291),
    ("flash_attn", 128, False, True): (214, 260, 291, 310, 318, 322),
}
# cuDNN 9.19 on an H200 at 2,048 to 32,768 tokens: NVIDIA/cudnn-frontend@3929da2e, benchmark/sdpa_benchmark_training.
CUDNN_ATTENTION = {
    (True, False): (484, 591, 644, 673, 688),
    (False, False): (633, 671, 691, 702, 693),
    (True, True): (370, 474, 541, 579, 581),
    (False, True): (504, 560, 594, 612, 572),
}


def gemm_tflops(name: str, shape: tuple[int, int, int]) -> float:
    """Return the rate of a GEMM that is alone on a GPU which it does not heat to its power limit."""
    cool = replace(preset(name), training_watts=0.0)
    gemm = Gemm(*shape)
    return gemm.flops / (gemm_seconds(cool, "bf16", gemm) + KERNEL_START_S) / 1e12


def attention_tflops(
    kernel: AttentionKernel, hardware: Hardware, width: int, length: int, *, causal: bool, is_backward: bool
) -> float:
    keys = length / 2 if causal else length
    return kernel.efficiency(width, keys, causal, is_backward) * hardware.bf16_flops / 1e12


@pytest.mark.parametrize("shape", GEMMS)
def test_gemms_reach_published_rates(shape: tuple[int, int, int]) -> None:
    on_h100, on_a100, by_xla = GEMMS[shape]
    assert gemm_tflops("h100-80g", shape) == pytest.approx(on_h100, rel=0.1)
    assert gemm_tflops("a100-80g", shape) == pytest.approx(on_a100, rel=0.1)
    if by_xla:
        assert gemm_tflops("h100-80g", shape) == pytest.approx(by_xla, rel=0.1)


@pytest.mark.parametrize("shape", SMALL_GEMMS)
def test_small_gemms_reach_published_rates(shape: tuple[int, int, int]) -> None:
    """Of XLA's table; small products lose to their depth, the last wave and the start of the kernel."""
    assert gemm_tflops("h100-80g", shape) == pytest.approx(SMALL_GEMMS[shape], rel=0.12)


def test_no_gemm_beats_the_best_one_that_was_found() -> None:
    """stas00/ml-engineering, maximum achievable matmul FLOPS."""
    for name, best in (("h100-80g", 794.5), ("a100-80g", 271.2), ("b200-180g", 1745.0)):
        hardware = preset(name)
        assert hardware.gemm_efficiency * hardware.bf16_flops <= best * 1e12


@pytest.mark.parametrize("case", H100_ATTENTION, ids=str)
def test_attention_reaches_the_rates_of_its_paper(case: tuple[str, int, bool, bool]) -> None:
    backend, width, causal, is_backward = case
    hardware = preset("h100-80g")
    kernel = hardware.attention_kernel(backend)
    assert backend in kernel.backends
    for length, published in zip(LENGTHS, H100_ATTENTION[case], strict=True):
        modelled = attention_tflops(kernel, hardware, width, length, causal=causal, is_backward=is_backward)
        assert modelled == pytest.approx(published, rel=0.11 if width == 256 else 0.1), length


@pytest.mark.parametrize("case", CUDNN_ATTENTION, ids=str)
def test_attention_of_cudnn_reaches_published_rates(case: tuple[bool, bool]) -> None:
    causal, is_backward = case
    for length, published in zip((2048, 4096, 8192, 16384, 32768), CUDNN_ATTENTION[case], strict=True):
        hardware = preset("h200-141g")
        modelled = attention_tflops(CUDNN_ON_HOPPER, hardware, 128, length, causal=causal, is_backward=is_backward)
        assert modelled == pytest.approx(published, rel=0.1), length


def test_attention_reaches_published_rates_on_other_gpus() -> None:
    a100, b200 = preset("a100-80g"), preset("b200-180g")
    of_length = {512: 135, 1024: 166, 2048: 185, 4096: 195, 8192: 202, 16384: 205}  # aiconfigurator, a100_sxm
    for length, published in of_length.items():
        kernel = FLASH_ATTENTION_2_ON_AMPERE
        modelled = attention_tflops(kernel, a100, 128, length, causal=True, is_backward=False)
        assert modelled == pytest.approx(published, rel=0.1)
    # Dao-AILab/flash-attention#2605 and #2280.
    for causal, of_length in ((False, {1024: 1540, 4096: 1796, 16384: 1882}), (True, {1024: 829, 4096: 1431})):
        for length, published in of_length.items():
            kernel = FLASH_ATTENTION_4_ON_BLACKWELL
            modelled = attention_tflops(kernel, b200, 128, length, causal=causal, is_backward=False)
            assert modelled == pytest.approx(published, rel=0.1)
    for causal, published in ((False, 1360), (True, 1209)):
        kernel = FLASH_ATTENTION_4_ON_BLACKWELL
        modelled = attention_tflops(kernel, b200, 128, 8192, causal=causal, is_backward=True)
        assert modelled == pytest.approx(published, rel=0.1)


def test_heads_of_odd_widths_cost_what_they_are_padded_to() -> None:
    """FlashAttention-3 in encoders at 1,024 tokens: 297 TFLOP/s with heads of 72 features, 348 with 80."""
    kernel, hardware = FLASH_ATTENTION_3_ON_HOPPER, preset("h100-80g")
    for width, published in ((72, 297), (80, 348)):
        modelled = attention_tflops(kernel, hardware, width, 1024, causal=False, is_backward=False)
        assert modelled == pytest.approx(published, rel=0.1)
    assert ANY_KERNEL.efficiency(80, 1.0, True, True) == 1.0


@pytest.mark.parametrize(
    "kernel",
    [FLASH_ATTENTION_2_ON_AMPERE, FLASH_ATTENTION_2_ON_HOPPER, FLASH_ATTENTION_3_ON_HOPPER, CUDNN_ON_HOPPER],
    ids=lambda kernel: kernel.backends[0],
)
def test_more_keys_raise_the_rate_and_never_save_time(kernel: AttentionKernel) -> None:
    for width in (64, 80, 128, 256):
        for causal in (False, True):
            for is_backward in (False, True):
                rates = [kernel.efficiency(width, keys, causal, is_backward) for keys in (64, 512, 4096, 1 << 17)]
                assert rates == sorted(rates)
                assert 0 < rates[-1] < 1
                seconds = [keys / rate for keys, rate in zip((64, 512, 4096, 1 << 17), rates, strict=True)]
                assert seconds == sorted(seconds)


def test_a_query_sees_half_of_its_sequence_behind_a_causal_mask() -> None:
    both_ways = LayerShape("decoder_block", hidden=64, out=64, mixer=Attention(4, 4, 16), mlp=DenseMlp(256))
    block = replace(both_ways, mixer=replace(both_ways.attention, causal=True))
    load = TokenLoad.of(np.array([100, 100]))
    assert mixer_arithmetic(both_ways).mean_keys(load) == 100
    assert mixer_arithmetic(block).mean_keys(load) == pytest.approx(50.5)


def test_a_framework_and_a_recipe_choose_the_kernel() -> None:
    hardware = preset("h100-80g")
    attention = Attention(32, 32, 128, causal=True)
    block = LayerShape("decoder_block", hidden=4096, out=4096, mixer=attention, mlp=DenseMlp(16384))
    work = LayerWork(block, 1, TokenLoad.of(np.array([16384])), "forward")
    newest, older = (AnalyticCosts(hardware, "bf16", Execution(attention_kernel=k)) for k in ("", "flash_attn"))
    chosen = AnalyticCosts(hardware.with_attention("varlen"), "bf16")
    assert newest.seconds(work) < older.seconds(work)
    assert chosen.seconds(work) == older.seconds(work)
    assert hardware.with_attention("auto") is hardware
    assert hardware.with_attention("flash_attn_3").attention_kernels == hardware.attention_kernels


def test_a_power_limit_slows_arithmetic_alone() -> None:
    """Capping an H100 at 600 W loses 10 to 15% of a transformer's steps (factryze.ai, power capping)."""
    free = preset("h100-80g")
    limited = preset("h100-80g-500w")
    assert free.clock == pytest.approx(0.96, abs=0.005)
    assert limited.clock < free.clock < 1
    assert replace(free, power_watts=600).clock / replace(free, training_watts=0.0).clock == pytest.approx(
        0.88, abs=0.03
    )
    shape = (8192, 8192, 8192)
    slowed = gemm_seconds(limited, "bf16", Gemm(*shape)) / gemm_seconds(free, "bf16", Gemm(*shape))
    assert slowed == pytest.approx(free.clock / limited.clock)
    assert limited.moved_bytes_per_s == free.moved_bytes_per_s
    assert preset("a100-80g").clock == preset("cpu-core").clock == 1.0


@pytest.mark.parametrize(
    ("name", "gib"), [("a100-80g", 79.26), ("a800-80g", 79.26), ("h100-80g", 79.14), ("h200-141g", 139.8)]
)
def test_presets_hold_the_memory_that_cuda_states_less_its_context(name: str, gib: float) -> None:
    context_gib = 551e6 / 2**30
    assert preset(name).memory_bytes / 2**30 + context_gib == pytest.approx(gib, abs=0.01)


def test_costs_of_a_core_stay_as_they_were() -> None:
    """What a CPU computes has no kernel of attention, no power limit and no waves of tiles."""
    core = preset("cpu-core")
    assert core.efficiency_at(256, 256, 256) == pytest.approx(0.9 * (256 / 264) ** 3)
    assert core.attention_kernel("") is ANY_KERNEL
    attention = Attention(4, 4, 16, causal=True)
    block = LayerShape("decoder_block", hidden=64, out=64, mixer=attention, mlp=DenseMlp(256))
    load, costs = TokenLoad.of(np.array([300, 212])), AnalyticCosts(core, "fp32")
    narrow = replace(block, mixer=replace(attention, window=1))  # a query sees itself alone
    seconds = [sum(costs.block_compute(LayerWork(layer, 1, load, "forward"))) for layer in (block, narrow)]
    pairs = (300 * 301 + 212 * 213) / 2 - 512
    assert seconds[0] - seconds[1] == pytest.approx(4 * pairs * 64 / (100e9 * 0.3))
