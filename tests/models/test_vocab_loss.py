"""The loss over a split vocabulary equals torch's in float64, whatever the chunks, ranks and missing targets."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mmtrain.models.megatron import ParallelGroups, vocab_loss
from mmtrain.models.megatron.vocab_loss import vocab_parallel_loss
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


def _expected(num_rows: int, scale: float) -> _Outcome:
    hidden, weight, targets = _random(num_rows)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss = F.cross_entropy(hidden @ weight[:VOCAB].T, targets, reduction="sum")
    (loss * scale).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return _Outcome(loss.detach(), hidden.grad, weight.grad)


def _ours(num_rows: int, scale: float, group: dist.ProcessGroup, vocab: int = VOCAB) -> _Outcome:
    hidden, weight, targets = _random(num_rows)
    rows = PADDED // group.size()
    weight = weight[group.rank() * rows : (group.rank() + 1) * rows].clone()
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = vocab_parallel_loss(hidden, weight, targets, vocab, group)
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


def _on_this_rank() -> list[_Outcome]:
    group = dist.group.WORLD
    assert group is not None
    outcomes = []
    for chunk_logits in (1 << 27, 30):
        vocab_loss.CHUNK_LOGITS = chunk_logits
        outcomes += [_ours(num_rows, 0.3, group) for num_rows in (0, 1, 23)]
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_that_share_the_vocabulary_agree_with_torch(tp: int) -> None:
    by_case = zip(*run_ranks(tp, _on_this_rank), strict=True)
    for outcomes, num_rows in zip(by_case, (0, 1, 23, 0, 1, 23), strict=True):
        _assert_equal(list(outcomes), _expected(num_rows, 0.3))


def test_half_precision_computes_the_softmax_in_fp32() -> None:
    hidden, weight, targets = (x if x.dtype == torch.int64 else x.bfloat16() for x in _random(23))
    hidden.requires_grad_()
    loss = vocab_parallel_loss(hidden, weight, targets, VOCAB, ParallelGroups.single().tp)
    loss.backward()  # the weight is frozen
    logits = (hidden.detach() @ weight[:VOCAB].T).double().requires_grad_()
    expected = F.cross_entropy(logits, targets, reduction="sum")
    expected.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert hidden.grad is not None
    assert logits.grad is not None
    torch.testing.assert_close(hidden.grad.double(), logits.grad @ weight[:VOCAB].double(), rtol=0.02, atol=0.02)


def test_nothing_but_rows_with_targets_reaches_the_head() -> None:
    """Loss and gradients are those of all rows, and the projection sees a third less of them."""
    inputs = text(8, 17)
    assert inputs.labels is not None
    llm = stage(settings(), "llm")
    seen: list[int] = []
    original = llm.factory.loss_of_targets

    def spy(hidden: Tensor, *rest: object) -> Tensor:
        seen.append(len(hidden))
        return original(hidden, *rest)  # type: ignore[arg-type]

    object.__setattr__(llm.factory, "loss_of_targets", spy)
    llm(None, inputs, {}).backward()
    known = gradients(llm)
    positions = torch.nonzero(inputs.labels != -100).squeeze(1)
    assert seen == [len(positions)]
    llm.zero_grad()
    llm(None, replace(inputs, target_positions=positions), {}).backward()
    for name, gradient in gradients(llm).items():
        assert torch.equal(gradient, known[name])
