"""`model.hf` supplies the settings of a pretrained model, which a recipe must not contradict."""

import json
from pathlib import Path
from typing import Any

import pytest

from mmtrain.errors import RecipeError
from mmtrain.families import FAMILIES
from mmtrain.recipe import LoadedRecipe, load_recipe
from mmtrain.recipe.settings.llm_settings import LlmSettings
from tests.families.configs import LLAMA31, QWEN2, write_config
from tests.recipe.conftest import Write

OF_TRAINING = {"preset", "hf", "freeze", "lr_scale", "weight_decay"}  # no folder states these


@pytest.fixture
def text_only(write: Write) -> Path:
    return write(
        "recipe.yaml",
        """
        name: tiny
        model: {hf: pretrained}
        data: {sources: [{path: train.json}], tokenizer: tok.json, seq_len: 2048}
        train: {steps: 10, global_batch: 4, optimizer: {lr: 1e-3}}
        """,
    )


def _load(recipe: Path, config: dict[str, Any], *overrides: str, **changes: Any) -> LoadedRecipe:
    write_config(recipe.parent / "pretrained", config, **changes)
    return load_recipe(recipe, overrides, env={})


def _error(recipe: Path, config: dict[str, Any], *overrides: str, **changes: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        _load(recipe, config, *overrides, **changes)
    return str(caught.value)


def test_a_folder_supplies_the_settings_of_its_units(text_only: Path) -> None:
    loaded = _load(text_only, QWEN2, "model.llm.freeze=true")
    llm = loaded.recipe.model.llm
    assert (llm.layers, llm.hidden, llm.kv_heads, llm.head_dim, llm.vocab) == (2, 48, 2, 8, 100)
    assert (llm.rope_base, llm.norm_eps, llm.qkv_bias, llm.tie_embeddings) == (1e6, 1e-6, True, True)
    assert llm.freeze
    assert loaded.recipe.model.hf == text_only.parent / "pretrained"
    assert loaded.origin("model.llm.hidden") == str(text_only.parent / "pretrained" / "config.json")


def test_llama_31_brings_its_rope_scaling(text_only: Path) -> None:
    scaling = _load(text_only, LLAMA31).recipe.model.llm.rope_scaling
    assert scaling is not None
    assert (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor) == (8, 1, 4)
    assert scaling.original_positions == 64


def test_qwen2_is_stretched_as_its_readme_says(text_only: Path) -> None:
    stretched = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384}
    scaling = _load(text_only, QWEN2, rope_scaling=stretched).recipe.model.llm.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_positions) == ("yarn", 4, 16384)
    assert (scaling.low_freq_factor, scaling.high_freq_factor, scaling.amplitude) == (1, 32, None)
    del stretched["original_max_position_embeddings"]  # then the context of the config is meant
    scaling = _load(text_only, QWEN2, rope_scaling=stretched).recipe.model.llm.rope_scaling
    assert scaling is not None
    assert scaling.original_positions == QWEN2["max_position_embeddings"]


@pytest.mark.parametrize(
    ("changes", "window", "full"),
    [
        ({"use_sliding_window": True, "max_window_layers": 0}, 131072, ()),
        ({"use_sliding_window": True, "max_window_layers": 1}, 131072, (0,)),
        ({"use_sliding_window": True, "max_window_layers": 28}, None, ()),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, 131072, (1,)),
        ({"use_sliding_window": False, "max_window_layers": 0}, None, ()),
    ],
)
def test_only_some_blocks_of_qwen_have_windows(
    text_only: Path, changes: dict[str, Any], window: int | None, full: tuple[int, ...]
) -> None:
    llm = _load(text_only, QWEN2, **changes).recipe.model.llm
    assert (llm.window, llm.full_attention_blocks) == (window, full)


