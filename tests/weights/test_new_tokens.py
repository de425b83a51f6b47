"""A vocabulary that grows: rows of new tokens start as the mean of the others, from a folder and from another run."""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from mmtrain.checkpoint import open_newest_good
from mmtrain.data.index.sample_lengths import check_data_settings
from mmtrain.data.synthetic.tiny_tokenizer import write_tiny_tokenizer
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.errors import DataError, RecipeError, UserError
from mmtrain.families import FAMILIES
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.train_settings import LoraSettings
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.runtime.training.start_weights import introduce_start_weights
from mmtrain.weights import RunWeights, export_adapter
from tests.flow.cases import recipe as case_recipe
from tests.models.factory import randomize, text
from tests.models.whole_tensors import join_tp_shards, stage_logits
from tests.runtime.models import run_folder
from tests.weights.comparison import content, export_again, pretrained_of, unit_stage
from tests.weights.pretrained import VOCAB, llama, llava, qwen2, qwen2_audio, qwen2_vl, recipe_from, save, specs_of
from tests.weights.test_run_weights import logits, stage_of

NEW_VOCAB = 133  # padded to 192, so that it grows over the border of two tensor-parallel ranks
GROWN = f"model.llm.vocab={NEW_VOCAB}"
TOKEN_MATRICES = ["llm.layers.0.table.weight", "llm.layers.5.output.weight"]  # of a Llama with four blocks


def _rows(stage: StageModule, name: str) -> Tensor:
    return dict(stage.named_parameters())[name.removeprefix("llm.")].detach()


