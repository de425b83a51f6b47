"""A guest computes what `transformers` computes with its folder."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mmtrain.errors import ModelFolderError
from mmtrain.models.stage.guest_stage import GuestStage
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageModule
from tests.guests.folders import MODELS, VOCAB
from tests.models.factory import randomize
from tests.weights.comparison import assert_equal_gradients, full_gradients, unit_stage
from tests.weights.pretrained import qwen3, recipe_from, save

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
    theirs.config._attn_implementation = "eager"  # with SDPA, transformers 5.17 leaves caps out
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


def guest_stage(folder: Path, *overrides: str) -> GuestStage:
    stage = unit_stage(recipe_from(folder, *overrides))
    assert isinstance(stage, GuestStage)
    return stage


def loss_and_gradients(stage: StageModule) -> tuple[float, dict[str, Tensor]]:
    ids, labels = batch()
    loss = stage(None, TextInput(LENGTHS, torch.cat(ids), torch.cat(labels)))
    loss.backward()
    return loss.item(), full_gradients(stage)


def test_a_family_and_the_guest_of_its_folder_compute_the_same(tmp_path: Path) -> None:
    """The guest is a second judge of the family: its modules, in our rows, with our loss."""
    folder = save(qwen3(vocab_size=VOCAB), tmp_path / "model")
    family, guest = unit_stage(recipe_from(folder)), guest_stage(folder, "model.guest=true")
    assert not isinstance(family, GuestStage)
    loss, gradients = loss_and_gradients(family)
    assert loss_and_gradients(guest)[0] == pytest.approx(loss, rel=1e-5)
    assert_equal_gradients(folder, guest.guest, gradients)


def test_a_loss_by_parts_has_the_same_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are scaled in the model's own forward, which runs for each part."""
    folder = save(MODELS["granite"](), tmp_path / "model")
    loss, gradients = loss_and_gradients(guest_stage(folder))
    monkeypatch.setattr("mmtrain.models.stage.guest_stage.CHUNK_TOKENS", 7)
    loss_by_parts, of_parts = loss_and_gradients(guest_stage(folder))
    assert loss_by_parts == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(of_parts[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_model_that_sees_the_next_token_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertLMHeadModel(BertConfig(**sizes, vocab_size=VOCAB))
    randomize(model)
    stage = guest_stage(save(model, tmp_path / "model"))
    with pytest.raises(ModelFolderError, match="BertLMHeadModel sees the token that it is to predict"):
        stage.choose_packing()