def test_a_type_for_every_layer_and_a_window_for_sliding_ones(text_only: Path) -> None:
    assert "layer_types: found ['full_attention'], allowed" in _error(text_only, QWEN2, layer_types=["full_attention"])
    error = _error(text_only, QWEN2, layer_types=["full_attention", "sliding_attention"])
    assert "layer_types: found sliding_attention, but the config has no sliding window" in error


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("full_attention_blocks: [0]", "without `window` all blocks have full attention"),
        ("window: 8, full_attention_blocks: [0, 1]", "found 1, but the last of 1 blocks is 0"),
    ],
)
def test_blocks_with_full_attention_are_some_of_those_there_are(text_only: Path, settings: str, problem: str) -> None:
    shapes = "{layers: 1, hidden: 16, heads: 2, ffn: 24, vocab: 64, %s}" % settings  # noqa: UP031
    with pytest.raises(RecipeError, match=problem):
        load_recipe(text_only, ["model.hf=null", f"model.llm={shapes}"], env={})


@pytest.mark.parametrize(
    ("scaling", "problem"),
    [
        ("{kind: linear, factor: 2, original_positions: 64}", "original_positions: `linear` does not use this"),
        ("{kind: yarn, factor: 2, low_freq_factor: 1}", "yarn needs high_freq_factor, original_positions"),
        ("{kind: linear, factor: 2, amplitude: 2}", "amplitude: only `yarn` has one, but kind is `linear`"),
    ],
)
def test_a_scaling_has_what_its_kind_needs_and_nothing_else(text_only: Path, scaling: str, problem: str) -> None:
    shapes = "{layers: 1, hidden: 16, heads: 2, ffn: 24, vocab: 64, rope_scaling: %s}" % scaling  # noqa: UP031
    with pytest.raises(RecipeError) as failure:
        load_recipe(text_only, ["model.hf=null", f"model.llm={shapes}"], env={})
    assert problem in str(failure.value)


@pytest.mark.parametrize("config", [QWEN2, LLAMA31], ids=["qwen2", "llama"])
def test_a_folder_states_every_setting_of_the_llm(text_only: Path, config: dict[str, Any]) -> None:
    loaded = _load(text_only, config)
    left_open = [name for name in LlmSettings.model_fields if loaded.origin(f"model.llm.{name}") == "default"]
    scaling = {"rope_scaling"} if config is LLAMA31 else set()  # a section has no origin of its own
    assert set(left_open) - scaling == OF_TRAINING


def test_settings_that_contradict_the_folder_are_rejected(text_only: Path) -> None:
    error = _error(text_only, QWEN2, "model.llm.hidden=64", "model.llm.qkv_bias=false")
    assert "2 problems" in error
    assert "model.llm.hidden: is 64 here, but 48 in " in error
    assert "model.llm.qkv_bias: is False here, but True in " in error


def test_what_is_not_supported_is_listed_by_its_key(text_only: Path) -> None:
    error = _error(
        text_only, QWEN2, attention_dropout=0.1, hidden_act="gelu", new_feature=3,
        rope_scaling={"type": "longrope", "factor": 4.0},
    )  # fmt: skip
    assert error.count("is not supported yet") == 4
    for key in (
        "attention_dropout: 0.1",
        'hidden_act: "gelu"',
        "new_feature: 3",
        'rope_scaling.rope_type: "longrope"',
    ):
        assert key in error
    assert "missing" not in error


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map: the folder needs Python code of its own"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantized weights cannot be trained"),
        ({"architectures": ["Qwen2ForCausalML"]}, "the nearest of these is Qwen2ForCausalLM"),
        ({"architectures": ["RwkvModel"]}, "supported: CLIPModel, CLIPVisionModel,"),
        (
            {"architectures": None, "model_type": "t5"},
            "model_type 't5' is not supported; supported: clip,",
        ),
        ({"hidden_size": "wide"}, 'hidden_size: found "wide", allowed: a whole number'),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_clear_problem(text_only: Path, changes: dict[str, Any], text: str) -> None:
    error = _error(text_only, QWEN2, **changes)
    assert text in error
    assert "1 problem\n  model.hf: " in error


