"""A guest computes what `transformers` computes with its folder."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mmtrain.models.stage.guest_stage import GuestStage
from mmtrain.models.stage.stage_inputs import TextInput
from tests.guests.folders import MODELS, VOCAB
from tests.models.factory import randomize
from tests.weights.comparison import unit_stage
from tests.weights.pretrained import recipe_from, save

LENGTHS = (23, 5, 17)


def batch() -> tuple[list[Tensor], list[Tensor]]:
    """Draw the ids of samples, and labels: each token's successor, but for some."""
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(3, VOCAB, (length,), generator=generator) for length in LENGTHS]
    labels = [torch.cat([sample[1:], torch.tensor([-100])]) for sample in ids]
    for of_sample in labels:
        of_sample[:2] = -100
    return ids, labels


def their_loss(model: nn.Module, ids: list[Tensor], labels: list[Tensor]) -> Tensor:
    """Sum the losses that `transformers` computes sample by sample."""
    losses = [
        nn.functional.cross_entropy(model(input_ids=sample[None]).logits[0], of_sample, reduction="sum")
        for sample, of_sample in zip(ids, labels, strict=True)
    ]
    return torch.stack(losses).sum()


@pytest.mark.parametrize("packing", ["packed", "masked", "rows"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_transformers(name: str, packing: str, tmp_path: Path) -> None:
    theirs = MODELS[name]()
    randomize(theirs)
    theirs.eval()
    stage = unit_stage(recipe_from(save(theirs, tmp_path / "model")))
    assert isinstance(stage, GuestStage)
    stage.choose_packing()
    chosen = stage.packing
    assert chosen == ("rows" if name == "mamba" else "packed")
    if name == "mamba" and packing != "rows":
        return
    stage._pack_as(packing)
    ids, labels = batch()
    expected = their_loss(theirs, ids, labels)
    expected.backward()
    loss = stage(None, TextInput(LENGTHS, torch.cat(ids), torch.cat(labels)))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = {name: param.grad for name, param in theirs.named_parameters()}
    for name, param in stage.guest.named_parameters():
        assert param.grad is not None
        assert (param.grad - gradients[name]).abs().max() < 1e-4 * max(1.0, gradients[name].abs().max()), name
