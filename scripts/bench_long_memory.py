"""Print predicted beside measured activation memory of an LLM's microbatch that is one long sequence.

    python -m scripts.bench_long_memory [--cpu-tokens 16384] [--tokens 131072]

First a small LLM in fp32 runs forward and backward on this CPU, in a process of its own for each variant, and what it
adds to the resident memory is measured. Then Qwen2.5-7B passes torch's `meta` device in bf16, which has shapes without
numbers: all tensors alive at once are counted, with stand-ins that keep what fused kernels of a GPU keep. Weights and
their gradients are left out. `kept` lasts from forward to backward, `peak` is the most at once.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmtrain.costs import AnalyticCosts, HeldLayers, Precision, TokenLoad, preset
from mmtrain.costs.layer_arithmetic import context_parallel_load
from mmtrain.costs.rank_memory import microbatch_activation_bytes, microbatch_host_bytes, stage_working_bytes
from mmtrain.models.attention.context_parallel import ContextShare
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.model_shape import ModelShape, OffloadMode
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageModule, StageSpec
from scripts.bench_loss import added_peak_mib
from scripts.measurements import arguments, start
from tests.costs.counted_stages import Counted, SavedStorages, count, large_stages_on_meta
from tests.models.device_copies import META, on_device
from tests.models.factory import CPU, settings, shape_of

GIB = 1 << 30
MIB = 1 << 20
QWEN_7B: dict[str, Any] = {
    "layers": 28, "hidden": 3584, "ffn": 18944, "heads": 28, "kv_heads": 4, "vocab": 152064, "qkv_bias": True,
}  # fmt: skip
SMALL: dict[str, Any] = {"layers": 2, "hidden": 128, "ffn": 512, "heads": 2, "kv_heads": 1, "vocab": 4096}


@dataclass(frozen=True)
class Variant:
    """How a microbatch is computed."""

    name: str
    recompute: bool = False  # all blocks
    activation_again: bool = False
    cp: int = 1  # ranks that share the sequence; the memory is that of one
    offload: OffloadMode = "none"  # what waits in host memory, with two microbatches at once


VARIANTS = (
    Variant("nothing recomputed"),
    Variant("activation functions again", activation_again=True),
    Variant("blocks recomputed", recompute=True),
)
ON_HOST = (
    Variant("blocks recomputed, inputs in host memory", recompute=True, offload="inputs"),
    Variant("activations of blocks in host memory", recompute=True, offload="all"),
)
SHARED = tuple(replace(v, name=f"{v.name}, cp 4", cp=4) for v in VARIANTS)


@dataclass(frozen=True)
class LongSequence:
    """A whole LLM whose microbatch is one sequence with a target at every token."""

    llm: dict[str, Any]
    tokens: int
    variant: Variant

    @property
    def shape(self) -> ModelShape:
        """Return the model as planner and costs know it."""
        choices = {"recompute_activation_function": self.variant.activation_again, "offload": self.variant.offload}
        return shape_of(settings(vision=None, llm=self.llm), parallel={"llm": choices})

    @property
    def recomputed(self) -> range:
        """Return the layers that are recomputed."""
        return range(1, self.llm["layers"] + 1) if self.variant.recompute else range(0)

    def build(self, device: torch.device, dtype: torch.dtype) -> StageModule:
        """Build the LLM on this rank."""
        options = StageOptions(dtype, device, seed=1, attention="auto")
        spec = StageSpec("llm", (0, self.llm["layers"] + 2), frozenset(self.recomputed))
        groups = ParallelGroups.single()
        if self.variant.cp > 1:
            groups = replace(groups, cp=dist.group.WORLD)
        return build_stage(settings(vision=None, llm=self.llm), self.shape, spec, groups, options)

    def inputs(self) -> TextInput:
        """Return what the rank reads of the microbatch."""
        num_tokens = self.tokens // self.variant.cp
        context = None
        if self.variant.cp > 1:
            pieces = ((num_tokens,),) * self.variant.cp
            context = ContextShare(0, "ulysses", (0,), (), (self.tokens,), pieces)
        ids, targets = torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens)
        return TextInput((num_tokens,), ids, ids.clone(), target_positions=targets, context=context)

    def predicted(self, precision: Precision) -> Counted:
        """Return what costs say of a microbatch, or of two where activations wait in host memory."""
        costs = AnalyticCosts(preset("h200-141g"), precision)
        layers = self.shape.unit("llm").layers
        num_layers = range(len(layers))
        load = TokenLoad.of(np.array([self.tokens]))
        if self.variant.cp > 1:
            load = context_parallel_load(load, self.variant.cp)
        flags = (tuple(i > 0 for i in num_layers), tuple(i in self.recomputed for i in num_layers))
        held = HeldLayers(layers, *flags, 1, 1, self.num_microbatches, load)
        kept = self.num_microbatches * microbatch_activation_bytes(held, costs, precision)
        host = self.num_microbatches * microbatch_host_bytes(held, costs, precision)
        return Counted(kept, kept + stage_working_bytes(held, costs, precision), host)

    @property
    def num_microbatches(self) -> int:
        """Return how many microbatches are between forward and backward at once."""
        return 1 if self.variant.offload == "none" else 2


def count_on_meta(run: LongSequence) -> Counted:
    """Count the tensors of a forward and backward in bf16 on torch's `meta` device."""
    with large_stages_on_meta():
        return count(run.build(META, torch.bfloat16), on_device(run.inputs(), META), *[None] * run.num_microbatches)