def _expected(known: Tensor) -> Tensor:
    """Return the padded matrix of a vocabulary that has grown."""
    mean = known.double().mean(0).to(known.dtype)
    padding = torch.zeros(192 - NEW_VOCAB, known.shape[1])
    return torch.cat([known, mean.expand(NEW_VOCAB - len(known), -1), padding])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_new_tokens_are_the_mean_of_the_folder_on_every_rank(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in pieces of a few rows; split inside the new rows and behind them; masters are as precise as the folder."""
    theirs = llama()
    recipe = recipe_from(save(theirs, tmp_path / "model", dtype), GROWN)
    monkeypatch.setattr("mmtrain.weights.import_weights.MAX_ELEMENTS_PER_READ", 200)
    stage, weights = unit_stage(recipe), pretrained_of(recipe)
    assert weights.num_new_tokens == NEW_VOCAB - VOCAB
    state = theirs.state_dict()
    for name, tensor in zip(TOKEN_MATRICES, ("model.embed_tokens.weight", "lm_head.weight"), strict=True):
        expected = _expected(state[tensor].float())
        torch.testing.assert_close(_rows(stage, name), expected, rtol=1e-6, atol=0)
        spec = ParamSpec(name, (192, 48), 0)
        for tp in (2, 4):
            shards = [torch.full(spec.local_shape(tp), torch.nan) for _ in range(tp)]
            assert all(weights.fill(shard, spec, rank, tp) for rank, shard in enumerate(shards))
            assert torch.equal(join_tp_shards(shards, spec), _rows(stage, name))
        masters = torch.full((192 * 48 // 2 - 5,), torch.nan)
        assert weights.fill_master(masters, spec, 1, 2, 5, torch.bfloat16) == (dtype == torch.float32)
        if dtype == torch.float32:
            assert torch.equal(masters, _rows(stage, name)[96:].reshape(-1)[5:])


def test_new_tokens_take_little_probability_from_the_others(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path / "model")
    ids = torch.randint(0, VOCAB, (90,), generator=torch.Generator().manual_seed(3))
    inputs = TextInput((90,), ids, torch.cat([ids[1:], torch.tensor([-100])]))
    with torch.no_grad():
        before, after = (float(unit_stage(recipe_from(folder, *grown))(None, inputs)) / 89 for grown in ((), (GROWN,)))
    assert before < after < before + math.log(NEW_VOCAB / VOCAB)


@pytest.mark.parametrize("make", [qwen2, llava, qwen2_audio, qwen2_vl])
def test_transformers_opens_the_exported_folder_with_all_tokens(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Export untrained: all other tensors are bit for bit those of the source, the tokenizer is that of the run."""
    from transformers import AutoTokenizer

    source: Any = make()
    folder = save(source, tmp_path / "model")
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    write_tiny_tokenizer(tokenizer, ["some words", "other words"], FAMILIES["qwen2"])
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "vocab.json").write_text("{}", encoding="utf-8")
    small_images = ("data.image.min_pixels=16", "data.image.max_pixels=256") if make is qwen2_vl else ()
    recipe = recipe_from(folder, GROWN, f"data.tokenizer={tokenizer}", *small_images)
    units = {unit.name: unit_stage(recipe, unit.name) for unit in build_model_shape(recipe).units}
    out = export_again(folder, recipe, units)
    before, after = content(folder), content(out)
    assert before.keys() == after.keys()
    grown = {name for name in before if before[name] != after[name]}
    assert grown == {name for name in before if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
    assert all(after[name][1] == (NEW_VOCAB, 48) for name in grown)
    assert not (out / "vocab.json").exists()
    assert len(AutoTokenizer.from_pretrained(out)) == load_tokenizer(tokenizer).vocab_size
    model, loading = type(source).from_pretrained(out, output_loading_info=True)
    assert not any(loading.values()), loading
    table = model.get_input_embeddings().weight
    assert torch.equal(table, _rows(units["llm"], "llm.layers.0.table.weight")[:NEW_VOCAB])
    if make is qwen2:
        ids = torch.arange(NEW_VOCAB)
        with torch.no_grad():
            ours = stage_logits(units["llm"], None, TextInput((NEW_VOCAB,), ids, ids))[:, :NEW_VOCAB]
            assert (ours - model(input_ids=ids[None]).logits[0]).abs().max() < 1e-4
    assert recipe_from(out, *small_images).model.llm.vocab == NEW_VOCAB


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_that_starts_from_another_has_more_tokens(tied: bool, tmp_path: Path) -> None:
    """Grow inside the padding, which the source has too, and beyond it; compare the shards of two ranks."""
    source = case_recipe(model__vision=None, model__llm__tie_embeddings=tied, model__llm__vocab=61)
    saved = stage_of(source)
    randomize(saved)
    run = run_folder(tmp_path / "run", source, {"llm": saved})
    for vocab in (63, NEW_VOCAB):
        recipe = case_recipe(model__vision=None, model__llm__tie_embeddings=tied, model__llm__vocab=vocab)
        weights = RunWeights(open_newest_good(run / CHECKPOINTS_FOLDER, print), source, recipe)
        started = stage_of(recipe, weights, seed=5)
        assert weights.differing_names == weights.misshaped == []
        assert weights.num_new_tokens == vocab - 61
        torch.testing.assert_close(logits(started)[:, :61], logits(saved)[:, :61], rtol=0, atol=1e-5)
        for name in build_model_shape(recipe).token_matrices:
            known, rows = _rows(saved, name)[:61], _rows(started, name)
            assert torch.equal(rows[:61], known)
            torch.testing.assert_close(rows[61:vocab], known.mean(0).expand(vocab - 61, -1), rtol=1e-5, atol=1e-6)
            assert not rows[vocab:].any()
            spec = specs_of(started)[name]
            shards = [torch.full((len(rows) // 2, rows.shape[1]), torch.nan) for _ in range(2)]
            split = ParamSpec(name, spec.full_shape, 0)
            assert all(weights.fill(shard, split, rank, 2) for rank, shard in enumerate(shards))
            assert torch.equal(torch.cat(shards), rows)
            master = torch.full((rows.numel() // 2 - 7,), torch.nan)
            assert weights.fill_master(master, split, 1, 2, 7, torch.bfloat16)
            assert torch.equal(master, shards[1].reshape(-1)[7:])

    fewer = case_recipe(model__vision=None, model__llm__tie_embeddings=tied, model__llm__vocab=60)
    weights = RunWeights(open_newest_good(run / CHECKPOINTS_FOLDER, print), source, fewer)
    stage_of(fewer, weights)
    assert weights.misshaped == [
        f"{name}: has rows for 61 tokens there, for 60 here" for name in build_model_shape(fewer).token_matrices
    ]


def _introduction(recipe: Recipe) -> str:
    stream = io.StringIO()
    introduce_start_weights(Console(file=stream, width=400), recipe, pretrained_of(recipe))
    return stream.getvalue()


def test_the_log_tells_of_new_tokens_and_of_rows_that_never_train(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path / "model")
    assert "new tokens" not in _introduction(recipe_from(folder))
    grown = "72 new tokens, 133 with them: their weights start as the mean of the others"
    assert _introduction(recipe_from(folder, GROWN)).endswith(f"{grown}\n")
    warning = f"the rows of new tokens in {' and '.join(TOKEN_MATRICES)} are frozen and stay equal; "
    lora = ("train.lora.rank=2", "train.lora.targets=[llm.*.linear_qkv]")
    assert f"{warning}name them in train.lora.also_train" in _introduction(recipe_from(folder, GROWN, *lora))
    assert f"{warning}model.llm.freeze and train.freeze" in _introduction(
        recipe_from(folder, GROWN, "model.llm.freeze=true")
    )
    trained = f"train.lora.also_train={json.dumps(TOKEN_MATRICES)}"
    assert _introduction(recipe_from(folder, GROWN, *lora, trained)).endswith(f"{grown}\n")


def test_a_vocabulary_that_does_not_fit_is_rejected_with_what_to_set(tmp_path: Path) -> None:
    folder = save(qwen2(), tmp_path / "model")
    with pytest.raises(RecipeError, match=r"model\.llm\.vocab: is 60 here, but .* has 61 tokens; allowed: 61 or more"):
        recipe_from(folder, "model.llm.vocab=60")
    write_tiny_tokenizer(folder, ["some words", "other words"], FAMILIES["qwen2"])
    tokenizer = load_tokenizer(folder)
    size = tokenizer.vocab_size
    with pytest.raises(DataError, match=rf"set model\.llm\.vocab to at least {size} if this is the model's tokenizer"):
        check_data_settings(recipe_from(folder), tokenizer)
    check_data_settings(recipe_from(folder, f"model.llm.vocab={size}"), tokenizer)


def test_an_adapter_is_not_exported_alone_with_new_tokens(tmp_path: Path) -> None:
    folder = save(qwen2(), tmp_path / "model")
    recipe = recipe_from(folder, GROWN)
    lora = LoraSettings(rank=2, alpha=4, targets=("llm.*.linear_qkv",))
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"lora": lora})})
    run = run_folder(tmp_path / "run", recipe, {"llm": unit_stage(recipe)})
    with pytest.raises(UserError, match=r"^--adapter: the run has 133 tokens, more than .*model, and an adapter's"):
        export_adapter(recipe, open_newest_good(run / CHECKPOINTS_FOLDER, print), tmp_path / "out")


def test_text_of_known_tokens_is_computed_as_before(tmp_path: Path) -> None:
    folder = save(qwen2(), tmp_path / "model")
    inputs = text(20, 9, vocab=VOCAB)
    with torch.no_grad():
        before, after = (
            stage_logits(unit_stage(recipe_from(folder, *grown)), None, inputs) for grown in ((), (GROWN,))
        )
    assert torch.equal(before[:, :VOCAB], after[:, :VOCAB])
