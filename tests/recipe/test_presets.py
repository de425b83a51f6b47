"""Presets fill in missing settings, and their shapes have the published numbers of parameters."""

from pathlib import Path
from typing import Any, get_args

import pytest

from mmtrain.costs import num_parameters
from mmtrain.errors import RecipeError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.recipe import dump_recipe, editor_schema, load_recipe, recipe_fingerprint
from mmtrain.recipe.loading.recipe_loader import presets_by_unit
from mmtrain.recipe.settings.presets import (
    AUDIO_PRESETS,
    GENERATOR_PRESETS,
    LLM_PRESETS,
    VISION_PRESETS,
    AudioPreset,
    GeneratorPreset,
    LlmPreset,
    VisionPreset,
)
from mmtrain.recipe.settings.schema import Recipe
from tests.recipe.conftest import Write

UNITS = [(unit, name) for unit, presets in presets_by_unit().items() for name in presets]


@pytest.fixture
def tiny(write: Write) -> Path:
    """Return a recipe whose vision settings come from a preset, except for one."""
    return write(
        "tiny.yaml",
        """
        name: tiny
        model:
          vision: {preset: internvit-300m, layers: 2}
          llm: {layers: 2, hidden: 64, heads: 4, ffn: 128, vocab: 512}
        data:
          sources: [{path: train.json}]
          tokenizer: tok.json
          seq_len: 2048
        train: {steps: 10, global_batch: 4, optimizer: {lr: 1e-3}}
        """,
    )


def test_a_preset_fills_only_settings_that_the_recipe_leaves_out(tiny: Path) -> None:
    loaded = load_recipe(tiny, env={})
    vision = loaded.recipe.model.vision
    assert vision is not None
    assert (vision.layers, vision.hidden, vision.heads, vision.class_token) == (2, 1024, 16, True)
    assert loaded.origin("model.vision.layers") == f"{tiny}:3"
    assert loaded.origin("model.vision.hidden") == f"{tiny}:3, preset internvit-300m"


def test_a_preset_from_the_command_line_fills_what_the_files_leave_out(tiny: Path) -> None:
    vision = load_recipe(tiny, ["model.vision.preset=vit-huge"], env={}).recipe.model.vision
    assert vision is not None
    assert (vision.layers, vision.hidden) == (2, 1280)


def test_a_preset_equals_its_settings_written_out(tiny: Path, tmp_path: Path) -> None:
    recipe = load_recipe(tiny, env={}).recipe
    again = tmp_path / "resolved.yaml"
    again.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(again, env={}).recipe == recipe
    spelt = load_recipe(again, ["model.vision.preset=null"], env={}).recipe
    assert recipe_fingerprint(spelt) == recipe_fingerprint(recipe)


def test_an_unknown_preset_is_the_only_problem_reported(tiny: Path) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(tiny, ["model.vision.preset=internvit-6"], env={})
    first, *others = str(error.value).splitlines()[1:]
    assert "model.vision.preset: found the text 'internvit-6', allowed: eva-clip-18b" in first
    assert "did you mean internvit-6b?" in first
    assert not others


def test_the_editor_schema_names_all_presets() -> None:
    assert set(get_args(VisionPreset)) == set(VISION_PRESETS)
    assert set(get_args(AudioPreset)) == set(AUDIO_PRESETS)
    assert set(get_args(LlmPreset)) == set(LLM_PRESETS)
    assert set(get_args(GeneratorPreset)) == set(GENERATOR_PRESETS)
    settings = editor_schema()["$defs"]["LlmSettings"]["properties"]["preset"]
    assert "internlm2-20b" in str(settings)


@pytest.mark.parametrize(("unit", "name"), UNITS)
def test_parameter_counts_match_the_publication(unit: str, name: str) -> None:
    preset = presets_by_unit()[unit][name]
    llm = {"layers": 1, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 512}
    model: dict[str, Any] = {"llm": llm} | {unit: dict(preset.settings)}
    recipe = Recipe.model_validate(
        {
            "name": "preset",
            "model": model,
            "data": {"sources": [{"path": "x.json"}], "tokenizer": "t.json", "seq_len": 2048},
            "train": {"steps": 1, "global_batch": 1, "optimizer": {"lr": 1e-3}},
        }
    )
    layers = [layer for layer in build_model_shape(recipe).unit(unit).layers if "projector" not in layer.kind]
    assert sum(map(num_parameters, layers)) == pytest.approx(preset.parameters, rel=preset.tolerance)
