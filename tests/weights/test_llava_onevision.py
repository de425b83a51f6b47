"""LLaVA-OneVision from a folder computes what `transformers` computes, with pictures and videos."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmtrain.data import build_index
from mmtrain.data.media.image_grids import Patches, item_grids
from mmtrain.data.media.joined_tiles import TileJoin, join_media
from mmtrain.data.media.vision_items import VisionItemDecoder
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.errors import RecipeError
from mmtrain.families import FAMILIES
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.recipe import Recipe
from mmtrain.weights.tiny_model import write_tiny_model
from tests.families.configs import write_config
from tests.pixels import normalized
from tests.weights.comparison import (
    assert_equal_gradients,
    assert_equal_logits_and_loss,
    content,
    export_again,
    full_gradients,
    labels_of,
    patches_of,
    unit_stage,
)
from tests.weights.onevision_processor import ComposedProcessor, feature_counter
from tests.weights.pretrained import (
    IMAGE_SIDE,
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    VOCAB,
    llava_onevision,
    recipe_from,
    save,
)
from tests.weights.test_llava_next import row_mix
from tests.weights.test_tiny_model import messages_of, tiny_recipe
from tests.weights.tiny_folders import FEW_CONVERSATIONS

# llava-onevision-qwen2-7b-ov-hf
HUB_CONFIG: dict[str, Any] = {
    "architectures": ["LlavaOnevisionForConditionalGeneration"], "model_type": "llava_onevision",
    "image_grid_pinpoints": [[384 * rows, 384 * cols] for rows in range(1, 7) for cols in range(1, 7)],
    "image_token_index": 151646, "video_token_index": 151647, "projector_hidden_act": "gelu",
    "tie_word_embeddings": False, "torch_dtype": "float16", "use_image_newline_parameter": True,
    "vision_aspect_ratio": "anyres_max_9", "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    "text_config": {
        "_name_or_path": "Qwen/Qwen2-7B-Instruct", "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_size": 3584, "intermediate_size": 18944, "max_window_layers": 28,
        "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "rope_theta": 1000000.0, "sliding_window": 131072, "torch_dtype": "bfloat16", "use_sliding_window": False,
        "vocab_size": 152000,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
HUB_IMAGES: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": True, "do_pad": True, "do_rescale": True, "do_resize": True,
    "image_grid_pinpoints": HUB_CONFIG["image_grid_pinpoints"], "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "LlavaOnevisionImageProcessor", "image_std": [0.5, 0.5, 0.5],
    "processor_class": "LlavaOnevisionProcessor", "resample": 3, "rescale_factor": 0.00392156862745098,
    "size": {"height": 384, "width": 384},
}  # fmt: skip
# Width and height of the pictures of each sample; None: a video of three frames.
SHOWN: list[list[tuple[int, int] | None]] = [[(60, 41), (17, 50)], [], [(90, 80)], [None, (40, 30)]]
NUM_FRAMES = 3


def _join(recipe: Recipe) -> TileJoin:
    assert recipe.model.vision is not None
    join = TileJoin.of(recipe.model.vision, recipe.data.image)
    assert join is not None
    return join


def _num_items(sizes: list[tuple[int, int] | None], recipe: Recipe) -> list[int]:
    assert recipe.model.vision is not None
    patch, num_images = recipe.model.vision.patch, len([size for size in sizes if size])
    return [
        NUM_FRAMES
        if size is None
        else 1
        if num_images > 1
        else len(item_grids(*size, recipe.data.image, Patches(patch)))
        for size in sizes
    ]


def _media_arguments(sizes: list[tuple[int, int] | None], tiles: list[Tensor]) -> dict[str, Tensor]:
    """Return what the processor passes to the model of a sample's media; there is one video at most."""
    arguments: dict[str, Tensor] = {}
    images = [size for size in sizes if size]
    if images:
        of_images = [of_medium for size, of_medium in zip(sizes, tiles, strict=True) if size]
        arguments["pixel_values"] = torch.stack(of_images)
        arguments["image_sizes"] = torch.tensor([size[::-1] for size in images])
        arguments["batch_num_images"] = torch.tensor([len(images)])
    for size, of_medium in zip(sizes, tiles, strict=True):
        if size is None:
            arguments["pixel_values_videos"] = of_medium[None]
    return arguments


def test_logits_loss_and_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    """Use two images, which are not cut, a text, an image whose features are shrunk, and a video beside an image."""
    theirs = llava_onevision()
    folder = save(theirs, tmp_path / "model")
    recipe = recipe_from(folder, "data.seq_len=512")
    join = _join(recipe)
    vision, llm = unit_stage(recipe, "vision"), unit_stage(recipe, "llm")
    generator = torch.Generator().manual_seed(7)
    side = recipe.data.image.tile
    ids, expected, tiles, sizes, num_items = [], [], [], [], []
    for of_sample in SHOWN:
        counts = _num_items(of_sample, recipe)
        pixels = [torch.randn(count, 3, side, side, generator=generator) for count in counts]
        parts = []
        for size, count in zip(of_sample, counts, strict=True):
            token = VIDEO_TOKEN if size is None else IMAGE_TOKEN
            parts += [torch.full((join.num_features(size, count),), token)]
            parts += [torch.randint(IMAGE_TOKEN + 1, VOCAB, (3,), generator=generator)]
        ids.append(torch.cat([torch.randint(IMAGE_TOKEN + 1, VOCAB, (4,), generator=generator), *parts]))
        expected.append(theirs(input_ids=ids[-1][None], **_media_arguments(of_sample, pixels)).logits[0])
        tiles += pixels
        sizes += of_sample
        num_items += counts
    assert num_items == [1, 1, 5, NUM_FRAMES, 5]
    packed = torch.cat(ids)
    places = (packed <= IMAGE_TOKEN).nonzero().flatten()
    mix = join_media(join, sizes, num_items)
    assert mix.rows.shape == (len(places), 4)
    inputs = TextInput(
        tuple(map(len, ids)),
        packed,
        labels_of(ids, IMAGE_TOKEN),
        {"vision": places},
        feature_mixes={"vision": row_mix(mix)},
    )
    sides = (IMAGE_SIDE,) * sum(num_items)
    cells = torch.cat([patches_of(tile[:, : IMAGE_SIDE * 4, : IMAGE_SIDE * 4]) for tile in torch.cat(tiles)])
    features = vision(None, EncoderInput(sides, sides, cells))
    assert_equal_logits_and_loss(llm, inputs, {"vision": features}, torch.cat(expected))
    assert_equal_gradients(folder, theirs, full_gradients(vision) | full_gradients(llm))


