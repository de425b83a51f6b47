"""What becomes a guest, and what is refused before data is read."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mmtrain.cli.app import app
from mmtrain.errors import ModelFolderError, RecipeError, UserError
from mmtrain.extras import GUESTS
from mmtrain.guests import open_guest
from mmtrain.weights import describe_guest, open_pretrained
from mmtrain.weights.inspect_folder import inspect_folder
from tests.guests.folders import MODELS, VOCAB, write_folder
from tests.weights.comparison import unit_stage
from tests.weights.pretrained import llama, recipe_from, save


@pytest.fixture
def olmo2(tmp_path: Path) -> Path:
    return save(MODELS["olmo2"](), tmp_path / "model")


def _change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def test_a_model_of_no_family_becomes_a_guest(olmo2: Path) -> None:
    recipe = recipe_from(olmo2)
    llm = recipe.model.llm
    assert recipe.model.guest
    assert (recipe.parallel.placement, recipe.parallel.llm.tp, recipe.parallel.llm.cp) == ("replicated", 1, 1)
    assert (llm.layers, llm.hidden, llm.heads, llm.kv_heads, llm.ffn, llm.vocab) == (3, 48, 4, 2, 96, VOCAB)
    text = describe_guest(recipe)
    assert text is not None
    for part in ("Olmo2ForCausalLM has 111,912 parameters", "`replicated` alone", "the family nearest to it, "):
        assert part in text


def test_inspect_says_that_a_folder_is_that_of_a_guest_and_compares_its_tensors(olmo2: Path) -> None:
    summary = inspect_folder(olmo2)
    assert (summary.family, summary.is_guest, summary.units[0].parameters) == ("guest", True, 111_912)
    text = CliRunner().invoke(app, ["inspect", str(olmo2)]).stdout
    assert "with modules of transformers (docs/guests.md)" in text
    assert "111,912 parameters, 3 blocks, 48 wide, 4 heads" in text
    _change(olmo2, num_hidden_layers=4)
    with pytest.raises(ModelFolderError, match=r"model\.layers\.3\.self_attn\.q_proj\.weight: missing"):
        inspect_folder(olmo2)


def test_a_model_of_a_family_is_a_guest_if_the_recipe_says_so(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path / "model")
    assert not recipe_from(folder).model.guest
    assert describe_guest(recipe_from(folder)) is None
    assert recipe_from(folder, "model.guest=true").model.guest


def test_a_feature_of_a_family_that_is_not_built_is_named_with_the_way_to_a_guest(tmp_path: Path) -> None:
    folder = save(llama(attention_bias=True), tmp_path / "model")
    with pytest.raises(RecipeError, match=r"attention_bias.*`model\.guest: true` trains it"):
        recipe_from(folder)
    assert recipe_from(folder, "model.guest=true").model.guest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("parallel.placement=unified", "a guest .* runs in one placement: replicated"),
        ("parallel.llm.tp=2", "a guest .* is not split; allowed: 1"),
        ("parallel.dispatch=all", "parallel.dispatch"),
        ("parallel.llm.offload=inputs", "parallel.llm.offload"),
        ("train.freeze=[llm.*.weight]", "train.freeze"),
        ("train.lora.rank=4", "train.lora"),
        ("train.optimizer.kind=muon", "train.optimizer.kind"),
        ("train.optimizer.layer_lr_decay=0.9", "layer_lr_decay"),
        ("model.llm.freeze=true", "model.llm.freeze"),
        ("model.llm.vocab=600", "a guest takes no new ones"),
        ("model.llm.preset=llama3-8b", "remove the preset or the folder"),
    ],
)
def test_settings_that_reach_into_modules_are_refused(change: str, message: str, olmo2: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_from(olmo2, change)


def test_a_guest_needs_a_folder(olmo2: Path) -> None:
    sizes = ("layers=1", "hidden=32", "heads=2", "ffn=64", "vocab=512")
    with pytest.raises(RecipeError, match=r"model\.guest: found true without model\.hf"):
        recipe_from(olmo2, "model.hf=null", "model.guest=true", *(f"model.llm.{size}" for size in sizes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"auto_map": {"AutoModel": "model.Other"}},
            "auto_map: the folder needs Python code of its own, which is never",
        ),
        ({"hidden_size": None}, "hidden_size: found None; allowed: a whole number"),
        ({"vision_config": {"hidden_size": 4}}, "vision_config: a guest, .* is a text model so far"),
        ({"quantization_config": {"bits": 4}}, "quantized weights cannot be trained"),
        ({"model_type": None}, "model_type is missing"),
        ({"architectures": ["Olmo2Model"]}, "a guest has a language head, and its class ends in ForCausalLM"),
    ],
)
def test_folders_of_no_guest_are_refused_with_the_recipe(changes: dict[str, Any], message: str, olmo2: Path) -> None:
    _change(olmo2, **changes)
    with pytest.raises(RecipeError, match=message):
        recipe_from(olmo2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "olmo99"}, "transformers .* cannot read the config"),
        ({"architectures": ["Olmo9ForCausalLM"]}, "has no language head .*allowed: Olmo2ForCausalLM"),
        ({"model_type": "vit", "architectures": ["ViTForCausalLM"]}, "has no language head .*no class of its kind"),
        ({"hidden_size": 49}, "cannot build olmo2|are not those of its config.json"),
    ],
)
def test_models_that_transformers_cannot_build_are_refused(changes: dict[str, Any], message: str, olmo2: Path) -> None:
    _change(olmo2, **changes)
    with pytest.raises(ModelFolderError, match=message):
        open_pretrained(recipe_from(olmo2))


def test_tensors_that_are_not_those_of_the_modules_are_named(olmo2: Path) -> None:
    from safetensors.torch import load_file, save_file

    stored = load_file(olmo2 / "model.safetensors")
    stored["model.norm.bias"] = stored.pop("model.norm.weight")
    save_file(stored, olmo2 / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"model\.norm\.weight: missing"):
        open_pretrained(recipe_from(olmo2))


def test_older_folders_leave_the_name_of_the_base_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save(MODELS["gpt2"](), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("transformer."): stored[name] for name in stored}, folder / "model.safetensors")
    unit_stage(recipe_from(folder))


def test_a_tied_matrix_with_other_values_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save(MODELS["starcoder2"](), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "lm_head.weight": 2 * stored["model.embed_tokens.weight"]}, folder / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"lm_head\.weight of its own.*tie_word_embeddings: false"):
        open_pretrained(recipe_from(folder))


def test_without_transformers_a_folder_of_no_family_says_what_to_install(
    olmo2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(GUESTS), "missing", lambda _: ["transformers"])
    with pytest.raises(RecipeError, match=r"may train as a guest.*pip install 'mmtrain\[transformers\]'"):
        recipe_from(olmo2)


def test_a_version_that_is_too_old_is_named_with_the_one_it_takes(olmo2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_guest.importlib.metadata, "version", lambda _: "5.2.0")
    with pytest.raises(UserError, match=r"needs transformers 5\.17 or newer, and 5\.2\.0 is installed"):
        open_pretrained(recipe_from(olmo2))


@pytest.mark.parametrize("command", ["profile", "chat", "verify"])
def test_commands_that_run_modules_of_ours_refuse_a_guest(command: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder("olmo2", folder)
    recipe_from(folder)  # beside the folder
    arguments = {
        "profile": [f"{folder}.yaml", "--out", f"{folder}.json"],
        "chat": [str(folder)],
        "verify": [f"{folder}.yaml"],
    }[command]
    result = CliRunner().invoke(app, [command, *arguments])
    assert isinstance(result.exception, UserError)
    assert f"{command} runs modules of mmtrain, and the model of this recipe is a guest" in str(result.exception)