def test_a_missing_folder_is_named(text_only: Path) -> None:
    with pytest.raises(RecipeError, match=r"model\.hf: there is no folder .*pretrained; .*ORG/NAME@REVISION"):
        load_recipe(text_only, env={})


def test_a_config_that_is_no_json_is_named(text_only: Path) -> None:
    folder = write_config(text_only.parent / "pretrained", QWEN2)
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"config\.json is no JSON"):
        load_recipe(text_only, env={})


def test_pickled_weights_are_refused(text_only: Path) -> None:
    folder = write_config(text_only.parent / "pretrained", QWEN2)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(RecipeError, match=r"pytorch_model\.bin: pickled weights can run code"):
        load_recipe(text_only, env={})
    (folder / "model.safetensors").write_bytes(b"")
    assert load_recipe(text_only, env={}).recipe.model.llm.hidden == 48


def test_a_preset_beside_a_folder_is_rejected(text_only: Path) -> None:
    assert "model.llm.preset: model.hf supplies the settings" in _error(text_only, QWEN2, "model.llm.preset=qwen2-7b")


def test_a_folder_supplies_the_tokenizer_of_a_recipe_that_names_none(text_only: Path) -> None:
    text_only.write_text(text_only.read_text().replace("tokenizer: tok.json, ", ""))
    folder = text_only.parent / "pretrained"
    assert "data.tokenizer: missing" in _error(text_only, QWEN2)
    (folder / "tokenizer.json").write_text("{}")
    loaded = _load(text_only, QWEN2)
    assert loaded.recipe.data.tokenizer == folder
    assert loaded.origin("data.tokenizer") == str(folder / "config.json")
    assert _load(text_only, QWEN2, "data.tokenizer=/t.json").recipe.data.tokenizer == Path("/t.json")


@pytest.fixture
def pictured(write: Write) -> Path:
    recipe = write(
        "recipe.yaml",
        """
        name: tiny
        model: {hf: pretrained}
        data: {sources: [{path: train.json}], tokenizer: tok.json, seq_len: 2048}
        train: {steps: 10, global_batch: 4, optimizer: {lr: 1e-3}}
        """,
    )
    write_config(recipe.parent / "pretrained", dict(FAMILIES["llava"].tiny["config.json"]))
    return recipe


def _write_processor(recipe: Path, **config: Any) -> None:
    (recipe.parent / "pretrained" / "preprocessor_config.json").write_text(json.dumps(config))


def test_the_folder_states_how_pictures_are_prepared(pictured: Path) -> None:
    without = load_recipe(pictured, env={}).recipe.data.image
    assert (without.scheme, without.size, without.fit, without.decode) == ("fixed", 32, "crop", "full")
    square = {"height": 32, "width": 32}
    _write_processor(
        pictured, image_processor_type="SiglipImageProcessor", size=square, resample=2, image_mean=[0.1, 0.2, 0.3]
    )
    image = load_recipe(pictured, env={}).recipe.data.image
    assert (image.scheme, image.size, image.fit, image.resample) == ("fixed", 32, "stretch", "bilinear")
    assert (image.mean, image.std) == ((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    own = load_recipe(pictured, ["data.image.scheme=tiles", "data.image.tile=32"], env={}).recipe.data.image
    assert (own.scheme, own.mean) == ("tiles", (0.5, 0.5, 0.5))


def test_a_processor_that_is_not_supported_is_a_problem_only_where_it_is_needed(pictured: Path) -> None:
    _write_processor(pictured, image_processor_type="FuyuImageProcessor")
    with pytest.raises(RecipeError, match=r"1 problem\n  model\.hf: .*'FuyuImageProcessor' is not supported yet"):
        load_recipe(pictured, env={})
    assert load_recipe(pictured, ["data.image.scheme=fixed", "data.image.size=32"], env={}).recipe.data.image.size == 32
