"""The loss over a split vocabulary equals torch's in float64, whatever the chunks, ranks and missing targets."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mmtrain.models.kernels import vocab_loss
from mmtrain.models.kernels.vocab_loss import losses_at_once, losses_by_chunks, vocab_parallel_losses
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.loss_chunks import LossSizes
from tests.distributed import run_ranks
from tests.models.factory import gradients, settings, stage, text

HIDDEN, VOCAB, PADDED = 12, 37, 48  # on 4 ranks the fourth holds one real row


@dataclass(frozen=True)
class _Outcome:
    loss: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor


def _random(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    return hidden, weight, torch.randint(0, VOCAB, (num_rows,), generator=generator)


def _expected(num_rows: int, scale: float, cap: float | None = None) -> _Outcome:
    hidden, weight, targets = _random(num_rows)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight[:VOCAB].T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    loss = F.cross_entropy(logits, targets, reduction="sum")
    (loss * scale).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return _Outcome(loss.detach(), hidden.grad, weight.grad)


def _ours(
    num_rows: int,
    scale: float,
    group: dist.ProcessGroup,
    *,
    compute: Callable[..., Tensor] = vocab_parallel_losses,
    cap: float | None = None,
) -> _Outcome:
    hidden, weight, targets = _random(num_rows)
    rows = PADDED // group.size()
    weight = weight[group.rank() * rows : (group.rank() + 1) * rows].clone()
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = compute(hidden, weight, targets, VOCAB, group, cap).sum()
    (loss * scale).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return _Outcome(loss.detach(), hidden.grad, weight.grad)


def _assert_equal(outcomes: list[_Outcome], expected: _Outcome) -> None:
    """Ranks return the whole loss, parts of a sum of the gradient by hidden states, and their rows of the other."""
    for outcome in outcomes:
        torch.testing.assert_close(outcome.loss.double(), expected.loss, rtol=1e-6, atol=1e-6)
    hidden_grad = sum((outcome.hidden_grad.double() for outcome in outcomes), torch.zeros(()))
    torch.testing.assert_close(hidden_grad, expected.hidden_grad, rtol=1e-5, atol=1e-6)
    weight_grad = torch.cat([outcome.weight_grad.double() for outcome in outcomes])
    torch.testing.assert_close(weight_grad, expected.weight_grad, rtol=1e-5, atol=1e-6)
    assert not weight_grad[VOCAB:].any()


@pytest.mark.parametrize("chunk_logits", [1 << 27, 5 * VOCAB, 1])
@pytest.mark.parametrize("num_rows", [0, 1, 23])
def test_loss_and_gradients_are_those_of_torch(
    chunk_logits: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab_loss, "CHUNK_LOGITS", chunk_logits)
    _assert_equal([_ours(num_rows, 0.3, ParallelGroups.single().tp)], _expected(num_rows, 0.3))


@pytest.mark.parametrize("compute", [losses_at_once, losses_by_chunks])
@pytest.mark.parametrize("cap", [0.5, 3.0, 40.0])
def test_capped_logits_have_the_gradients_of_torch(cap: float, compute: Callable[..., Tensor]) -> None:
    """Of a cap of 0.5 most logits are at it; of one of 40 none is near it."""
    outcome = _ours(23, 0.3, ParallelGroups.single().tp, compute=compute, cap=cap)
    _assert_equal([outcome], _expected(23, 0.3, cap))


def _on_this_rank() -> list[_Outcome]:
    group = dist.group.WORLD
    assert group is not None
    outcomes = []
    for chunk_logits in (1 << 27, 30):
        with patch.object(vocab_loss, "CHUNK_LOGITS", chunk_logits):
            outcomes += [_ours(num_rows, 0.3, group, compute=losses_at_once) for num_rows in (0, 1, 23)]
    with patch.object(vocab_loss, "CHUNK_TOKENS", 7):
        outcomes += [_ours(num_rows, 0.3, group, compute=losses_by_chunks) for num_rows in (1, 7, 23)]
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_that_share_the_vocabulary_agree_with_torch(tp: int) -> None:
    by_case = zip(*run_ranks(tp, _on_this_rank), strict=True)
    for outcomes, num_rows in zip(by_case, (0, 1, 23, 0, 1, 23, 1, 7, 23), strict=True):
        _assert_equal(list(outcomes), _expected(num_rows, 0.3))


def test_half_precision_computes_the_softmax_in_fp32() -> None:
    hidden, weight, targets = (x if x.dtype == torch.int64 else x.bfloat16() for x in _random(23))
    hidden.requires_grad_()
    loss = vocab_parallel_losses(hidden, weight, targets, VOCAB, ParallelGroups.single().tp).sum()
    loss.backward()  # the weight is frozen
    logits = (hidden.detach() @ weight[:VOCAB].T).double().requires_grad_()
    expected = F.cross_entropy(logits, targets, reduction="sum")
    expected.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert hidden.grad is not None
    assert logits.grad is not None
    torch.testing.assert_close(hidden.grad.double(), logits.grad @ weight[:VOCAB].double(), rtol=0.02, atol=0.02)


def test_chunks_give_the_loss_and_gradients_of_all_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_loss, "CHUNK_TOKENS", 7)
    group = ParallelGroups.single().tp
    for num_rows, scale in ((1, 1.0), (7, 0.3), (23, 1e-3)):
        by_chunks, at_once = (
            _ours(num_rows, scale, group, compute=compute) for compute in (losses_by_chunks, losses_at_once)
        )
        for name in ("loss", "hidden_grad", "weight_grad"):
            torch.testing.assert_close(getattr(by_chunks, name), getattr(at_once, name), rtol=1e-6, atol=1e-6)
        _assert_equal([by_chunks], _expected(num_rows, scale))


def test_chunks_add_the_gradient_of_the_matrix_where_the_optimizer_sums_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_loss, "CHUNK_TOKENS", 7)
    hidden, weight, targets = _random(23)
    matrix = nn.Parameter(weight)
    matrix.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    (losses_by_chunks(hidden, matrix, targets, VOCAB, ParallelGroups.single().tp).sum() * 0.3).backward()
    assert matrix.grad is None
    summed = matrix.main_grad.double() - 1  # type: ignore[attr-defined]
    torch.testing.assert_close(summed, _expected(23, 0.3).weight_grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_chunks_compute_only_gradients_that_are_needed(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_loss, "CHUNK_TOKENS", 7)
    hidden, weight, targets = _random(23)
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    expected = _expected(23, 1.0)
    loss = losses_by_chunks(hidden, weight, targets, VOCAB, ParallelGroups.single().tp).sum()
    torch.testing.assert_close(loss.detach().double(), expected.loss, rtol=1e-6, atol=1e-6)
    if frozen == "both":
        assert not loss.requires_grad
        return
    loss.backward()
    known, other = (hidden.grad, weight.grad) if frozen == "weight" else (weight.grad, hidden.grad)
    assert other is None
    assert known is not None
    right = expected.hidden_grad if frozen == "weight" else expected.weight_grad
    torch.testing.assert_close(known.double(), right, rtol=1e-5, atol=1e-6)


def test_losses_by_chunks_refuse_gradients_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_loss, "CHUNK_TOKENS", 7)
    hidden, weight, targets = _random(23)
    losses = losses_by_chunks(hidden, weight.requires_grad_(), targets, VOCAB, ParallelGroups.single().tp)
    with pytest.raises(RuntimeError, match="must have one gradient"):
        losses.backward(torch.arange(23.0))


def test_an_evaluation_by_chunks_makes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of a function of autograd weights still say that they need gradients."""
    monkeypatch.setattr(vocab_loss, "_logits_gradient", None)
    hidden, weight, targets = _random(23)
    with torch.no_grad():
        loss = losses_by_chunks(hidden, weight.requires_grad_(), targets, VOCAB, ParallelGroups.single().tp).sum()
    torch.testing.assert_close(loss.double(), _expected(23, 1.0).loss, rtol=1e-6, atol=1e-6)


