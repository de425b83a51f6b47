"""LLaVA-1.5 from a folder computes what `transformers` computes, whatever names the folder has for its tensors."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmtrain.errors import ModelFolderError, RecipeError
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from tests.families.configs import write_config
from tests.weights.comparison import (
    assert_equal_gradients,
    assert_equal_logits_and_loss,
    content,
    export_again,
    full_gradients,
    labels_of,
    patches_of,
    pretrained_of,
    rename_tensors,
    unit_stage,
)
from tests.weights.pretrained import IMAGE_SIDE, IMAGE_TOKEN, VOCAB, llava, recipe_from, save, siglip

HUB_CONFIG = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "ignore_index": -100,
    "image_token_index": 32000, "pad_token_id": 32001, "projector_hidden_act": "gelu", "torch_dtype": "float16",
    "tie_word_embeddings": False, "transformers_version": "4.36.0.dev0", "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default", "vocab_size": 32064,
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05, "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        "vocab_size": 32000,
    },
}  # fmt: skip


def _samples(side: int, num_features: int) -> tuple[list[Tensor], list[Tensor]]:
    """Make token ids of three samples, with two images, none and one, and the images, (3, side, side) each."""
    generator = torch.Generator().manual_seed(7)

    def words(count: int) -> Tensor:
        return torch.randint(IMAGE_TOKEN + 1, VOCAB, (count,), generator=generator)

    image = torch.full((num_features,), IMAGE_TOKEN)
    ids = [torch.cat([words(3), image, words(2), image, words(6)]), words(9), torch.cat([image, words(4)])]
    pixels = [torch.randn(3, side, side, generator=generator) for _ in range(3)]
    return ids, pixels


@pytest.mark.parametrize(
    ("text", "feature_layer", "tower", "strategy"),
    [
        ("llama", -2, None, "default"),
        ("qwen2", 2, None, "default"),
        ("qwen2", -1, None, "full"),
        ("qwen2", -1, siglip, "full"),
        ("llama", -2, partial(siglip, vision_use_head=False), "full"),
    ],
)
def test_logits_loss_and_gradients_equal_those_of_transformers(
    text: str, feature_layer: int, tower: Callable[[], Any] | None, strategy: str, tmp_path: Path
) -> None:
    theirs = llava(text, feature_layer, tower=tower and tower(), strategy=strategy)
    folder = save(theirs, tmp_path / "model")
    recipe = recipe_from(folder)
    vision, llm = unit_stage(recipe, "vision"), unit_stage(recipe, "llm")
    has_class_feature = tower is None and strategy == "full"
    ids, pixels = _samples(recipe.data.image.size, IMAGE_SIDE**2 + has_class_feature)
    labels = labels_of(ids, IMAGE_TOKEN)
    expected = [
        theirs(input_ids=ids[0][None], pixel_values=torch.stack(pixels[:2])).logits[0],
        theirs(input_ids=ids[1][None]).logits[0],
        theirs(input_ids=ids[2][None], pixel_values=pixels[2][None]).logits[0],
    ]
    packed = torch.cat(ids)
    places = (packed == IMAGE_TOKEN).nonzero().flatten()
    inputs = TextInput(tuple(map(len, ids)), packed, labels, {"vision": places})
    sides = (IMAGE_SIDE,) * 3
    features = vision(None, EncoderInput(sides, sides, torch.cat([patches_of(image) for image in pixels])))
    assert_equal_logits_and_loss(llm, inputs, {"vision": features}, torch.cat(expected))
    assert_equal_gradients(folder, theirs, full_gradients(vision) | full_gradients(llm))


@pytest.mark.parametrize(
    "spelling",
    [
        {},  # as transformers 5 writes
        {"vision_tower.": "vision_tower.vision_model."},  # as on the hub
        {
            "language_model.model.": "model.language_model.",
            "language_model.lm_head.": "lm_head.",
            "vision_tower.": "model.vision_tower.vision_model.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        },
    ],
)
@pytest.mark.parametrize("tower", [None, siglip])
def test_import_and_export_give_the_same_bits_in_every_spelling(
    spelling: dict[str, str], tower: Callable[[], Any] | None, tmp_path: Path
) -> None:
    """Blocks behind the layer of the features, the last norm and the pooling head come back too."""
    model = llava(tower=tower and tower(), strategy="full" if tower else "default")
    folder = save(model, tmp_path / "model", torch.bfloat16)
    rename_tensors(folder, spelling)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(17)
    save_file(tensors, path, {"format": "pt"})
    recipe = recipe_from(folder)
    expected = {name: of_tensor for name, of_tensor in content(folder).items() if "position_ids" not in name}
    assert content(export_again(folder, recipe)) == expected


def test_a_folder_without_a_projector_starts_with_a_fresh_one(tmp_path: Path) -> None:
    folder = save(llava(), tmp_path / "model", torch.bfloat16)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    complete = content(folder)
    projector = {name for name in tensors if name.startswith("multi_modal_projector.")}
    save_file({name: value for name, value in tensors.items() if name not in projector}, path, {"format": "pt"})
    recipe = recipe_from(folder)
    weights = pretrained_of(recipe)
    assert weights.fresh_modules == ("vision.layers.3.linear_1", "vision.layers.3.linear_2")
    stages = {unit: unit_stage(recipe, unit) for unit in ("vision", "llm")}
    assert stages["vision"].layers["3"].linear_1.weight.std() > 0.05  # type: ignore[union-attr, operator]
    exported = content(export_again(folder, recipe, stages))
    assert {name: of_tensor[:2] for name, of_tensor in exported.items()} == {
        name: of_tensor[:2] for name, of_tensor in complete.items()
    }
    assert {name for name in complete if exported[name] != complete[name]} == projector

    half = {name: value for name, value in tensors.items() if "projector.linear_2" not in name}
    save_file(half, path, {"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"2 differ:\n  multi_modal_projector.linear_2.weight: missing"):
        pretrained_of(recipe)


def test_the_config_of_the_hub_is_that_of_the_paper(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "llava-1.5-7b-hf", HUB_CONFIG)
    recipe = recipe_from(folder, "data.seq_len=2048")
    vision, llm = recipe.model.vision, recipe.model.llm
    assert vision is not None
    assert (vision.layers, vision.hidden, vision.max_side, vision.activation) == (23, 1024, 24, "quick_gelu")
    assert (llm.layers, llm.hidden, llm.ffn, llm.vocab, llm.norm_eps) == (32, 4096, 11008, 32064, 1e-5)
    image = recipe.data.image
    assert (image.scheme, image.size, image.fit, image.resample) == ("fixed", 336, "crop", "bicubic")
    assert image.mean[0] == 0.48145466


def test_a_recipe_may_choose_its_own_images_but_not_another_encoder(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", HUB_CONFIG)
    image = recipe_from(folder, "data.seq_len=2048", "data.image={scheme: fixed, size: 224}").data.image
    assert (image.size, image.fit, image.mean) == (224, "stretch", (0.5, 0.5, 0.5))
    frozen = recipe_from(
        folder, "data.seq_len=2048", "model.vision={freeze: true, projector: {freeze: true}}"
    ).model.vision
    assert frozen is not None
    assert (frozen.layers, frozen.freeze, frozen.projector.freeze) == (23, True, True)
    with pytest.raises(RecipeError, match=r"model\.vision\.projector\.activation: is 'silu' here, but 'gelu' in"):
        recipe_from(folder, "data.seq_len=2048", "model.vision.projector.activation=silu")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"vision_feature_select_strategy": "mean"}, 'vision_feature_select_strategy: "mean" is not supported yet'),
        ({"vision_feature_layer": [-2, -5]}, r"vision_feature_layer: [-2, -5] is not supported yet"),
        ({"vision_feature_layer": 30}, "24 blocks have no features of layer 30"),
        ({"multimodal_projector_bias": False}, "multimodal_projector_bias: false is not supported yet"),
        ({"text_config": {"model_type": "phi"}}, "text_config.model_type: 'phi' is not supported yet"),
        ({"vision_config": {"model_type": "pixtral"}}, "vision_config.model_type: 'pixtral' is not supported yet"),
        (
            {"vision_config": {"model_type": "siglip_vision_model"}},
            "vision_config.model_type: 'default' features of a tower without class token; supported: 'full'",
        ),
        ({"vision_config": {"vision_use_head": True}}, "vision_config.vision_use_head: true is not supported yet"),
    ],
)
def test_other_llavas_are_rejected_by_the_key(changes: dict[str, object], text: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", HUB_CONFIG, **changes)
    with pytest.raises(RecipeError) as caught:
        recipe_from(folder)
    assert text in str(caught.value)
