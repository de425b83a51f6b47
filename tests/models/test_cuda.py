"""Tests that need a GPU; skipped on machines without one."""

import pytest
import torch

from mmtrain.models.attention import AttentionOptions, attend, choose_backend
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups, prepare_megatron
from mmtrain.models.stage_module import StageSpec
from tests.models.factory import CPU, settings, shape_of, text

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (True, 7)])
@pytest.mark.parametrize("backend", ["varlen", "flash_attn", "sdpa"])
def test_backends_equal_the_reference(backend: str, causal: bool, window: int) -> None:
    if backend == "flash_attn":
        pytest.importorskip("flash_attn")
    device = torch.device("cuda")
    lengths = (5, 17, 17, 1, 40)
    assert choose_backend(backend, device, torch.bfloat16) == backend  # type: ignore[arg-type]
    torch.manual_seed(0)
    qkv = [torch.randn(80, n, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2)]
    weights = torch.randn(80, 4, 64, device=device, dtype=torch.bfloat16)
    outcomes = []
    for name in (backend, "reference"):
        out = attend(qkv[0], qkv[1], qkv[2], lengths, AttentionOptions(name, causal, window))  # type: ignore[arg-type]
        outcomes.append([out, *torch.autograd.grad((out * weights).sum(), qkv)])
    for got, want in zip(*outcomes, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=5e-2, atol=5e-2)


def test_a_stage_on_cuda_equals_the_stage_on_a_cpu() -> None:
    model = settings(llm={"head_dim": 16})
    shape = shape_of(model)
    inputs = text(9, 12)
    losses = []
    for device in (CPU, torch.device("cuda")):
        spec = StageSpec("llm", (0, 5), recompute=frozenset({1}))
        llm = build_stage(model, shape, spec, ParallelGroups.single(), StageOptions(torch.float32, device, seed=1))
        assert inputs.ids is not None
        assert inputs.labels is not None
        moved = type(inputs)(inputs.lengths, inputs.ids.to(device), inputs.labels.to(device))
        loss = llm(None, moved)
        loss.backward()
        losses.append(loss.item())
    prepare_megatron(CPU)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
