"""Linears of experts by one grouped GEMM give what they give one after another."""

import pytest
import torch
from torch import Tensor, nn

from mmtrain.models.kernels.grouped_gemm import grouped_gemm_problem, grouped_linear, takes_grouped_gemm

SIZES = (5, 0, 7, 1)  # rows of each expert


def _gradients(rows: Tensor, weights: list[nn.Parameter], out: Tensor) -> list[Tensor]:
    trained = [weight for weight in weights if weight.requires_grad]
    coefficients = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
    return list(torch.autograd.grad((out * coefficients).sum(), [rows, *trained]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_gemm_equals_one_gemm_after_another(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(sum(SIZES), 16, dtype=dtype, requires_grad=True)
    weights = [nn.Parameter(torch.randn(24, 16, dtype=dtype), requires_grad=i != 3) for i in range(len(SIZES))]
    assert takes_grouped_gemm(rows, weights)
    grouped = grouped_linear(rows, weights, SIZES)
    parts = zip(torch.split(rows, SIZES), weights, strict=True)
    one_by_one = torch.cat([part @ weight.T for part, weight in parts])
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(grouped, one_by_one, **tolerance)
    expected = _gradients(rows, weights, one_by_one)
    assert len(expected) == 4  # the last weight is frozen
    torch.testing.assert_close(_gradients(rows, weights, grouped), expected, **tolerance)


def test_no_grouped_gemm_runs_without_rows_or_with_odd_widths() -> None:
    weights = [nn.Parameter(torch.zeros(24, 16))]
    assert not takes_grouped_gemm(torch.zeros(0, 16), weights)
    assert not takes_grouped_gemm(torch.zeros(3, 17), [nn.Parameter(torch.zeros(24, 17))])
    assert "cpu" in (grouped_gemm_problem(torch.device("cpu"), torch.bfloat16) or "")
    assert "float32" in (grouped_gemm_problem(torch.device("cuda"), torch.float32) or "")