def test_chunks_in_half_precision_sum_the_gradient_of_the_matrix_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_loss, "CHUNK_TOKENS", 7)
    hidden, weight, targets = (x if x.dtype == torch.int64 else x.bfloat16().requires_grad_() for x in _random(23))
    group = ParallelGroups.single().tp
    results = {}
    for compute in (losses_at_once, losses_by_chunks):
        hidden.grad = weight.grad = None
        loss = compute(hidden, weight, targets, VOCAB, group).sum()
        loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        assert weight.grad.dtype == torch.bfloat16
        results[compute] = (loss.detach(), hidden.grad, weight.grad)
    for by_chunks, at_once in zip(results[losses_by_chunks], results[losses_at_once], strict=True):
        torch.testing.assert_close(by_chunks, at_once, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("tokens", "ids", "hidden", "element_bytes", "trains_matrix", "uses_chunks"),
    [
        (1024, 151_936, 896, 4, True, False),  # one chunk
        (1200, 151_936, 896, 4, False, False),  # saves less than a quarter
        (1677, 151_936, 896, 4, True, False),
        (1678, 151_936, 896, 4, True, True),
        (1678, 151_936, 896, 4, False, True),
        (2048, 512, 896, 4, True, False),  # gradients of hidden states are larger than all logits
        (4096, 152_064, 3584, 2, True, False),  # the gradient of the matrix takes twice as much in fp32
        (8192, 152_064, 3584, 2, True, True),
        (4096, 152_064, 3584, 2, False, True),
    ],
)
def test_chunks_are_used_where_they_save_a_quarter_of_the_memory(
    tokens: int, ids: int, hidden: int, element_bytes: int, trains_matrix: bool, uses_chunks: bool
) -> None:
    sizes = LossSizes(tokens, ids, hidden, element_bytes, trains_matrix)
    assert sizes.uses_chunks is uses_chunks
    most = sizes.most_tokens_at_once
    assert uses_chunks is (most is not None and tokens > most)
    if most is not None:
        assert [replace(sizes, tokens=number).uses_chunks for number in (most, most + 1)] == [False, True]


