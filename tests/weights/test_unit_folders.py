"""Units that start from folders of their own: encoders that were published alone, and an LLM."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmtrain.data.synthetic.tiny_tokenizer import write_tiny_tokenizer
from mmtrain.errors import ModelFolderError, RecipeError
from mmtrain.families import FAMILIES
from mmtrain.models.stage.stage_inputs import EncoderInput
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.recipe import Recipe, load_recipe
from tests.models.factory import randomize
from tests.weights.comparison import export_again, patches_of, pretrained_of, unit_stage
from tests.weights.pretrained import IMAGE_SIDE, PATCH, clip, llava, qwen2, save, siglip

TINY_VOCAB = 512  # of `write_tiny_tokenizer`


def _random(model: nn.Module) -> nn.Module:
    randomize(model)
    return model.eval()


def _clip_model() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig

    text = CLIPTextConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = CLIPConfig(text_config=text.to_dict(), vision_config=clip().to_dict(), projection_dim=16)
    return _random(CLIPModel(config))


def _clip_vision() -> nn.Module:
    from transformers import CLIPVisionModel

    return _random(CLIPVisionModel(clip()))


def _siglip_model() -> nn.Module:
    from transformers import SiglipConfig, SiglipModel, SiglipTextConfig

    text = SiglipTextConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return _random(SiglipModel(SiglipConfig(text_config=text.to_dict(), vision_config=siglip().to_dict())))


def _siglip_vision() -> nn.Module:
    from transformers import SiglipVisionModel

    return _random(SiglipVisionModel(siglip()))


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        num_mel_bins=20, d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48, max_source_positions=50, vocab_size=60,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    return _random(WhisperForConditionalGeneration(config))


@pytest.fixture(scope="module")
def llm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of an LLM whose tokenizer has tokens for media."""
    folder = save(qwen2(vocab_size=TINY_VOCAB), tmp_path_factory.mktemp("llm") / "qwen2")
    write_tiny_tokenizer(folder, ["What is in the picture?", "A red square."], FAMILIES["qwen2"])
    return folder


