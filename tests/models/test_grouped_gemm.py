"""Linears of experts, by one grouped GEMM or one after another, give what plain products give."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from mmtrain.models.kernels import grouped_gemm
from mmtrain.models.kernels.grouped_gemm import expert_linear, grouped_gemm_problem

SIZES = [5, 0, 7, 1]  # rows of each expert


def _gradients(rows: Tensor, weights: list[nn.Parameter], out: Tensor) -> list[Tensor]:
    trained = [weight for weight in weights if weight.requires_grad]
    coefficients = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
    return list(torch.autograd.grad((out * coefficients).sum(), [rows, *trained]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [16, 15])
@pytest.mark.parametrize("problem", [None, "not here"])
def test_experts_compute_what_plain_products_do(problem: str | None, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(sum(SIZES), inputs, dtype=dtype, requires_grad=True)
    weights = [nn.Parameter(torch.randn(24, inputs, dtype=dtype), requires_grad=i != 3) for i in range(len(SIZES))]
    parts = zip(torch.split(rows, SIZES), weights, strict=True)
    expected = torch.cat([part @ weight.T for part, weight in parts])
    with (
        patch.object(grouped_gemm, "grouped_gemm_problem", lambda *_: problem),
        patch.object(grouped_gemm, "_grouped_mm", wraps=grouped_gemm._grouped_mm) as grouped,
    ):
        out = expert_linear(rows, weights, SIZES)
        gradients = _gradients(rows, weights, out)
    assert grouped.call_count == (2 if problem is None and inputs == 16 else 0)  # odd widths suit no kernel
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    expected_gradients = _gradients(rows, weights, expected)
    assert len(gradients) == 4  # the last weight is frozen
    torch.testing.assert_close(gradients, expected_gradients, rtol=tolerance, atol=tolerance)


def test_no_rows_give_no_outputs_and_zeros_for_weights() -> None:
    weights = [nn.Parameter(torch.ones(4, 3))]
    out = expert_linear(torch.zeros(0, 3, requires_grad=True), weights, [0])
    assert out.shape == (0, 4)
    [gradient] = torch.autograd.grad(out.sum(), weights)
    assert not gradient.any()


def test_a_grouped_gemm_is_for_cuda_and_bf16() -> None:
    assert "cpu" in (grouped_gemm_problem(torch.device("cpu"), torch.bfloat16) or "")
    assert "float32" in (grouped_gemm_problem(torch.device("cuda"), torch.float32) or "")
