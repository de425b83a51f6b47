"""The fused forms of `models.kernels` against those in torch: interpreted on a CPU, and compiled on a GPU."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.errors import UserError
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.kernels import liger
from mmtrain.models.kernels.choice import describe_kernels, kernel_choices, uses_fused_kernels
from mmtrain.models.kernels.elementwise import activate_gated, apply_rotary, rotate_heads
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.loss_chunks import LossSizes
from mmtrain.models.stage.stage_module import StageSpec
from mmtrain.recipe.settings.train_settings import KernelSetting
from tests.models.factory import CPU, settings, shape_of, text

HAS_LIGER = all(importlib.util.find_spec(name) is not None for name in ("liger_kernel", "triton"))
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read where kernels are defined: when triton is imported
needs_liger = pytest.mark.skipif(
    not HAS_LIGER or not (IS_INTERPRETED or torch.cuda.is_available()),
    reason="it needs liger-kernel and triton, and a GPU or TRITON_INTERPRET=1",
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE).requires_grad_()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_LIGER or IS_INTERPRETED, reason="liger-kernel and triton are not installed")
def test_this_file_with_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def assert_same(
    fused: Callable[..., tuple[Tensor, ...]], torch_form: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
) -> None:
    """Compare all outputs, and the gradients of all inputs; each form gets inputs that it may write over."""
    outputs, expected = (form(*(tensor.clone() for tensor in inputs)) for form in (fused, torch_form))
    torch.testing.assert_close(outputs, expected)
    gradients = [torch.randn_like(out) for out in expected]
    ours, theirs = (
        torch.autograd.grad(outs, inputs, [gradient.clone() for gradient in gradients]) for outs in (outputs, expected)
    )
    torch.testing.assert_close(ours, theirs)


@needs_liger
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 8), (3, 1, 6), (5, 5, 10)])
def test_rotation(heads: int, kv_heads: int, width: int) -> None:
    angles = numbers(7, 1, width // 2, seed=2).detach()
    rope = (angles.cos(), angles.sin())
    q, k = numbers(7, heads, width), numbers(7, kv_heads, width, seed=1)
    assert_same(
        lambda q, k: rotate_heads(q, k, rope, fused=True),
        lambda q, k: (apply_rotary(q, rope), apply_rotary(k, rope)),
        q,
        k,
    )


@needs_liger
def test_rotation_of_views_leaves_the_projection_as_it_was() -> None:
    """With as many keys as queries these are views of one tensor, and the values are others of it."""
    angles = numbers(5, 1, 3, seed=2).detach()
    projected = numbers(5, 2, 3, 6).detach()
    before = projected.clone()
    rotate_heads(projected[:, :, 0], projected[:, :, 1], (angles.cos(), angles.sin()), fused=True)
    assert torch.equal(projected, before)


@needs_liger
@pytest.mark.parametrize("size", [(5, 1, 14), (3, 1, 6), (1, 2)])
def test_swiglu(size: tuple[int, ...]) -> None:
    assert_same(
        lambda inner: (activate_gated(inner, "silu", fused=True),),
        lambda inner: (activate_gated(inner, "silu", fused=False),),
        numbers(*size),
    )


@needs_liger
def test_swiglu_of_rows_with_weights() -> None:
    assert_same(
        lambda inner, weights: (activate_gated(inner, "silu", weights, fused=True),),
        lambda inner, weights: (activate_gated(inner, "silu", weights, fused=False),),
        numbers(5, 14),
        numbers(5, 1, seed=1),
    )


@needs_liger
@needs_gpu
@pytest.mark.parametrize("size", [(5, 1, 10), (3, 7), (1, 33)])
def test_residual_sum_and_rms_norm(size: tuple[int, ...]) -> None:
    """The interpreter cannot run this kernel: it casts an argument that is a plain number there."""
    weight = numbers(size[-1], seed=2)
    assert_same(
        lambda x, residual, weight: liger.add_and_rms_norm(x, residual, weight, 1e-5),
        lambda x, residual, weight: (x + residual, F.rms_norm(x + residual, weight.shape, weight, 1e-5)),
        numbers(*size),
        numbers(*size, seed=1),
        weight,
    )


@needs_liger
@needs_gpu
def test_a_stage_with_fused_kernels_computes_what_torch_does() -> None:
    model = settings(llm={"head_dim": 16})
    shape = shape_of(model)
    inputs = text(9, 12)
    assert inputs.ids is not None
    assert inputs.labels is not None
    moved = type(inputs)(inputs.lengths, inputs.ids.to(DEVICE), inputs.labels.to(DEVICE))
    losses = []
    settings_compared: tuple[KernelSetting, ...] = ("torch", "fused")
    for kernels in settings_compared:
        options = StageOptions(torch.bfloat16, DEVICE, seed=1, kernels=kernels)
        llm = build_stage(model, shape, StageSpec("llm", (0, 5)), ParallelGroups.single(), options)
        loss = llm(None, moved)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_a_cpu_uses_the_forms_in_torch_and_says_why() -> None:
    assert not uses_fused_kernels("auto", CPU)
    assert not uses_fused_kernels("torch", CPU)
    choices = {choice.operation: choice for choice in kernel_choices("auto", CPU, torch.float32)}
    assert choices["SwiGLU"].form == "torch"
    assert choices["SwiGLU"].reason.startswith("they need")
    assert choices["gradients of weights"].form == "their GEMM"
    [in_bf16] = [c for c in kernel_choices("torch", CPU, torch.bfloat16) if c.operation == "gradients of weights"]
    assert in_bf16.form == "autograd"


def test_the_form_of_the_loss_is_said_with_its_reason() -> None:
    """Of 152,064 ids on two ranks, 3,584 wide in bf16; `doctor` knows no sizes."""
    sizes = LossSizes(8192, 76_032, 3584, 2, trains_matrix=True)
    parts = [
        str(choice).removeprefix("loss over the vocabulary: ")
        for loss in (None, sizes, replace(sizes, tokens=8459), replace(sizes, ids=512, hidden=896))
        for choice in kernel_choices("torch", CPU, torch.float32, loss)
        if choice.operation == "loss over the vocabulary"
    ]
    targets_only = "torch, for tokens with a target only"
    in_doctor, at_once, by_chunks, never = parts
    assert in_doctor.startswith(f"{targets_only}, with all logits or by 1,024 tokens at a time (chunks where")
    assert "liger-kernel's knows no padded ids" in in_doctor
    reason = "chunks save 25% of the loss's memory from 8,459 tokens on; the largest microbatch has"
    assert at_once == f"{targets_only}, with all logits ({reason} 8,192 targets, for 76,032 ids on each rank)"
    assert by_chunks.startswith(f"{targets_only}, by 1,024 tokens at a time ({reason} 8,459 targets")
    assert never.startswith(f"{targets_only}, with all logits (chunks never save 25%")


def test_a_run_says_its_kernels_in_a_short_line() -> None:
    """Reasons are for `doctor`: a run's first lines must not bury what the user has to act on."""
    loss = LossSizes(8192, 76_032, 3584, 2, trains_matrix=True)
    line = describe_kernels(kernel_choices("torch", CPU, torch.float32, loss))
    assert line == "kernels: torch; loss: torch, for tokens with a target only, with all logits"
    of_delta_nets = describe_kernels(kernel_choices("torch", CPU, torch.float32, loss, has_delta_nets=True))
    assert of_delta_nets == f"{line}; gated delta rule: torch"


def test_fused_kernels_that_cannot_run_are_an_error() -> None:
    with pytest.raises(UserError, match=r"train\.kernels: `fused` cannot be used here: they need a CUDA device"):
        uses_fused_kernels("fused", CPU)


def test_a_package_without_the_functions_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "_FUNCTIONS", {"rope": "NoSuchFunction"})
    liger._import_problem.cache_clear()
    problem = liger.fused_problem(torch.device("cuda"))
    liger._import_problem.cache_clear()
    assert problem is not None
    assert "mmtrain[cuda]" in problem
