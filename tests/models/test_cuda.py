"""Tests that need a GPU; skipped on machines without one."""

import pytest
import torch

from mmtrain.models.attention import (
    AttentionBackend,
    AttentionOptions,
    SequenceLayout,
    attend,
    backend_problems,
    prepare_attention,
)
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.stage.stage_module import StageSpec
from tests.models.factory import CPU, settings, shape_of, text

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("head_dim", [64, 80, 100, 128, 256])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (True, 7)])
@pytest.mark.parametrize("backend", ["flash_attn_3", "flash_attn_4", "flash_attn", "varlen", "sdpa"])
def test_backends_equal_the_reference(backend: AttentionBackend, causal: bool, window: int, head_dim: int) -> None:
    device = torch.device("cuda")
    lengths = (5, 17, 17, 1, 40)
    problem = backend_problems(device, torch.bfloat16, head_dim)[backend]
    if problem is not None:
        pytest.skip(problem)
    prepare_attention(device)
    torch.manual_seed(0)
    qkv = [torch.randn(80, n, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2)]
    weights = torch.randn(80, 4, head_dim, device=device, dtype=torch.bfloat16)
    outcomes = []
    names: tuple[AttentionBackend, ...] = (backend, "reference")
    for name in names:
        out = attend(qkv[0], qkv[1], qkv[2], SequenceLayout(lengths), AttentionOptions(name, causal, window))
        outcomes.append([out, *torch.autograd.grad((out * weights).sum(), qkv)])
    for got, want in zip(*outcomes, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "tolerance"),
    [(torch.float32, 16, 1e-5), (torch.bfloat16, 64, 2e-2), (torch.bfloat16, 100, 2e-2)],
)
def test_a_stage_on_cuda_equals_the_stage_on_a_cpu(dtype: torch.dtype, head_dim: int, tolerance: float) -> None:
    """Compare losses in fp32, and in bf16 with whatever kernel `auto` selects; heads of 100 features are padded."""
    model = settings(llm={"head_dim": head_dim})
    shape = shape_of(model)
    inputs = text(9, 12)
    losses = []
    for device in (CPU, torch.device("cuda")):
        spec = StageSpec("llm", (0, 5), recompute=frozenset({1}))
        llm = build_stage(model, shape, spec, ParallelGroups.single(), StageOptions(dtype, device, seed=1))
        assert inputs.ids is not None
        assert inputs.labels is not None
        moved = type(inputs)(inputs.lengths, inputs.ids.to(device), inputs.labels.to(device))
        loss = llm(None, moved)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)
