"""The operations of `models.kernels` against their formulas, with gradients that autograd derives."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmtrain.models.kernels import liger
from mmtrain.models.kernels.elementwise import activate, activate_gated, apply_rotary, rms_norm
from mmtrain.models.kernels.weight_gradient import add_weight_gradient
from mmtrain.recipe.settings.encoder_settings import Activation

FORMULAS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": lambda x: x * torch.sigmoid(x),
}


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def assert_same(ours: Callable[..., Tensor], formula: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Compare outputs, and the gradients of all inputs for one random gradient of the output."""
    out, expected = ours(*inputs), formula(*inputs)
    torch.testing.assert_close(out, expected)
    out_grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(out, inputs, out_grad)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, inputs, out_grad))


def test_all_activations_of_recipes_have_a_formula() -> None:
    assert set(get_args(Activation)) == set(FORMULAS)


@pytest.mark.parametrize("activation", FORMULAS)
def test_activations(activation: Activation) -> None:
    assert_same(lambda x: activate(x, activation), FORMULAS[activation], numbers(7, 1, 9))


@pytest.mark.parametrize("activation", FORMULAS)
def test_gated_activations(activation: Activation) -> None:
    def formula(inner: Tensor) -> Tensor:
        gates, values = inner.chunk(2, dim=-1)
        return FORMULAS[activation](gates) * values

    assert_same(lambda inner: activate_gated(inner, activation, fused=False), formula, numbers(5, 1, 14))


@pytest.mark.parametrize("fused", [False, True])
def test_gated_activations_of_rows_with_weights(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def formula(inner: Tensor, weights: Tensor) -> Tensor:
        gates, values = inner.chunk(2, dim=-1)
        return F.silu(gates) * values * weights

    monkeypatch.setattr(liger, "multiply_by_silu", lambda inner: activate_gated(inner, "silu", fused=False))
    inner, weights = numbers(5, 14), numbers(5, 1, seed=1)
    assert_same(lambda inner, weights: activate_gated(inner, "silu", weights, fused=fused), formula, inner, weights)


def test_a_gated_activation_keeps_its_input_only() -> None:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        inner = numbers(5, 14)
        activate_gated(inner, "silu", fused=False)
    assert [tensor.data_ptr() for tensor in saved] == [inner.data_ptr()]


@pytest.mark.parametrize("shape", [(7, 1, 10), (3, 4, 6), (1, 5)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    def formula(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    assert_same(lambda x, weight: rms_norm(x, weight, 1e-5), formula, numbers(*shape), numbers(shape[-1], seed=1))


def test_rms_norm_in_bf16_computes_in_fp32() -> None:
    x, weight = (numbers(*size).detach().bfloat16().requires_grad_() for size in ((64, 32), (32,)))
    out = rms_norm(x, weight, 1e-6)
    expected = F.rms_norm(x.float(), (32,), weight.float(), 1e-6)
    torch.testing.assert_close(out, expected.bfloat16())
    gradients = torch.autograd.grad(out.float().square().sum(), (x, weight))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.bfloat16().float().square().sum(), (x, weight)))


def test_rms_norm_of_strided_heads() -> None:
    """Queries of a packed projection are not contiguous."""
    packed, weight = numbers(6, 3, 4, 8), numbers(8, seed=1)
    assert_same(
        lambda qkv, weight: rms_norm(qkv[:, :, 1], weight, 1e-6),
        lambda qkv, weight: F.rms_norm(qkv[:, :, 1], (8,), weight, 1e-6),
        packed,
        weight,
    )


def test_rotation_of_heads_and_of_views_of_heads() -> None:
    angles = numbers(5, 1, 3, seed=1).detach()
    tables = (angles.cos(), angles.sin())

    def formula(x: Tensor) -> Tensor:
        pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    assert_same(lambda x: apply_rotary(x, tables), formula, numbers(5, 4, 6))
    assert_same(lambda x: apply_rotary(x[:, 1:3], tables), lambda x: formula(x[:, 1:3]), numbers(5, 4, 6))


def test_a_weight_gradient_is_added_where_the_optimizer_sums_it() -> None:
    weight = nn.Parameter(torch.randn(4, 3))
    out_grad, x = torch.randn(7, 4), torch.randn(7, 3)
    expected = out_grad.T @ x
    returned = add_weight_gradient(weight, out_grad, x)
    assert returned is not None
    torch.testing.assert_close(returned, expected)
    weight.main_grad = torch.ones(4, 3)  # type: ignore[attr-defined]
    assert add_weight_gradient(weight, out_grad, x) is None
    torch.testing.assert_close(weight.main_grad, 1 + expected)  # type: ignore[attr-defined]


def test_a_weight_gradient_in_bf16_is_left_to_autograd_on_a_cpu() -> None:
    weight = nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(4, 3)  # type: ignore[attr-defined]
    assert add_weight_gradient(weight, torch.randn(7, 4).bfloat16(), torch.randn(7, 3).bfloat16()) is not None
    assert not weight.main_grad.any()  # type: ignore[attr-defined]