def _recipe(tmp_path: Path, model: str, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
name: units
model: {model}
data: {{sources: [{{path: none.json}}], seq_len: 128}}
train: {{steps: 1, global_batch: 1, precision: fp32, optimizer: {{lr: 1e-3}}}}
"""
    )
    return load_recipe(path, overrides, env={}).recipe


def _hidden_before_projector(stage: StageModule, inputs: EncoderInput) -> Tensor:
    last = len(stage.indices) - 1
    with torch.no_grad():
        return stage.run(stage.context(inputs, {}), None, range(last))


@pytest.mark.parametrize("make", [_clip_model, _clip_vision, _siglip_model, _siglip_vision])
def test_a_vision_tower_computes_what_transformers_computes(
    make: Callable[[], nn.Module], llm_folder: Path, tmp_path: Path
) -> None:
    theirs = make()
    folder = save(theirs, tmp_path / "tower")
    recipe = _recipe(tmp_path, f"{{vision: {{hf: {folder}}}, llm: {{hf: {llm_folder}}}}}")
    side = recipe.data.image.size
    assert recipe.data.tokenizer == llm_folder
    pixels = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    tower: Any = getattr(theirs, "vision_model", theirs)
    is_clip = make in (_clip_model, _clip_vision)
    expected = tower(pixel_values=pixels, output_hidden_states=True).hidden_states[-2 if is_clip else -1]
    sides = (IMAGE_SIDE,) * 2
    patches = torch.cat([patches_of(image) for image in pixels])
    vision = unit_stage(recipe, "vision")
    hidden = _hidden_before_projector(vision, EncoderInput(sides, sides, patches))
    assert patches.shape[0] == 2 * IMAGE_SIDE**2
    assert (hidden - expected.flatten(0, 1)).abs().max() < 1e-4
    assert expected.std() > 0.1
    assert pretrained_of(recipe).fresh_modules == ("the projector of vision",)
    assert torch.equal(vision.layers["3" if is_clip else "4"].linear_1.bias, torch.zeros(48))  # type: ignore[union-attr]


def test_whisper_computes_what_transformers_computes(llm_folder: Path, tmp_path: Path) -> None:
    theirs: Any = _whisper()
    folder = save(theirs, tmp_path / "whisper")
    recipe = _recipe(tmp_path, f"{{audio: {{hf: {folder}, downsample: 2}}, llm: {{hf: {llm_folder}}}}}")
    assert recipe.data.audio.max_seconds == 1
    mels = torch.randn(2, 100, 20, generator=torch.Generator().manual_seed(1))
    expected = theirs.model.encoder(mels.transpose(1, 2)).last_hidden_state.flatten(0, 1)
    audio = unit_stage(recipe, "audio")
    hidden = _hidden_before_projector(audio, EncoderInput((100, 100), (1, 1), mels.flatten(0, 1)))
    with torch.no_grad():
        hidden = audio.layers["3"].post_norm(hidden)  # type: ignore[union-attr, operator]
    assert (hidden - expected).abs().max() < 1e-4


def test_units_of_other_models_start_without_their_projectors(llm_folder: Path, tmp_path: Path) -> None:
    """Take the tower of a LLaVA, under a name of its own, and the LLM of `model.hf`."""
    theirs = llava()
    folder = save(theirs, tmp_path / "llava")
    model = f"{{hf: {llm_folder}, encoders: {{eyes: {{modality: vision, hf: {folder}}}}}}}"
    recipe = _recipe(tmp_path, model)
    weights = pretrained_of(recipe)
    assert (set(weights.units), weights.fresh_modules) == ({"llm", "eyes"}, ("the projector of eyes",))
    eyes = dict(unit_stage(recipe, "eyes").named_parameters())
    token = theirs.state_dict()["model.vision_tower.embeddings.class_embedding"]
    assert torch.equal(eyes["layers.0.class_token"], token)


@pytest.mark.parametrize("make", [_clip_model, _siglip_vision])
def test_a_tower_and_an_llm_are_exported_as_one_llava(
    make: Callable[[], nn.Module], llm_folder: Path, tmp_path: Path
) -> None:
    from transformers import LlavaForConditionalGeneration

    folder = save(make(), tmp_path / "tower")
    recipe = _recipe(tmp_path, f"{{hf: {llm_folder}, vision: {{hf: {folder}}}}}")
    stages = {unit: unit_stage(recipe, unit) for unit in ("vision", "llm")}
    out = export_again(folder, recipe, stages)
    model, loading = LlavaForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values()), loading
    side = recipe.data.image.size
    pixels = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1))
    sides = (IMAGE_SIDE,)
    with torch.no_grad():
        ours = stages["vision"](None, EncoderInput(sides, sides, patches_of(pixels[0])))
        theirs = model.get_image_features(pixels).pooler_output[0]
    assert (ours - theirs).abs().max() < 1e-4
    table = dict(stages["llm"].named_parameters())["layers.0.table.weight"]
    assert torch.equal(table[:TINY_VOCAB], model.get_input_embeddings().weight)
    assert side == IMAGE_SIDE * PATCH + (make is _siglip_vision) * 2


def test_wrong_folders_are_rejected_by_their_setting(llm_folder: Path, tmp_path: Path) -> None:
    tower = save(_clip_vision(), tmp_path / "tower")
    cases = {
        f"{{hf: {tower}}}": r"model\.hf: .*tower \(clip\) holds vision, but no llm; name it for its own unit",
        f"{{audio: {{hf: {tower}}}, llm: {{hf: {llm_folder}}}}}": r"model\.audio\.hf: .* holds vision, but no audio",
        f"{{hf: {llm_folder}, llm: {{hf: {llm_folder}}}}}": r"model\.llm\.hf: the folder of model\.hf holds this unit",
        f"{{hf: {llm_folder}, vision: {{hf: {tower}, hidden: 64}}}}": r"model\.vision\.hidden: is 64 here, but 32 in",
        f"{{hf: {llm_folder}, vision: {{hf: {tmp_path}/gone}}}}": r"model\.vision\.hf: there is no folder .*gone",
    }
    for model, text in cases.items():
        with pytest.raises(RecipeError, match=text):
            _recipe(tmp_path, model)
    recipe = _recipe(tmp_path, f"{{hf: {llm_folder}, vision: {{hf: {tower}}}}}")
    config = tower / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "intermediate_size": 65}))
    with pytest.raises(ModelFolderError, match=r"model\.vision\.hf: the weights in .*tower"):
        pretrained_of(recipe)
