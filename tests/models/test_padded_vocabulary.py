"""Rows that pad the vocabulary take no part in the loss, on any number of tensor-parallel ranks."""

from dataclasses import replace

import pytest
import torch.distributed as dist
import torch.nn.functional as F

from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.model_shape import padded_vocab
from tests.distributed import run_ranks
from tests.models.factory import gradients, randomize, settings, stage, text
from tests.models.whole_tensors import stage_logits

VOCAB = 70  # padded to 128: on 4 ranks the third holds 6 rows of the vocabulary, the fourth none
HIDDEN = 48


def _loss_and_padded_gradients(tied: bool, groups: ParallelGroups | None) -> tuple[float, float, list[float]]:
    """Return our loss, that of torch over the true vocabulary, and the sizes of gradients of this rank's padded rows.

    Both losses start from our logits, in which padded rows are as large as the others.
    """
    groups = groups or ParallelGroups.single()
    llm = stage(settings(llm={"vocab": VOCAB, "tie_embeddings": tied}), "llm", groups=groups)
    randomize(llm, seed=groups.tp_rank)
    for param in llm.parameters():  # replicated weights must stay equal
        if not getattr(param, "tensor_model_parallel", False):
            dist.broadcast(param.data, 0, group=groups.tp)
    inputs = text(8, 17, vocab=VOCAB)
    logits = stage_logits(llm, None, inputs, {})
    assert inputs.labels is not None
    expected = F.cross_entropy(logits[:, :VOCAB].double(), inputs.labels, reduction="sum")
    loss = llm(None, inputs, {})
    loss.backward()
    rows = padded_vocab(VOCAB) // groups.tp_size
    first_padded = max(0, VOCAB - groups.tp_rank * rows)
    tables = [gradient for gradient in gradients(llm).values() if gradient.shape == (rows, HIDDEN)]
    assert len(tables) == (1 if tied else 2)
    return loss.item(), expected.item(), [float(table[first_padded:].abs().sum()) for table in tables]


def _on_this_rank() -> list[tuple[float, float, list[float]]]:
    groups = replace(ParallelGroups.single(), tp=dist.group.WORLD)
    return [_loss_and_padded_gradients(tied, groups) for tied in (False, True)]


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_that_of_the_true_vocabulary(tied: bool) -> None:
    loss, expected, padded_gradients = _loss_and_padded_gradients(tied, None)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert not any(padded_gradients)


@pytest.mark.slow
def test_padding_that_fills_a_whole_rank_changes_nothing() -> None:
    for outcomes in run_ranks(4, _on_this_rank):
        for loss, expected, padded_gradients in outcomes:
            assert loss == pytest.approx(expected, rel=1e-6)
            assert not any(padded_gradients)