def test_nothing_but_rows_with_targets_reaches_the_head() -> None:
    """Loss and gradients are those of all rows, and the projection sees a third less of them."""
    inputs = text(8, 17)
    assert inputs.labels is not None
    llm = stage(settings(), "llm")
    seen: list[int] = []
    original = llm.factory.losses_of_targets

    def spy(hidden: Tensor, *rest: object) -> Tensor:
        seen.append(len(hidden))
        return original(hidden, *rest)  # type: ignore[arg-type]

    object.__setattr__(llm.factory, "losses_of_targets", spy)
    llm(None, inputs, {}).backward()
    known = gradients(llm)
    positions = torch.nonzero(inputs.labels != -100).squeeze(1)
    assert seen == [len(positions)]
    llm.zero_grad()
    llm(None, replace(inputs, target_positions=positions), {}).backward()
    for name, gradient in gradients(llm).items():
        assert torch.equal(gradient, known[name])


def test_losses_by_source_add_up_and_change_no_gradient() -> None:
    inputs = text(8, 17)
    assert inputs.labels is not None
    llm = stage(settings(), "llm")
    total = llm(None, inputs, {})
    total.backward()
    known = gradients(llm)
    llm.zero_grad()
    positions = torch.nonzero(inputs.labels != -100).squeeze(1)
    by_source = replace(inputs, target_positions=positions, target_sources=positions % 3, num_sources=4)
    losses = llm(None, by_source, {})
    losses.backward(torch.ones(4))
    assert losses.sum().item() == pytest.approx(total.item(), rel=1e-6)
    assert losses[3] == 0
    for name, gradient in gradients(llm).items():
        assert torch.equal(gradient, known[name])
    first = replace(inputs, labels=inputs.labels.where(torch.arange(len(inputs.labels)) % 3 == 0, -100))
    assert losses[0].item() == pytest.approx(llm(None, first, {}).item(), rel=1e-5)
