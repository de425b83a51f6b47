"""Tensor-parallel ranks denoise as one rank does and, joined, have the same gradients."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.generator_shapes import generator_layers
from mmtrain.models.stage.generator_input import GeneratorInput, GeneratorState
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from tests.distributed import run_ranks
from tests.models.generator.tiny import DIT, LLM_HIDDEN, build, run

SETTINGS = GeneratorSettings(**DIT)
SIZES = ((2, 3), (4, 4), (1, 2))  # in patches


def _shard(full: Tensor, local: Tensor, rank: int, tp: int) -> Tensor:
    """Return this rank's part of a full parameter or gradient, split as the marks of `local` say."""
    if not getattr(local, "tensor_model_parallel", False):
        return full
    return full.chunk(tp, dim=local.partition_dim)[rank]  # type: ignore[attr-defined]


def _denoise(modules: nn.ModuleList) -> tuple[Tensor, Tensor]:
    """Return the prediction, and the gradient of the LLM's outputs; parameters have gradients too."""
    generator = torch.Generator().manual_seed(5)
    num_tokens = sum(rows * cols for rows, cols in SIZES)
    cells = torch.randn(num_tokens, SETTINGS.channels * SETTINGS.patch**2, generator=generator)
    inputs = GeneratorInput(*zip(*SIZES, strict=True), cells, torch.tensor([10.0, 500.0, 990.0]))
    llm_rows = torch.randn(len(SIZES) * SETTINGS.context_tokens, LLM_HIDDEN, generator=generator).requires_grad_()
    out = run(modules, GeneratorState(llm_rows), inputs)
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    assert llm_rows.grad is not None
    return out.detach(), llm_rows.grad


def _differences() -> dict[str, float]:
    """Compare this rank's part of everything with what a single rank computes; return the largest differences."""
    whole = build(SETTINGS)
    expected_out, expected_llm_grad = _denoise(whole)
    groups = replace(ParallelGroups.single(), tp=dist.group.WORLD)
    sharded = build(SETTINGS, groups)
    full = dict(whole.named_parameters())
    with torch.no_grad():
        for name, param in sharded.named_parameters():
            param.copy_(_shard(full[name], param, groups.tp_rank, groups.tp_size))
    out, llm_grad = _denoise(sharded)
    differences = {"out": (out - expected_out).abs().max().item()}
    differences["llm"] = ((llm_grad - expected_llm_grad).norm() / expected_llm_grad.norm()).item()
    for name, param in sharded.named_parameters():
        grad = full[name].grad
        assert grad is not None
        assert param.grad is not None, name
        part = _shard(grad, param, groups.tp_rank, groups.tp_size)
        differences[name] = ((param.grad - part).norm() / part.norm()).item()
    num_split = sum(getattr(param, "tensor_model_parallel", False) for param in sharded.parameters())
    assert num_split == 11 * SETTINGS.layers, "weights of seven linears, and biases of those that split their outputs"
    return differences


@cache
def differences_of_ranks(tp: int) -> list[dict[str, float]]:
    return run_ranks(tp, _differences)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_agree_with_one_rank(tp: int) -> None:
    for rank, differences in enumerate(differences_of_ranks(tp)):
        assert len(differences) > len(generator_layers(SETTINGS, LLM_HIDDEN))
        for name, difference in differences.items():
            assert difference < 1e-4, f"rank {rank}: {name}"
