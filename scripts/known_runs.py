"""Published step times of language models on GPUs, with what is known of the software that they were measured with.

A run that is held out took no part in choosing any constant of `mmtrain.costs.hardware` or of the executions below:
its ratio was not known when they were chosen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmtrain.costs.framework import Execution
from mmtrain.costs.hardware import GB, Hardware
from mmtrain.costs.hardware_presets import PRESETS

NARAYANAN = "Narayanan et al., arXiv 2104.04473, table 1; microbatches: Megatron-LM, examples/sc21/run_table_1.sh"
KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198, table 5"
TITAN_A100 = "pytorch/torchtitan, docs/performance.md"
TITAN_H100 = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"

# Megatron-LM before FlashAttention, with dropout, learned positions and fused norm, softmax and bias-dropout-add.
# Its optimizer zeroes, unscales, checks, clips and converts in passes of their own: 58 bytes per parameter. Until 2022
# the fp16 gradient of a microbatch was added to the fp32 sum by a kernel (12 bytes); then inside the GEMM.
MEGATRON_2021 = Execution(fused_attention=False, dropout=True, rotation_moves=0, optimizer_bytes=58, gradient_bytes=12)
# Selective recomputation: scores are computed again in backward (Korthikanti et al.).
MEGATRON_2022 = replace(MEGATRON_2021, recomputes_attention=True, gradient_bytes=0)
# torchtitan without torch.compile. RMSNorm: to fp32 (3), square (4), mean (2), scale (4), back (3), weight (2).
# Rotation of complex fp32 numbers: 3 + 4 + 3. SiLU and its product are two kernels.
TITAN_EAGER = Execution(norm_moves=18, rotation_moves=10, activation_extra_moves=2)
# With selective checkpointing by operation, which computes every second GEMM and all element-wise work again.
TITAN_EAGER_SELECTIVE = replace(TITAN_EAGER, recomputed_gemms=0.5, recomputes_elementwise=True)
# torch.compile fuses norms, rotation and activation.
TITAN_COMPILED_SELECTIVE = Execution(recomputed_gemms=0.5, recomputes_elementwise=True)
# MPT: torch's fused LayerNorm, positions inside attention, AdamW in passes of its own. Its benchmarks take the Triton
# kernel of FlashAttention by default (submit_benchmarks.py), 1.3 to 2.5 times slower than FlashAttention-2 (arXiv
# 2307.08691, section 4.1). FSDP of torch 2.0 with `limit_all_gathers`: the host waits for memory of earlier gathers,
# and collectives run in the order in which the host gets to them, so none is counted on to be hidden. Weights are
# views of one flat buffer for each layer, into which a gather writes.
FOUNDRY_EAGER = Execution(
    attention_slowdown=1.9, rotation_moves=0, optimizer_bytes=80, overlaps_shards=False, copies_shards=False
)

A100, H100 = PRESETS["a100-80g"], PRESETS["h100-80g"]


def at_power(hardware: Hardware, watts: float, design_watts: float) -> Hardware:
    """Return a GPU whose power is limited below its design: sustained arithmetic slows with its clock.

    About 120 W do not depend on the clock (memory, leakage, links). The rest grows with clock times voltage squared,
    and the voltage with the clock down to a floor: with the clock to the power of 2.5.
    """
    constant_watts = 120.0
    clock = ((watts - constant_watts) / (design_watts - constant_watts)) ** (1 / 2.5)
    return replace(
        hardware,
        gemm_efficiency=hardware.gemm_efficiency * clock,
        attention_efficiency=hardware.attention_efficiency * clock,
        attention_backward_efficiency=hardware.attention_backward_efficiency * clock,
    )


# "96GB HBM2e with 2.4 TB/sec peak memory bandwidth", "500W power limit".
H100_OF_TITAN = replace(at_power(H100, 500, 700), memory_bytes_per_s=2400 * GB)


@dataclass(frozen=True)
class KnownRun:
    """A published run."""

    name: str
    source: str
    seconds: float  # of a step, published
    hardware: Hardware
    ranks: int
    llm: Mapping[str, Any]
    sequence: int  # tokens of each sample
    per_microbatch: int  # samples
    num_microbatches: int  # of a step, of all replicas
    execution: Execution
    mesh: Mapping[str, Any] = field(default_factory=dict)  # empty: all ranks share one copy of the model (FSDP)
    recompute: str = "none"
    held_out: bool = False


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden, "vocab": vocab, "mlp": "gelu"}


def _mpt(layers: int, hidden: int) -> dict[str, Any]:
    return _gpt(layers, hidden, hidden // 128, 50368)


def _narayanan(
    name: str, tflops: float, gpus: int, llm: dict[str, Any], batch: tuple[int, int], mesh: tuple[int, int], **more: Any
) -> KnownRun:
    """Return a run of table 1 from its FLOP/s a GPU, by the paper's count of FLOPs (recomputation included).

    batch: samples of a step and of a microbatch. mesh: tensor- and pipeline-parallel sizes.
    """
    (global_batch, per_microbatch), (tp, pp) = batch, mesh
    tokens, hidden = 2048, llm["hidden"]
    per_layer = 1 + tokens / (6 * hidden) + llm["vocab"] / (16 * llm["layers"] * hidden)
    flops = 96 * global_batch * tokens * llm["layers"] * hidden**2 * per_layer
    return KnownRun(
        name, NARAYANAN, flops / (gpus * tflops * 1e12), A100, gpus, llm, tokens, per_microbatch,
        global_batch // per_microbatch, MEGATRON_2021, {"tp": tp, "pp": pp, "dp": gpus // tp // pp, "sp": False},
        "all", **more,
    )  # fmt: skip


def _foundry(
    name: str, rate: float, on: Hardware, gpus: int, llm: dict[str, Any], samples: tuple[int, int, int], **more: Any
) -> KnownRun:
    """Return a run from its tokens a second and GPU; samples: tokens of one, samples and microbatches of a GPU."""
    sequence, per_microbatch, num_microbatches = samples
    seconds = sequence * per_microbatch * num_microbatches / rate
    return KnownRun(
        name, FOUNDRY, seconds, on, gpus, llm, sequence, per_microbatch, num_microbatches * gpus, FOUNDRY_EAGER, **more
    )


_LLAMA3 = {"kv_heads": 8, "vocab": 128256}
_LLAMA3_8B = {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336, **_LLAMA3}
_LLAMA3_70B = {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672, **_LLAMA3}
_LLAMA2_13B = {"layers": 40, "hidden": 5120, "heads": 40, "ffn": 13824, "vocab": 32000}

KNOWN_RUNS = (
    _narayanan("GPT 1.7B", 137, 32, _gpt(24, 2304, 24), (512, 16), (1, 1)),
    _narayanan("GPT 7.5B", 142, 128, _gpt(36, 4096, 32), (512, 16), (4, 1), held_out=True),
    _narayanan("GPT 18B", 135, 256, _gpt(40, 6144, 48), (1024, 8), (8, 1)),
    KnownRun("GPT 22B", KORTHIKANTI, 1.10, A100, 8, _gpt(48, 6144, 64), 2048, 4, 1, MEGATRON_2022,
             {"tp": 8, "pp": 1, "dp": 1}),
    KnownRun("GPT 175B", KORTHIKANTI, 13.75, A100, 64, _gpt(96, 12288, 96), 2048, 1, 64, MEGATRON_2022,
             {"tp": 8, "pp": 8, "vpp": 3, "dp": 1}),
    KnownRun("GPT 530B", KORTHIKANTI, 37.83, A100, 280, _gpt(105, 20480, 128), 2048, 1, 280, MEGATRON_2022,
             {"tp": 8, "pp": 35, "vpp": 3, "dp": 1}),
    KnownRun("GPT 1T", KORTHIKANTI, 71.49, A100, 512, _gpt(128, 25600, 160), 2048, 1, 512, MEGATRON_2022,
             {"tp": 8, "pp": 64, "dp": 1}, held_out=True),
    KnownRun("Llama 3 8B", TITAN_A100, 8192 / 2973, A100, 64, _LLAMA3_8B, 8192, 1, 64, TITAN_EAGER_SELECTIVE),
    KnownRun("Llama 3 70B", TITAN_A100, 8192 / 331, A100, 64, _LLAMA3_70B, 8192, 1, 64, TITAN_EAGER,
             recompute="all"),
    KnownRun("Llama 2 13B", TITAN_A100, 2 * 4096 / 2162, A100, 64, _LLAMA2_13B, 4096, 2, 64, TITAN_EAGER,
             held_out=True),
    KnownRun("Llama 3.1 8B", TITAN_H100, 2 * 8192 / 5762, H100_OF_TITAN, 8, _LLAMA3_8B, 8192, 2, 8,
             TITAN_EAGER_SELECTIVE),
    KnownRun("Llama 3.1 8B compiled", TITAN_H100, 2 * 8192 / 6667, H100_OF_TITAN, 8, _LLAMA3_8B, 8192, 2, 8,
             TITAN_COMPILED_SELECTIVE),
    KnownRun("Llama 3.1 8B on 128", TITAN_H100, 2 * 8192 / 5605, H100_OF_TITAN, 128, _LLAMA3_8B, 8192, 2, 128,
             TITAN_EAGER_SELECTIVE, held_out=True),
    _foundry("MPT 7B", 4641, A100, 8, _mpt(32, 4096), (2048, 6, 2)),
    _foundry("MPT 30B recomputed", 916, A100, 8, _mpt(48, 7168), (2048, 3, 21), recompute="all"),
    _foundry("MPT 1B, 32k tokens", 6275, A100, 8, _mpt(24, 2048), (32768, 1, 4)),
    _foundry("MPT 7B", 10643, H100, 8, _mpt(32, 4096), (2048, 6, 1)),
    _foundry("MPT 3B, 8k tokens", 16578, H100, 8, _mpt(32, 2560), (8192, 3, 6)),
    _foundry("MPT 13B", 4800, H100, 64, _mpt(40, 5120), (2048, 2, 1)),
    _foundry("MPT 70B recomputed", 1039, H100, 64, _mpt(80, 8192), (2048, 8, 4), recompute="all"),
    _foundry("MPT 7B, 8k recomputed", 3206, A100, 8, _mpt(32, 4096), (8192, 8, 2), recompute="all", held_out=True),
    _foundry("MPT 3B on 64", 22525, H100, 64, _mpt(32, 2560), (2048, 6, 3), held_out=True),
    _foundry("MPT 1B on 64", 44402, H100, 64, _mpt(24, 2048), (2048, 20, 1), held_out=True),
    _foundry("MPT 30B on 32", 2308, H100, 32, _mpt(48, 7168), (2048, 14, 3), recompute="all", held_out=True),
)  # fmt: skip
