"""GLM-4.5V computes what `transformers` computes, with images and videos."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmtrain.costs import num_parameters
from mmtrain.data.loading.batch_builder import find_media_positions
from mmtrain.data.media.image_grids import MediumGrid
from mmtrain.errors import RecipeError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.recipe import Recipe
from tests.families.configs import write_config
from tests.weights.comparison import (
    assert_equal_gradients,
    assert_equal_logits_and_loss,
    content,
    export_again,
    full_gradients,
    labels_of,
    unit_stage,
)
from tests.weights.pretrained import IMAGE_TOKEN, MERGE, VOCAB, glm4v_moe, recipe_from, save
from tests.weights.test_qwen_vl import in_squares

# As on the hub, where the text section repeats tokens of the outer one.
TOKENS = {
    "image_token_id": 151363, "image_start_token_id": 151339, "image_end_token_id": 151340, "video_token_id": 151364,
    "video_start_token_id": 151341, "video_end_token_id": 151342,
}  # fmt: skip
GLM_4_5V: dict[str, Any] = {
    "architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe", "tie_word_embeddings": False,
    **TOKENS,
    "text_config": {
        "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338],
        "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 65536,
        "model_type": "glm4v_moe_text", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
        "num_hidden_layers": 46, "num_key_value_heads": 8, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05, "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"},
        "rope_theta": 10000.0, "routed_scaling_factor": 1.0, "topk_group": 1, "use_cache": True, "use_qk_norm": False,
        "vocab_size": 151552, **TOKENS,
    },
    "vision_config": {
        "attention_bias": False, "attention_dropout": 0.0, "depth": 24, "hidden_act": "silu", "hidden_size": 1536,
        "image_size": 336, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 10944,
        "model_type": "glm4v_moe_vision", "num_heads": 12, "out_hidden_size": 4096, "patch_size": 14,
        "rms_norm_eps": 1e-05, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
# Frames (in patches), rows and columns of what the samples show. `transformers` takes images or videos, not both.
IMAGES, VIDEO, WIDE_IMAGE = [(1, 4, 6), (1, 2, 2)], [(3, 4, 4)], [(1, 6, 10)]
SHOWN = [IMAGES, [], VIDEO, WIDE_IMAGE]
VIDEOS = {2}  # samples


def _recipe(folder: Path) -> Recipe:
    return recipe_from(folder, "data.image.min_pixels=16", "data.image.max_pixels=576")


def _words(count: int, seed: int) -> Tensor:
    return torch.randint(IMAGE_TOKEN + 1, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def _pictures(number: int) -> list[tuple[int, int]]:
    """Return rows and columns of what a sample shows one after another: text stands between the frames of a video."""
    return [(rows, cols) for frames, rows, cols in SHOWN[number] for _ in range(frames)]


def _ids(number: int) -> Tensor:
    parts = [_words(3, number)]
    for rows, cols in _pictures(number):
        parts += [torch.full((rows * cols // MERGE**2,), IMAGE_TOKEN), _words(2, number + 10)]
    return torch.cat([*parts, _words(4, number + 20)])


def _their_media(number: int, cells: list[Tensor]) -> dict[str, Tensor]:
    if not cells:
        return {}
    pixels = torch.cat([in_squares(of_medium, *grid[1:]) for grid, of_medium in zip(SHOWN[number], cells, strict=True)])
    grids = torch.tensor(SHOWN[number])
    is_image = (_ids(number) == IMAGE_TOKEN).int()[None]
    if number in VIDEOS:
        return {"pixel_values_videos": pixels, "video_grid_thw": grids, "mm_token_type_ids": 2 * is_image}
    return {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": is_image}


def test_logits_loss_and_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    theirs = glm4v_moe()
    folder = save(theirs, tmp_path / "model")
    recipe = _recipe(folder)
    vision, llm = unit_stage(recipe, "vision"), unit_stage(recipe, "llm")
    assert recipe.model.vision is not None
    width, generator = recipe.model.vision.cell_features, torch.Generator().manual_seed(7)
    cells = [[torch.randn(int(np.prod(grid)), width, generator=generator) for grid in grids] for grids in SHOWN]
    numbers = range(len(SHOWN))
    ids = [_ids(number) for number in numbers]
    labels = labels_of(ids, IMAGE_TOKEN)
    expected = torch.cat(
        [theirs(input_ids=ids[number][None], **_their_media(number, cells[number])).logits[0] for number in numbers]
    )
    pictures = [picture for number in numbers for picture in _pictures(number)]
    rows, cols = (tuple(picture[k] for picture in pictures) for k in range(2))
    images = EncoderInput(rows, cols, torch.cat([of_medium for of_sample in cells for of_medium in of_sample]))
    grids = [[MediumGrid([0], rows // MERGE, cols // MERGE) for rows, cols in _pictures(number)] for number in numbers]
    positions = [find_media_positions(ids[number].numpy(), (IMAGE_TOKEN,), grids[number]) for number in numbers]
    packed = torch.cat(ids)
    places = {"vision": (packed == IMAGE_TOKEN).nonzero().flatten()}
    position_ids = torch.from_numpy(np.concatenate(positions, axis=1))
    text = TextInput(tuple(map(len, ids)), packed, labels, places, position_ids)
    assert_equal_logits_and_loss(llm, text, {"vision": vision(None, images)}, expected)
    assert_equal_gradients(folder, theirs, full_gradients(vision) | full_gradients(llm))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": False}])
def test_import_and_export_give_the_same_bits(changes: dict[str, bool], tmp_path: Path) -> None:
    folder = save(glm4v_moe(**changes), tmp_path / "model", torch.bfloat16)
    assert content(export_again(folder, _recipe(folder))) == content(folder)


def test_the_config_of_the_hub_has_the_parameters_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig, Glm4vMoeForConditionalGeneration

    folder = write_config(tmp_path / "model", GLM_4_5V)
    recipe = recipe_from(folder, "data.seq_len=65536")
    vision, llm, data = recipe.model.vision, recipe.model.llm, recipe.data
    assert vision is not None
    assert (vision.ffn, vision.position_grid, vision.position_interpolation) == (4096, 24, "bicubic")
    assert (vision.projector.kind, vision.projector.ffn, vision.norm_eps) == ("merger", 10944, 1e-5)
    assert (llm.rope_sections, llm.rope_width, llm.qkv_bias, llm.qk_norm) == ((8, 12, 12), 64, True, False)
    assert (data.image.pixel_limits, data.image.max_pixels) == ("frames", 28 * 28 * 15000)
    assert (data.video.sampling, data.video.max_frames, data.video.pixel_limits) == ("seconds", 600, "video")
    with torch.device("meta"):
        theirs = Glm4vMoeForConditionalGeneration(AutoConfig.from_pretrained(folder))
    expected = {"vision": sum(parameter.numel() for parameter in theirs.model.visual.parameters())}
    of_all = sum(parameter.numel() for parameter in theirs.parameters())
    num_selection_biases = 45 * 128  # which are buffers there
    expected["llm"] = of_all - expected["vision"] + num_selection_biases
    parameters = {unit.name: sum(map(num_parameters, unit.layers)) for unit in build_model_shape(recipe).units}
    assert parameters == expected


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("vision_config", {"out_hidden_size": 2048}, "vision_config.out_hidden_size: 2048 is not supported yet"),
        ("vision_config", {"hidden_act": "gelu"}, "vision_config.hidden_act: "),
        ("vision_config", {"patch_size": [14, 14]}, "vision_config.patch_size: found"),
        ("text_config", {"use_qk_norm": True}, "text_config.use_qk_norm: true is not supported yet"),
        ("text_config", {"output_router_logits": True}, "text_config.output_router_logits: true is not supported yet"),
        ("text_config", {"rope_scaling": {"rope_type": "longrope"}}, 'rope_type: "longrope" is not supported yet'),
    ],
)
def test_what_is_not_supported_is_said(section: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {**GLM_4_5V, section: {**GLM_4_5V[section], **changes}}
    with pytest.raises(RecipeError, match=message):
        recipe_from(write_config(tmp_path / "model", config))