def measure_on_cpu(run: LongSequence) -> Counted:
    """Count what autograd keeps of a forward in fp32, and measure what forward and backward add to this process."""
    module, inputs = run.build(CPU, torch.float32), run.inputs()
    short = replace(run, tokens=64).inputs()
    module.run(module.context(short, {}), None, module.indices).backward()  # loads libraries, starts threads
    saved = SavedStorages(module)

    def forward() -> Tensor:
        with saved:
            return module.run(module.context(inputs, {}), None, module.indices)

    peak = round(added_peak_mib(forward, CPU) * MIB)
    return Counted(saved.nbytes, peak)


def measure_in_own_process(tokens: int, variant: Variant) -> Counted:
    """Run `measure_on_cpu` in a process whose allocator returns what is freed."""
    command = [sys.executable, "-W", "ignore", "-m", "scripts.bench_long_memory", "--cpu-tokens", str(tokens)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
    command += ["--variant", variant.name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return Counted(*json.loads(done.stdout))


def cells(variant: Variant, predicted: Counted, measured: Counted) -> list[str]:
    """Return the cells of a variant: what is kept, the peak, and what waits in host memory."""
    pairs = [(predicted.saved, measured.saved), (predicted.peak, measured.peak)]
    if measured.host:
        pairs.append((predicted.host, measured.host))
    figures = [f"{ours / GIB:.2f} | {real / GIB:.2f} | {ours / real:.2f}" for ours, real in pairs]
    return [variant.name, *figures]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cpu-tokens", type=int, default=16_384)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        [variant] = [v for v in VARIANTS if v.name == options.variant]
        measured = measure_on_cpu(LongSequence(SMALL, options.cpu_tokens, variant))
        print(json.dumps([measured.saved, measured.peak]))
        return
    report = start("Memory of long sequences", options)
    columns = "kept, predicted", "counted", "ratio", "peak, predicted", "measured", "ratio"
    report.table(f"GiB; {options.cpu_tokens} tokens in fp32 on this CPU", *columns)
    for variant in VARIANTS:
        run = LongSequence(SMALL, options.cpu_tokens, variant)
        report.row(*cells(variant, run.predicted("fp32"), measure_in_own_process(options.cpu_tokens, variant)))
    report.line()
    report.table(f"GiB; {options.tokens} tokens in bf16 of Qwen2.5-7B, counted", *columns)
    dist.init_process_group("fake", rank=0, world_size=SHARED[0].cp, store=FakeStore())
    for variant in (*VARIANTS, *ON_HOST, *SHARED):
        run = LongSequence(QWEN_7B, options.tokens, variant)
        report.row(*cells(variant, run.predicted("bf16"), count_on_meta(run)))


if __name__ == "__main__":
    main()
