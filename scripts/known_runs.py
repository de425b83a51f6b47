"""Published step times, with what is known of the software that they were measured with; `known_runs.yaml` holds them.

A hash of its name puts each run into one of two halves. Constants of `mmtrain.costs` and of the executions below may be
fitted to one half; the other half only judges them, and its ratios say how well predictions hold (`held_out`). Before
there were halves, runs had been chosen by hand: `before` keeps what each was used for.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mmtrain.costs.framework import OWN_RUNTIME, Execution
from mmtrain.costs.hardware import GB, Hardware, Link
from mmtrain.costs.hardware_presets import PRESETS
from mmtrain.costs.published_errors import LayoutKind, layout_kind

RUNS_FILE = Path(__file__).with_suffix(".yaml")
MAX_QUOTATION = 100  # characters

# Megatron-LM before FlashAttention, with dropout, learned positions and fused norm, softmax and bias-dropout-add.
# Its optimizer zeroes, unscales, checks, clips and converts in passes of their own: 58 bytes per parameter. Until 2022
# a kernel added the gradient of a microbatch to the sum, which was in fp16 (6 bytes) unless it was asked to be in fp32
# (12, as bf16 demands); then the GEMM did so.
MEGATRON_2021 = Execution(fused_attention=False, dropout=True, rotation_moves=0, optimizer_bytes=58, gradient_bytes=12)
# torchtitan: torch's attention, which it restricts to FlashAttention-2 on Hopper (models/attention.py).
TITAN = Execution(attention_kernel="flash_attn")
# Without torch.compile. RMSNorm: to fp32 (3), square (4), mean (2), scale (4), back (3), weight (2). Rotation of
# complex fp32 numbers: 3 + 4 + 3. SiLU and its product are two kernels.
TITAN_EAGER = replace(TITAN, norm_moves=18, rotation_moves=10, activation_extra_moves=2)
# cuDNN's attention on Hopper: of Transformer Engine (NeMo, Megatron-core, Automodel), XLA, and torch, which prefers it.
CUDNN_ATTENTION = Execution(attention_kernel="cudnn")
# Megatron-core with Transformer Engine, and gradients that are added up inside GEMMs.
MEGATRON_CORE = replace(CUDNN_ATTENTION, fuses_gradients=True)
# Its mixtures in Megatron-MoE-ModelZoo (model_configs/benchmarking): `expert-tensor-parallel-size: 1`, fused routers,
# fused permutations. So a mixture starts one kernel for scores and their choice, three for losses, four to permute,
# one to put back, and some for counts. `recompute: norm, act` computes most element-wise work again.
FUSED_MIXTURE = replace(MEGATRON_CORE, fuses_copies=True, mixture_kernels=12, exchange_kernels=8)
MEGATRON_MOE = replace(FUSED_MIXTURE, folds_experts=True, has_gemm_per_expert=True)
# MPT: torch's fused LayerNorm, positions inside attention, AdamW in passes of its own. Its benchmarks take the Triton
# kernel of FlashAttention by default (submit_benchmarks.py), 1.3 to 2.5 times slower than FlashAttention-2 (arXiv
# 2307.08691, section 4.1). FSDP of torch 2.0 with `limit_all_gathers`: the host waits for memory of earlier gathers,
# and collectives run in the order in which the host gets to them, so none is counted on to be hidden. Weights are
# views of one flat buffer for each layer, into which a gather writes.
FOUNDRY_EAGER = Execution(
    attention_kernel="flash_attn",
    attention_slowdown=1.9,
    rotation_moves=0,
    optimizer_bytes=80,
    overlaps_shards=False,
    copies_shards=False,
)
EXECUTIONS: dict[str, Execution] = {
    "own": OWN_RUNTIME,
    "megatron 2021": MEGATRON_2021,
    # `--fp16` without `--accumulate-allreduce-grads-in-fp32` (examples/sc21/CONFIG.sh).
    "megatron 2021, fp16": replace(MEGATRON_2021, gradient_bytes=6),
    # Selective recomputation: scores are computed again in backward (Korthikanti et al.).
    "megatron 2022": replace(MEGATRON_2021, recomputes_attention=True, gradient_bytes=0, fuses_gradients=True),
    "torchtitan eager": TITAN_EAGER,
    # Selective checkpointing by operation computes every second GEMM and all element-wise work again.
    "torchtitan eager, selective": replace(TITAN_EAGER, recomputed_gemms=0.5, recomputes_elementwise=True),
    # torch.compile fuses norms, rotation and activation.
    "torchtitan compiled, selective": replace(TITAN, recomputed_gemms=0.5, recomputes_elementwise=True),
    "torchtitan compiled": TITAN,
    "transformer engine": MEGATRON_CORE,
    "megatron, all-to-all": replace(MEGATRON_MOE, sends_rows="copies", recomputes_elementwise=True),
    "megatron, DeepEP": replace(MEGATRON_MOE, sends_rows="nodes", recomputes_elementwise=True),
    "megatron, all-to-all, all kept": replace(MEGATRON_MOE, sends_rows="copies"),
    "megatron, DeepEP, all kept": replace(MEGATRON_MOE, sends_rows="nodes"),
    # `--recompute-modules layernorm moe`
    "megatron, DeepEP, mixture again": replace(
        MEGATRON_MOE, sends_rows="nodes", recomputes_elementwise=True, recomputes_mixture=True
    ),
    # `enable_deepep: true`; its dispatcher is Megatron-core's, its experts are one grouped GEMM.
    "automodel, DeepEP": replace(FUSED_MIXTURE, sends_rows="nodes"),
    # User buffers hide tensor-parallel messages: `tp_comm_overlap` of NeMo, `--tp-comm-overlap` of Megatron-LM.
    "transformer engine, user buffers": replace(MEGATRON_CORE, user_buffers=True),
    # GPT 175B: `NVTE_FUSED_ATTN=0` in launch.sh, so FlashAttention-2.
    "nemo, dropout": replace(MEGATRON_CORE, attention_kernel="flash_attn", user_buffers=True, dropout=True),
    # LoongForge's tests set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 (tests/llm_vlm/executor/loongforge/run.sh).
    "loongforge": replace(OWN_RUNTIME, is_deterministic=True),
    # Its multimodal runs: `--no-gradient-accumulation-fusion`, `bias_activation_fusion: False` in encoders.
    "loongforge, encoder": Execution(is_deterministic=True, gradient_bytes=12, activation_extra_moves=2),
    "torch compiled": CUDNN_ATTENTION,
    # KempnerForge: each column-parallel linear gathers its own input. Its profile (benchmarks/profiling) counts 12
    # gathers and 8 scatters of a block whose layers are recomputed, where Megatron-LM has six of each.
    # One reduce-scatter of a layer for eight gathers there: four microbatches are added up before (training/grad.py).
    "kempnerforge": replace(CUDNN_ATTENTION, tp_traffic=20 / 12, reduces_once=True),
    "kempnerforge, no tp": replace(CUDNN_ATTENTION, reduces_once=True),
    "torch eager": replace(TITAN_EAGER, attention_kernel="cudnn"),
    "kempnerforge, eager": replace(TITAN_EAGER, attention_kernel="cudnn", reduces_once=True),
    "llm-foundry": FOUNDRY_EAGER,
    # On 128 GPUs and more, by model (sweep.py): `--attn_impl flash`, FlashAttention-2.
    "llm-foundry, flash": replace(FOUNDRY_EAGER, attention_slowdown=1.0),
    # `save_dot_except_mlpwi` computes gate and up projection again, 0.55 of the GEMMs of a block of Llama 2 70B, and
    # all that is no GEMM.
    "maxtext": replace(CUDNN_ATTENTION, recomputed_gemms=0.55, recomputes_elementwise=True, recomputes_attention=True),
    # `save_dot_only` keeps GEMMs alone. Positions are learned.
    "pax": replace(CUDNN_ATTENTION, rotation_moves=0, recomputes_elementwise=True, recomputes_attention=True),
}


HARDWARE: dict[str, Hardware] = {
    "a100": PRESETS["a100-80g"],
    # BLOOM's nodes: four Omni-Path links of 100 Gb/s for eight GPUs.
    "a100, Omni-Path": replace(PRESETS["a100-80g"], inter_node=Link(12 * GB, 20e-6, 4e-6), ports_per_rank=4 / 8),
    "a800": PRESETS["a800-80g"],
    "h100": PRESETS["h100-80g"],
    # torchtitan: "96GB HBM2e with 2.4 TB/sec peak memory bandwidth".
    "h100 at 500 W": replace(PRESETS["h100-80g-500w"], memory_bytes_per_s=2400 * GB),
    # Of the 18 NVLinks of a GPU, six lead to each of the three others (HGX H200 4-GPU, without NVSwitch): two GPUs have
    # a third of a GPU's rate between them, four use all of it. Between nodes: KempnerForge's profile of 13B on 24 GPUs,
    # tp 4 (benchmarks/profiling/13b_24gpu_profiling.md), counts 205 fp32 reduce-scatters in 2.95 s, five for each of 40
    # blocks (84.6 M parameters a rank) and of the rest (328 M): 5/6 of 362 MB in 14.4 ms.
    "h200, 4 a node": replace(
        PRESETS["h200-141g"],
        ranks_per_node=4,
        group_rates=((2, 0.73 / 3, 0.89 / 3), (4, 0.89, 0.96)),
        inter_node=Link(20.9 * GB, 20e-6, 4e-6),
    ),
}


@dataclass(frozen=True)
class KnownRun:
    """A published run, as near to it as a recipe can state it."""

    name: str
    source: str  # repository@commit and path, or arXiv
    quotation: str
    seconds: float  # of a step, published
    hardware: Hardware
    ranks: int
    model: Mapping[str, Any]
    sequence: int  # LLM tokens of each sample
    per_microbatch: int  # samples
    num_microbatches: int  # of a step, of all replicas
    kernels: str  # a key of `EXECUTIONS`
    # Empty: all ranks share one copy of the model (FSDP). With `shard`, they do with tp and cp inside.
    mesh: Mapping[str, Any] = field(default_factory=dict)
    recompute: float = 0.0  # share of the layers; between 0 and 1 a run is priced between none and all
    lora_rank: int | None = None
    grad_reduce: str = "fp32"  # in which gradients travelled; fp16 counts as bf16, which is as wide
    text: int | None = None  # text tokens of a sample that also has media; None: all of `sequence`
    vision: str = ""  # patches of a sample, as `count,text,vision` files state them
    before: str = "new"  # "used" in choosing constants or "held out", when a run's half was chosen by hand
    note: str = ""  # what the recipe cannot state, or the source does not

    @property
    def execution(self) -> Execution:
        """Whose kernels it ran. Gradients in 16 bits were added up on their way, as NeMo's `grad_sync_dtype` does."""
        return replace(EXECUTIONS[self.kernels], sums_on_the_way=self.grad_reduce == "bf16")

    @property
    def held_out(self) -> bool:
        """Whether it only judges: no constant may be fitted to it. By a hash of its name alone, never by hand."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 1

    @property
    def is_sharded(self) -> bool:
        """Whether ranks share copies of the model, as in FSDP."""
        return not self.mesh or "shard" in self.mesh

    @property
    def layout(self) -> LayoutKind:
        """The kind of layout that it is priced as."""
        return layout_kind(is_sharded=self.is_sharded, pp=self.mesh.get("pp", 1), cp=self.mesh.get("cp", 1))

    @property
    def has_encoder(self) -> bool:
        """Whether the model reads anything but text."""
        return len(self.model) > 1

    @property
    def has_experts(self) -> bool:
        """Whether its LLM is a mixture of experts."""
        return "moe" in self.model["llm"]

    @property
    def group(self) -> str:
        """What it is compared with: kind of GPU, kind of layout, and an encoder if there is one."""
        return f"{self.hardware.name}, {self.layout}" + (", with an encoder" if self.has_encoder else "")


@cache
def known_runs() -> tuple[KnownRun, ...]:
    """Read all runs."""
    data = yaml.safe_load(RUNS_FILE.read_text(encoding="utf-8"))
    return tuple(_read(row, data["models"]) for row in data["runs"])


@cache
def mixture_runs() -> tuple[KnownRun, ...]:
    """Read the runs of mixtures of experts, which are in neither half."""
    data = yaml.safe_load(RUNS_FILE.read_text(encoding="utf-8"))
    return tuple(_read(row, data["models"]) for row in data["mixture_runs"])


def _read(row: Mapping[str, Any], models: Mapping[str, Any]) -> KnownRun:
    run, batch, model = row["run"], row["batch"], models[row["run"]["model"]]
    return KnownRun(
        name=row["name"],
        source=row["source"],
        quotation=row["quote"],
        seconds=_seconds(row, model),
        hardware=HARDWARE[run["hardware"]],
        ranks=run["ranks"],
        model=model,
        sequence=batch["sequence"],
        per_microbatch=batch["samples"],
        num_microbatches=batch["microbatches"],
        kernels=run["kernels"],
        mesh=row.get("mesh", {}),
        recompute=1.0 if row.get("recompute") == "all" else row.get("recompute", 0.0),
        lora_rank=row.get("lora_rank"),
        grad_reduce=row.get("grad_reduce", "fp32"),
        text=batch.get("text"),
        vision=batch.get("vision", ""),
        before=row.get("before", "new"),
        note=row.get("note", ""),
    )


def _seconds(row: Mapping[str, Any], model: Mapping[str, Any]) -> float:
    """Return the seconds of a step from what was published: seconds, tokens a second and GPU, or TFLOP/s of a GPU.

    FLOPs of `tflops` are counted as Narayanan et al. do (arXiv 2104.04473, appendix), with a forward more if all is
    recomputed; those of `model_tflops` as `model_flops` does.
    """
    measured, batch, ranks = row["measured"], row["batch"], row["run"]["ranks"]
    samples, tokens = batch["samples"] * batch["microbatches"], batch["sequence"]
    if "seconds" in measured:
        return float(measured["seconds"])
    if "tokens_per_s" in measured:
        return float(samples * tokens / ranks / measured["tokens_per_s"])
    if "model_tflops" in measured:
        return float(samples * model_flops(model["llm"], tokens) / (ranks * measured["model_tflops"] * 1e12))
    llm, passes = model["llm"], 4 if measured["recomputed"] else 3
    layers, hidden = llm["layers"], llm["hidden"]
    of_blocks = 24 * passes * samples * tokens * layers * hidden**2 * (1 + tokens / (6 * hidden))
    of_head = 6 * samples * tokens * hidden * llm["vocab"]
    return float((of_blocks + of_head) / (ranks * measured["tflops"] * 1e12))


def model_flops(llm: Mapping[str, Any], tokens: int) -> float:
    """Return the FLOPs of a forward and backward of one sample, as Megatron-core counts them for a mixture.

    Half of the scores of attention count, experts as far as a token has them, and routers do not
    (`num_floating_point_operations` in megatron/training/training.py, since NVIDIA/Megatron-LM@8873b55d).
    """
    hidden, heads, moe = llm["hidden"], llm["heads"], llm["moe"]
    head_dim = llm.get("head_dim", hidden // heads)
    width, kv_width = heads * head_dim, llm["kv_heads"] * head_dim
    of_block = 2 * hidden * (width + kv_width) + width * tokens + 3 * hidden * moe["ffn"] * moe["top_k"]
    return float(6 * tokens * (llm["layers"] * of_block + hidden * llm["vocab"]))