def test_import_and_export_give_the_same_bits(tmp_path: Path) -> None:
    folder = save(llava_onevision(), tmp_path / "model", torch.bfloat16)
    recipe = recipe_from(folder, "data.seq_len=512")
    assert content(export_again(folder, recipe)) == content(folder)


def test_tokens_from_headers_are_those_of_the_processor(tmp_path: Path) -> None:
    import transformers

    folder = write_config(tmp_path / "model", HUB_CONFIG)
    (folder / "preprocessor_config.json").write_text(json.dumps(HUB_IMAGES))
    recipe = recipe_from(folder, "data.seq_len=16384")
    join = _join(recipe)
    counter = feature_counter(transformers.LlavaOnevisionImageProcessorPil(**HUB_IMAGES), 729, "anyres_max_9")
    rng = np.random.default_rng(5)
    random_sizes = [(int(w), int(h)) for w, h in np.exp(rng.uniform(0, np.log(9000), (1000, 2)))]
    num_shrunk = 0
    for width, height in [*random_sizes, (1, 9000), (9000, 1), (384, 384), (2304, 2304), (1, 1)]:
        num_items = len(item_grids(width, height, recipe.data.image, Patches(14)))
        expected = counter._get_number_of_features(height, width, 384, 384)
        assert join.num_features((width, height), num_items) == expected, (width, height)
        mix = join.features((width, height), num_items)
        assert mix.rows.shape == mix.weights.shape
        assert len(mix.rows) == expected
        num_shrunk += mix.rows.shape[1] == 4
        np.testing.assert_allclose(mix.weights.sum(axis=1), 1, atol=1e-5)
    assert num_shrunk > 20
    video = torch.zeros(5, 3, 384, 384)
    text = counter.replace_video_token({"pixel_values_videos": [video]}, 0)
    assert join.num_features(None, 5) == text.count("<video>") == len(join.features(None, 5).rows)


def test_conversations_and_pixels_are_what_the_processor_makes_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["llava_onevision"], folder, 3, num_train=FEW_CONVERSATIONS)
    recipe = tiny_recipe(folder)
    assert recipe.model.vision is not None
    assert (recipe.data.image.tile, recipe.data.image.tile_several) == (32, False)
    processor = ComposedProcessor(folder)
    decoder = VisionItemDecoder(recipe.data.image, recipe.model.vision.patch)
    index, ours = build_index(recipe), load_tokenizer(recipe.data.tokenizer_path)
    num_items = set()
    for number, row in enumerate(json.loads((folder / "conversations" / "heldout.json").read_text())[:40]):
        sample = index.samples[number]
        expected = processor(messages_of(row, folder / "conversations"))
        assert ours.encode(sample, index.media_features(number)).ids.tolist() == expected["input_ids"][0].tolist()
        for media, tiles in zip(sample.media["image"], expected.get("pixel_values", ()), strict=True):
            num_items.add(len(tiles))
            for part, of_tile in enumerate(tiles):
                patches = normalized(decoder.patches("image", media, part, len(tiles), (4, 4)), recipe.data.image)
                np.testing.assert_allclose(patches, patches_of(of_tile, 8), atol=1e-4)
    assert len(num_items) > 1
    assert 1 in num_items


def test_the_config_of_the_hub_is_that_of_the_paper(tmp_path: Path) -> None:
    recipe = recipe_from(write_config(tmp_path / "llava-onevision", HUB_CONFIG), "data.seq_len=16384")
    vision, llm, image = recipe.model.vision, recipe.model.llm, recipe.data.image
    assert vision is not None
    assert (vision.layers, vision.hidden, vision.max_side) == (26, 1152, 27)
    assert (vision.join_tiles, vision.max_joined_tiles, vision.pool_frames) == (True, 9, True)
    assert (llm.layers, llm.hidden, llm.kv_heads, llm.vocab) == (28, 3584, 4, 152000)
    assert (image.scheme, image.tile, image.tile_several, len(image.pinpoints)) == ("pinpoints", 384, False, 36)


def test_other_models_are_rejected_by_the_key(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from(write_config(tmp_path / "model", HUB_CONFIG, vision_aspect_ratio="square"), "data.seq_len=16384")
    assert "vision_aspect_ratio: 'square' is not supported yet; supported: anyres_max_9 and alike" in str(caught.value)
