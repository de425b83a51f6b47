"""GEMMs in chunks of tokens give what whole GEMMs and whole collectives give, and put every row at its place."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.megatron import prepare_megatron
from mmtrain.models.megatron.tp_linear import chunk_bounds, gather_then_multiply, multiply_then_reduce
from tests.distributed import run_ranks

INPUTS, OUTPUTS = 6, 5


@pytest.mark.parametrize(("num_rows", "num_chunks"), [(1, 1), (1, 4), (7, 3), (8, 4), (9, 100)])
def test_chunks_cover_all_rows_evenly(num_rows: int, num_chunks: int) -> None:
    bounds = chunk_bounds(num_rows, num_chunks)
    assert [row for start, stop in bounds for row in range(start, stop)] == list(range(num_rows))
    sizes = {stop - start for start, stop in bounds}
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert len(bounds) == min(num_rows, num_chunks)


def _whole_numbers(seed: int, *shape: int) -> Tensor:
    """Return small whole numbers in fp32, whose sums are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def _tokens(rank: int, num_tokens: int) -> Tensor:
    return _whole_numbers(rank, num_tokens, 1, INPUTS)


def _gathered_products(num_tokens: int, num_chunks: int) -> tuple[Tensor, Tensor]:
    matrix, bias = _whole_numbers(100, INPUTS, OUTPUTS), _whole_numbers(101, OUTPUTS)
    group = dist.group.WORLD
    assert group is not None
    return gather_then_multiply(_tokens(dist.get_rank(), num_tokens), matrix, bias, group, num_chunks)


@pytest.mark.parametrize("tp", [2, 4])
def test_products_of_gathered_tokens_are_exact_and_in_order(tp: int) -> None:
    matrix, bias = _whole_numbers(100, INPUTS, OUTPUTS), _whole_numbers(101, OUTPUTS)
    for num_tokens, num_chunks in [(7, 3), (2, 5)]:
        everything = torch.cat([_tokens(rank, num_tokens) for rank in range(tp)])
        for products, tokens in run_ranks(tp, _gathered_products, num_tokens, num_chunks):
            assert torch.equal(tokens, everything)
            assert torch.equal(products, everything @ matrix + bias)


def _reduced_products(num_tokens: int, num_chunks: int, scatters: bool) -> Tensor:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    matrix = _whole_numbers(100 + rank, INPUTS, OUTPUTS)
    prepare_megatron(torch.device("cpu"))
    tokens = _tokens(rank, num_tokens)
    sums, reductions = multiply_then_reduce(tokens, matrix, group, num_chunks, scatters=scatters)
    reductions.wait()
    return sums


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("scatters", [False, True])
def test_sums_of_products_are_exact_and_in_order(tp: int, scatters: bool) -> None:
    for num_tokens, num_chunks in [(7 * tp, 3), (tp, 5)]:
        expected = torch.stack(
            [_tokens(rank, num_tokens) @ _whole_numbers(100 + rank, INPUTS, OUTPUTS) for rank in range(tp)]
        ).sum(dim=0)
        on_ranks = run_ranks(tp, _reduced_products, num_tokens, num_chunks, scatters)
        parts = expected.chunk(tp) if scatters else [expected] * tp
        for sums, part in zip(on_ranks, parts, strict=True):
            assert torch.equal(sums, part)
