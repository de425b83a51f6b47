"""Rows of experts are copied, exchanged and summed, against loops over tokens; a token goes to a rank once."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.megatron import expert_exchange
from mmtrain.models.megatron.compat import prepare_megatron
from mmtrain.models.megatron.expert_exchange import ExpertExchange, RowCopies, copy_rows, sum_copies
from mmtrain.models.megatron.experts import RowCounts
from tests.distributed import run_ranks

RANKS, EXPERTS, TOP_K, HIDDEN = 4, 12, 5, 3
TOKENS = (7, 0, 4, 1)  # of each rank


def test_copies_of_rows_are_summed_where_they_came_from() -> None:
    source = torch.tensor([2, 0, 2, 4, 0, 2, 1])  # the fourth row has no copy
    copies = RowCopies.of(source, numbers=torch.tensor([1, 2, 1, 1]))
    rows, factors = torch.randn(5, 2, requires_grad=True), torch.randn(7, 1)
    for at_once in (1, 100):
        with patch.object(expert_exchange, "COPIES_SUMMED_AT_ONCE", at_once):
            sums = sum_copies(copy_rows(rows, copies) * factors, copies)
            of_rows = torch.zeros(5, 1).index_add(0, source, factors)
            torch.testing.assert_close(sums, rows * of_rows)
            out_grad = torch.randn(5, 2)
            (grad,) = torch.autograd.grad(sums, rows, out_grad)
            torch.testing.assert_close(grad, out_grad * of_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_goes_once_to_each_rank_that_holds_its_experts(dtype: torch.dtype) -> None:
    """Each expert multiplies by its number, so that the result is known; links carry distinct ranks, not experts."""
    for sent_rows, distinct, choices in run_ranks(RANKS, exchange_and_compare, dtype):
        assert sent_rows == [distinct] * 4  # there, back, and so in backward
        assert distinct <= choices


def exchange_and_compare(dtype: torch.dtype) -> tuple[list[int], int, int]:
    """Compare with a loop over tokens; return the rows this rank sent or got back, its pairs, and its choices."""
    prepare_megatron(torch.device("cpu"))
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    random = torch.Generator().manual_seed(rank)
    tokens = torch.randn(TOKENS[rank], HIDDEN, generator=random).to(dtype).requires_grad_()
    weights = torch.rand(TOKENS[rank], TOP_K, generator=random).to(dtype).requires_grad_()
    experts = torch.rand(TOKENS[rank], EXPERTS, generator=random).argsort(dim=1)[:, :TOP_K]
    counts = RowCounts.of(experts, EXPERTS, group)
    sizes: list[int] = []
    run = dist.all_to_all_single

    def counted(received: Tensor, rows: Tensor, received_sizes: list[int], sent: list[int], **options: Any) -> Any:
        if rows.shape[1] == HIDDEN:
            is_way_back = len(sizes) in (1, 3)  # of rows, then of their gradients
            sizes.append(sum(received_sizes if is_way_back else sent))
        return run(received, rows, received_sizes, sent, **options)

    with patch.object(dist, "all_to_all_single", counted):
        exchange = ExpertExchange(counts.sent, group)
        rows, labels, sent = exchange.send(tokens, weights, experts, counts.of_experts, counts.of_tokens[rank])
        copies = RowCopies.of(labels.rows, counts.arriving(rank))
        held = EXPERTS // RANKS
        factors = (labels.experts + rank * held + 1) * labels.weights
        made = (copy_rows(rows, copies) * factors.unsqueeze(1)).to(dtype)
        sums = sum_copies(exchange.send_back(sum_copies(made, copies)), sent)
        out_grad = torch.randn(TOKENS[rank], HIDDEN, generator=random).to(dtype)
        grads = torch.autograd.grad(sums, (tokens, weights), out_grad)
    of_tokens = (weights * (experts + 1)).sum(dim=1, keepdim=True)
    expected = tokens * of_tokens
    tolerances = {"rtol": 0.03, "atol": 0.3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(sums, expected, **tolerances)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (tokens, weights), out_grad), **tolerances)
    distinct = sum(len(set((of_token // held).tolist())) for of_token in experts)
    return sizes, distinct, experts.numel()
