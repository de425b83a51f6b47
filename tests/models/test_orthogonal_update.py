"""Muon's update of one matrix: beside torch's, and beside the singular values that it should make."""

import pytest
import torch
from torch import Tensor, nn

from mmtrain.models.optim.orthogonal_update import NEWTON_SCHULZ_STEPS, orthogonal_update, orthogonalize
from mmtrain.models.shapes.weight_matrices import WeightMatrices
from tests.flow.reference_muon import orthogonal

SHAPES = [(8, 24), (24, 8), (16, 16), (1, 7)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_are_those_of_the_iterations(shape: tuple[int, int]) -> None:
    matrix = drawn(*shape)
    result = orthogonalize(matrix)
    assert float((result - orthogonal(matrix)).norm() / result.norm()) < 1e-4
    values = torch.linalg.svdvals(result)
    assert 0.5 < values.min() <= values.max() < 1.3


def test_a_matrix_of_zeros_stays_zero_and_one_of_low_rank_keeps_its_rank() -> None:
    assert not orthogonalize(torch.zeros(4, 6)).any()
    low = drawn(6, 2) @ drawn(2, 9, seed=1)
    values = torch.linalg.svdvals(orthogonalize(low))
    assert values[1] > 0.5 > 1e-3 > values[2]


@pytest.mark.parametrize("shape", SHAPES)
def test_in_bf16_the_iterations_are_those_of_torch(shape: tuple[int, int]) -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    matrix = drawn(*shape).bfloat16()
    theirs = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), NEWTON_SCHULZ_STEPS, 1e-7)
    ours = orthogonalize(matrix)
    assert ours.dtype == torch.bfloat16
    assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_torch_muon_that_matches_adamw(shape: tuple[int, int]) -> None:
    """Compare weights after some steps; torch computes the iterations in bf16, so updates differ by a percent."""
    weight = nn.Parameter(drawn(*shape))
    theirs = torch.optim.Muon([weight], lr=0.1, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    ours, momentum = weight.detach().clone(), torch.zeros(shape)
    matrices = WeightMatrices(shape[1], (shape[0],))
    for seed in range(3):
        weight.grad = gradient = drawn(*shape, seed=seed + 1)
        before = weight.detach().clone()
        theirs.step()
        momentum.lerp_(gradient, 0.1)
        update = orthogonal_update(gradient.lerp(momentum, 0.9), matrices)
        ours = ours * (1 - 0.1 * 0.3) - 0.1 * update
        moved = float((weight.detach() - before).norm())
        assert float((weight.detach() - ours).norm()) < 0.03 * moved * (seed + 1)


def test_matrices_of_a_weight_are_orthogonalized_apart() -> None:
    """Rows of two KV heads: two queries, key, value, of one row each."""
    weight = drawn(8, 5)
    update = orthogonal_update(weight, WeightMatrices(5, (2, 1, 1), groups=2))
    for rows in ([0, 1, 4, 5], [2, 6], [3, 7]):
        expected = orthogonalize(weight[rows]) * 0.2 * max(len(rows), 5) ** 0.5
        assert torch.allclose(update[rows], expected, atol=1e-6)


def test_updates_are_as_large_as_those_of_adamw() -> None:
    update = orthogonal_update(drawn(64, 200), WeightMatrices(200, (64,)))
    assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.15)


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_megatrons_muon(shape: tuple[int, int]) -> None:
    """Compare weights after some steps with `emerging-optimizers`, which Megatron-core 0.19 uses; in fp32."""
    judge = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers", reason="needs Python 3.12 and triton")
    weight = nn.Parameter(drawn(*shape))
    theirs = judge.Muon(
        [weight],
        0.1,
        0.9,
        0.3,
        nesterov=True,
        coefficient_type="simple",
        fp32_matmul_prec="highest",
        extra_scale_factor=0.2,
    )  # learning rate, momentum, weight decay
    ours, momentum = weight.detach().clone(), torch.zeros(shape)
    for seed in range(3):
        weight.grad = gradient = drawn(*shape, seed=seed + 1)
        theirs.step()
        momentum.lerp_(gradient, 0.1)
        update = orthogonal_update(gradient.lerp(momentum, 0.9), WeightMatrices(shape[1], (shape[0],)))
        ours = ours * (1 - 0.1 * 0.3) - 0.1 * update
        assert torch.allclose(weight.detach(), ours, atol=1e-5)
