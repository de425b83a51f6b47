"""How many kernels a block starts: each costs the host some microseconds, and most read and write all tokens once."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmtrain.models.attention import SequenceLayout
from mmtrain.models.attention.packed_sequences import PackedSequences
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups, layer_factory
from mmtrain.models.stage.stage_module import StageSpec
from mmtrain.recipe.settings.model_settings import ModelSettings
from tests.models.factory import settings, shape_of

NUM_TOKENS = 53
META = torch.device("meta")
# They allocate, or describe memory anew; on CUDA none of them starts a kernel.
NO_KERNELS = {"empty", "empty_like", "new_empty", "_unsafe_view", "detach"}

# Kernels of a block in forward and backward, and what they were when autograd derived every backward and a bias was
# added behind its GEMM.
BUDGETS = {
    "decoder block": (settings(llm={"qkv_bias": True}), "llm", "decoder_block", (18, 25), (28, 35)),
    "decoder block, head norms": (settings(llm={"qk_norm": True}), "llm", "decoder_block", (20, 26), (29, 36)),
    "decoder block, GELU gates": (settings(llm={"mlp": "geglu"}), "llm", "decoder_block", (18, 24), (27, 34)),
    "ViT block": (settings(), "vision", "vit_block", (10, 19), (14, 19)),
    "ViT block, rotary": (settings(vision={"positions": "rotary"}), "vision", "vit_block", (16, 25), (28, 35)),
    "ViT block, quick GELU": (settings(vision={"activation": "quick_gelu"}), "vision", "vit_block", (12, 20), (16, 23)),
}  # fmt: skip


class KernelCounter(TorchDispatchMode):
    """Counts operations that compute, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.kernels.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NO_KERNELS:
            self.kernels[name] += 1
        return func(*args, **(kwargs or {}))


class OneKernel(torch.autograd.Function):
    """Stands for an operation that is one kernel each way on CUDA, and many elsewhere."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        first, *others = ctx.saved_tensors
        return (grad.clone().view_as(first), *(torch.empty_like(tensor) for tensor in others))


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count attention and RMSNorm as what they are on CUDA."""
    monkeypatch.setattr(layer_factory, "attend", lambda q, k, v, layout, options: OneKernel.apply(q, k, v))
    monkeypatch.setattr(layer_factory, "rms_norm", lambda x, weight, eps: OneKernel.apply(x, weight))


def block_kernels(model: ModelSettings, unit: str, kind: str) -> tuple[KernelCounter, KernelCounter]:
    """Run a block on the device that computes nothing; return the kernels of its forward and of its backward."""
    shape = shape_of(model)
    layers = shape.unit(unit).layers
    index = next(i for i, layer in enumerate(layers) if layer.kind == kind)
    options = StageOptions(torch.bfloat16, META, seed=1, attention="sdpa")
    stage = build_stage(model, shape, StageSpec(unit, (index, index + 1)), ParallelGroups.single(), options)
    hidden = torch.empty(NUM_TOKENS, layers[index].hidden, device=META, dtype=torch.bfloat16, requires_grad=True)
    packing = PackedSequences(SequenceLayout((NUM_TOKENS,)))
    if layers[index].mixer is not None and layers[index].attention.rotates:
        table = torch.empty(NUM_TOKENS, 1, layers[index].attention.head_dim // 2, device=META, dtype=torch.bfloat16)
        packing = replace(packing, rope=(table, table))
    with KernelCounter() as forward:
        out = stage.layers[str(index)](hidden, packing)
    with KernelCounter() as backward:
        out.backward(torch.empty_like(out))
    return forward, backward


@pytest.mark.parametrize("case", BUDGETS)
def test_a_block_keeps_its_budget_of_kernels(case: str) -> None:
    model, unit, kind, budget, before = BUDGETS[case]
    forward, backward = block_kernels(model, unit, kind)
    print(f"{case}: {forward.total} + {backward.total} kernels, before {before[0]} + {before[1]}")
    assert forward.total <= budget[0], forward.kernels
    assert backward.total <= budget[1], backward.kernels
