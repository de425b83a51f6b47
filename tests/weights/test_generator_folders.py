"""Generators from folders of `diffusers` and back: the same tensors, under tensor parallelism and in several files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import PixArtTransformer2DModel, UNet2DConditionModel
from torch import Tensor, nn
from typer.testing import CliRunner

from mmtrain.checkpoint import open_newest_good
from mmtrain.cli.app import app
from mmtrain.errors import ModelFolderError, RecipeError, UserError
from mmtrain.families import read_model_folder
from mmtrain.models.optim.parameter_specs import stage_param_specs
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.recipe.settings.presets import GENERATOR_PRESETS
from mmtrain.weights import export_generator
from mmtrain.weights.inspect_folder import inspect_folder
from tests.cli.conftest import RunMmtrain, run_mmtrain
from tests.models.generator.tiny import DIT, LLM_HIDDEN, UNET, build, load, shuffle
from tests.runtime.models import run_folder, save_in_halves
from tests.weights.comparison import content, pretrained_of, unit_stage
from tests.weights.pretrained import qwen2, save
from tests.weights.pretrained import recipe_from as recipe_of_llm

__all__ = ["run_mmtrain"]

CONTEXT_WIDTH, CONTEXT_TOKENS, SIDE = 20, 5, 8
# `unet/config.json` of stabilityai/stable-diffusion-2-1.
STABLE_DIFFUSION_2_1: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel", "_diffusers_version": "0.10.0.dev0", "act_fn": "silu",
    "attention_head_dim": [5, 10, 20, 20], "block_out_channels": [320, 640, 1280, 1280], "center_input_sample": False,
    "cross_attention_dim": 1024,
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "downsample_padding": 1, "dual_cross_attention": False, "flip_sin_to_cos": True, "freq_shift": 0, "in_channels": 4,
    "layers_per_block": 2, "mid_block_scale_factor": 1, "norm_eps": 1e-05, "norm_num_groups": 32,
    "num_class_embeds": None, "only_cross_attention": False, "out_channels": 4, "sample_size": 96,
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
    "upcast_attention": True, "use_linear_projection": True,
}  # fmt: skip


def unet(**more: Any) -> UNet2DConditionModel:
    settings: dict[str, Any] = {
        "sample_size": SIDE,
        "block_out_channels": UNET["widths"],
        "attention_head_dim": UNET["heads"],
        "layers_per_block": UNET["layers"],
        "norm_num_groups": UNET["norm_groups"],
        "cross_attention_dim": CONTEXT_WIDTH,
        "use_linear_projection": True,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    }
    return UNet2DConditionModel(**settings | more)


def pixart(**more: Any) -> PixArtTransformer2DModel:
    settings: dict[str, Any] = {
        "num_attention_heads": DIT["heads"][0],
        "attention_head_dim": DIT["widths"][0] // DIT["heads"][0],
        "num_layers": DIT["layers"],
        "cross_attention_dim": CONTEXT_WIDTH,
        "sample_size": SIDE,
    }
    return PixArtTransformer2DModel(**settings | more)


MODELS = {"unet": unet, "dit": pixart}


def saved(kind: str, folder: Path, max_shard_size: str = "10GB", **settings: Any) -> nn.Module:
    """Save a random model to a folder."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[kind](**settings)
    shuffle(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)  # type: ignore[operator]
    return model


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def recipe_of(tmp_path: Path, generator: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
name: drawing
model:
  llm: {{layers: 1, hidden: 24, heads: 2, ffn: 32, vocab: 64}}
  generator: {generator}
data: {{sources: [{{path: lengths.csv}}], seq_len: 64}}
train: {{steps: 1, global_batch: 1, precision: fp32, optimizer: {{lr: 1e-3}}}}
"""
    )
    return load_recipe(path, env={}).recipe


def recipe_from(folder: Path, tmp_path: Path) -> Recipe:
    return recipe_of(tmp_path, f"{{hf: {folder}, context_tokens: {CONTEXT_TOKENS}}}")


class GeneratorStage(nn.Module):
    """All layers of a generator under the names that a stage gives them."""

    unit = "generator"

    def __init__(self, recipe: Recipe, llm_hidden: int) -> None:
        super().__init__()
        assert recipe.model.generator is not None
        self.layers = build(recipe.model.generator, llm_hidden=llm_hidden)


def filled(recipe: Recipe, llm_hidden: int = LLM_HIDDEN) -> GeneratorStage:
    """Build the layers of a generator with the weights of its folder; others are what `build` made of them."""
    stage = GeneratorStage(recipe, llm_hidden)
    weights = pretrained_of(recipe)
    for name, spec in stage_param_specs(stage, "generator", tp=1).items():  # type: ignore[arg-type]
        is_filled = weights.fill(stage.get_parameter(name).data, spec, 0, 1)
        assert is_filled != name.startswith("layers.0."), name
    weights.close()
    return stage


@pytest.mark.parametrize("max_shard_size", ["10GB", "40KB"], ids=["one file", "several files"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_generator_starts_from_the_weights_of_its_folder(kind: str, max_shard_size: str, tmp_path: Path) -> None:
    theirs = saved(kind, tmp_path / "model", max_shard_size=max_shard_size)
    num_files = len(list((tmp_path / "model").glob("*.safetensors")))
    assert (num_files > 1) == (max_shard_size == "40KB")
    recipe = recipe_from(tmp_path / "model", tmp_path)
    settings = recipe.model.generator
    assert settings is not None
    expected = build(settings)
    load(expected, theirs.state_dict(), settings)
    ours = filled(recipe)
    for name, param in expected[1:].named_parameters():
        index, _, rest = name.partition(".")
        assert torch.equal(ours.get_parameter(f"layers.{int(index) + 1}.{rest}"), param), name
    assert pretrained_of(recipe).fresh_modules == ("the projector of the generator's context",)


def test_an_older_folder_with_a_projection_of_captions_is_read_without_it(tmp_path: Path) -> None:
    theirs = saved("dit", tmp_path / "model", caption_channels=6)
    assert "caption_projection.linear_1.weight" in theirs.state_dict()
    # PixArt-XL-2-512x512 was published before its class had a name of its own.
    older = {"_class_name": "Transformer2DModel", "num_vector_embeds": None, "use_linear_projection": False}
    change_config(tmp_path / "model", older)
    recipe = recipe_from(tmp_path / "model", tmp_path)
    settings = recipe.model.generator
    assert settings is not None
    expected = build(settings)
    load(expected, theirs.state_dict(), settings)
    ours = filled(recipe)
    assert torch.equal(ours.layers[1].modulation.weight, expected[1].modulation.weight)
    assert inspect_folder(tmp_path / "model").tensors == len(theirs.state_dict())


def test_a_tensor_parallel_rank_reads_its_shards(tmp_path: Path) -> None:
    saved("dit", tmp_path / "model")
    recipe = recipe_from(tmp_path / "model", tmp_path)
    stage = filled(recipe)
    weights = pretrained_of(recipe)
    num_split = 0
    for name, spec in stage_param_specs(stage, "generator", tp=1).items():  # type: ignore[arg-type]
        full = stage.get_parameter(name)
        if spec.dim is None or name.startswith("layers.0."):
            continue
        for rank in range(2):
            shard = torch.empty(spec.local_shape(2))
            assert weights.fill(shard, spec, rank, 2)
            assert torch.equal(shard, full.chunk(2, dim=spec.dim)[rank]), name
        num_split += 1
    assert num_split == 11 * DIT["layers"]


@pytest.mark.parametrize("max_file_bytes", [10**9, 50_000], ids=["one file", "several files"])
@pytest.mark.parametrize("kind", MODELS)
def test_an_exported_generator_is_what_diffusers_opens(kind: str, max_file_bytes: int, tmp_path: Path) -> None:
    theirs = saved(kind, tmp_path / "model")
    recipe = recipe_from(tmp_path / "model", tmp_path)
    save_in_halves(tmp_path / "checkpoints", 3, [filled(recipe)])  # type: ignore[list-item]
    checkpoint = open_newest_good(tmp_path / "checkpoints", print)
    written = export_generator(recipe, checkpoint, tmp_path / "out", max_file_bytes=max_file_bytes)
    assert (written.num_files > 1) == (max_file_bytes == 50_000)
    again, loading = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(loading.values()), loading
    assert_equal_tensors(again.state_dict(), theirs.state_dict())
    assert read_model_folder(tmp_path / "out").settings == read_model_folder(tmp_path / "model").settings
    with pytest.raises(UserError, match="exists already"):
        export_generator(recipe, checkpoint, tmp_path / "out")


def assert_equal_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_stable_diffusion_has_the_settings_of_its_preset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(STABLE_DIFFUSION_2_1))
    settings = read_model_folder(tmp_path).settings.model["generator"]
    preset = GENERATOR_PRESETS["stable-diffusion-2.1"].settings
    assert {key: settings[key] for key in preset} == dict(preset)
    assert settings["sample_size"] == 96
    (unit,) = inspect_folder(tmp_path).units
    assert (unit.name, unit.parameters, unit.hidden, unit.heads) == ("generator", 865_910_724, 1280, 20)
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)]).stdout
    assert "a recipe can start its generator from it (model.generator.hf)" in shown


UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "stable diffusion 1.5": ("unet", {"use_linear_projection": False}, "use_linear_projection: false is not"),
    "sdxl": ("unet", {"addition_embed_type": "text_time"}, "addition_embed_type: .*is not supported"),
    "inpainting": ("unet", {"in_channels": 9}, "out_channels: 4 is not supported yet; supported: 9"),
    "other blocks": ("unet", {"down_block_types": ["DownBlock2D"] * 3}, "down_block_types: .*is not supported"),
    "heads": ("unet", {"attention_head_dim": [2, 4]}, "attention_head_dim: found .2, 4., allowed: 3 whole numbers"),
    "with sizes": ("dit", {"use_additional_conditions": True}, "use_additional_conditions: true is not supported"),
    "large images": ("dit", {"sample_size": 128}, "use_additional_conditions: .*sample_size 128 implies"),
    "without variance": ("dit", {"out_channels": 4}, "out_channels: 4 is not supported yet; supported: 8"),
    "another class": ("dit", {"_class_name": "FluxTransformer2DModel"}, "_class_name 'FluxTransformer2DModel' is not"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_built_is_named(name: str, tmp_path: Path) -> None:
    kind, changes, message = UNSUPPORTED[name]
    saved(kind, tmp_path)
    change_config(tmp_path, changes)
    with pytest.raises(ModelFolderError, match=message):
        read_model_folder(tmp_path)


def test_wrong_folders_are_rejected_by_their_setting(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    saved("unet", folder)
    pipeline = tmp_path / "pipeline"
    pipeline.mkdir()
    (pipeline / "model_index.json").write_text("{}")
    cases = {
        f"{{hf: {pipeline}}}": r"model\.generator\.hf: .*is a pipeline of diffusers; name the folder .*pipeline/unet",
        f"{{hf: {folder}, widths: [16, 16, 16]}}": r"model\.generator\.widths: is \[16, 16, 16\] here, but",
        f"{{hf: {folder}, preset: pixart-alpha}}": r"model\.generator\.preset: model\.generator\.hf supplies",
    }
    for generator, text in cases.items():
        with pytest.raises(RecipeError, match=text):
            recipe_of(tmp_path, generator)
    recipe = recipe_from(folder, tmp_path)
    change_config(folder, {"cross_attention_dim": 21})
    with pytest.raises(ModelFolderError, match=r"(?s)^model\.generator\.hf: .*attn2.to_k.weight: has the shape"):
        pretrained_of(recipe)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    saved("dit", folder, max_shard_size="40KB")
    recipe = recipe_from(folder, tmp_path)
    *_, last = sorted(folder.glob("*.safetensors"))
    content = last.read_bytes()
    last.write_bytes(content[:-4])
    with pytest.raises(ModelFolderError, match=rf"{last.name}: no complete safetensors file: it has .* bytes, but"):
        pretrained_of(recipe)
    last.unlink()
    with pytest.raises(ModelFolderError, match=rf"index.json names files that are missing: {last.name}; fetch them"):
        inspect_folder(folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ModelFolderError, match=r"holds no weights; allowed: .*diffusion_pytorch_model\.safetensors"):
        pretrained_of(recipe)
    shown = CliRunner().invoke(app, ["inspect", str(folder)]).stdout
    assert "weights: none; it can be planned for" in shown


def test_the_command_writes_llm_and_generator_to_folders_of_their_own(tmp_path: Path, run_mmtrain: RunMmtrain) -> None:
    llm_folder = save(qwen2(num_hidden_layers=1), tmp_path / "llm")
    saved("dit", tmp_path / "dit", in_channels=3, out_channels=6)
    generator = f"{{hf: {tmp_path / 'dit'}, context_tokens: {CONTEXT_TOKENS}, image_size: {SIDE}}}"
    recipe = recipe_of_llm(llm_folder, f"model.generator={generator}")
    stages = {"llm": unit_stage(recipe), "generator": filled(recipe, recipe.model.llm.hidden)}
    run = run_folder(tmp_path / "run", recipe, stages)  # type: ignore[arg-type]
    done = run_mmtrain("export", run, "--out", tmp_path / "llm-out")
    assert "the image generator is not in it: --generator writes it" in done.stdout, done.stderr
    assert content(tmp_path / "llm-out") == content(llm_folder)
    done = run_mmtrain("export", run, "--out", tmp_path / "dit-out", "--generator", "--dtype", "bf16")
    assert "diffusers.PixArtTransformer2DModel.from_pretrained(" in done.stdout, done.stderr
    written = inspect_folder(tmp_path / "dit-out")
    assert written.dtypes == ("bfloat16",)
    assert written.tensors == inspect_folder(tmp_path / "dit").tensors
    done = run_mmtrain("export", run, "--out", tmp_path / "third", "--generator", "--adapter")
    assert done.returncode != 0
    assert "give one of them" in done.stderr


def test_a_run_without_a_generator_has_none_to_export(tmp_path: Path) -> None:
    saved("dit", tmp_path / "model")
    recipe = recipe_from(tmp_path / "model", tmp_path)
    save_in_halves(tmp_path / "checkpoints", 3, [filled(recipe)])  # type: ignore[list-item]
    plain = recipe.model_copy(update={"model": recipe.model.model_copy(update={"generator": None})})
    with pytest.raises(UserError, match="no generator"):
        export_generator(plain, open_newest_good(tmp_path / "checkpoints", print), tmp_path / "out")
