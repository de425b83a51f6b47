"""LLaVA-NeXT from a folder computes what `transformers` computes, and reads pictures and texts like its processor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmtrain.data import build_index
from mmtrain.data.media.image_grids import Patches, item_grids
from mmtrain.data.media.joined_tiles import FeatureMix, TileJoin, join_media
from mmtrain.data.media.vision_items import VisionItemDecoder, read_vision_items
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.errors import RecipeError
from mmtrain.families import FAMILIES
from mmtrain.models.stage.stage_inputs import EncoderInput, RowMix, TextInput
from mmtrain.weights.tiny_model import write_tiny_model
from tests.families.configs import write_config
from tests.pixels import assert_same_pixels, normalized
from tests.weights.comparison import (
    assert_equal_gradients,
    assert_equal_logits_and_loss,
    content,
    export_again,
    full_gradients,
    labels_of,
    patches_of,
    rename_tensors,
    unit_stage,
)
from tests.weights.pretrained import IMAGE_SIDE, IMAGE_TOKEN, VOCAB, llava_next, recipe_from, save, siglip
from tests.weights.test_tiny_model import messages_of, tiny_recipe
from tests.weights.tiny_folders import FEW_CONVERSATIONS

# llava-v1.6-mistral-7b-hf
HUB_CONFIG: dict[str, Any] = {
    "architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next", "ignore_index": -100,
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "image_token_index": 32000, "projector_hidden_act": "gelu", "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.39.0.dev0", "use_image_newline_parameter": True,
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vocab_size": 32064,
    "text_config": {
        "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2", "architectures": ["MistralForCausalLM"],
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "torch_dtype": "bfloat16", "vocab_size": 32064,
    },
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        "vocab_size": 32000,
    },
}  # fmt: skip
HUB_IMAGES: dict[str, Any] = {
    "aspect_ratio_setting": "anyres", "crop_size": {"height": 336, "width": 336}, "do_center_crop": True,
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_grid_pinpoints": HUB_CONFIG["image_grid_pinpoints"],
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_processor_type": "LlavaNextImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711], "processor_class": "LlavaNextProcessor", "resample": 3,
    "rescale_factor": 0.00392156862745098, "size": {"shortest_edge": 336},
}  # fmt: skip


def row_mix(mix: FeatureMix) -> RowMix:
    return RowMix(torch.from_numpy(mix.rows), torch.from_numpy(mix.weights))


@pytest.mark.parametrize(
    ("text", "tower", "strategy"), [("mistral", None, "default"), ("llama", siglip, "full"), ("qwen2", None, "default")]
)
def test_logits_loss_and_gradients_equal_those_of_transformers(
    text: str, tower: Callable[[], Any] | None, strategy: str, tmp_path: Path
) -> None:
    """Use two wide images, a text, and a high one: their borders are of different widths."""
    theirs = llava_next(text, tower and tower(), strategy)
    folder = save(theirs, tmp_path / "model")
    recipe = recipe_from(folder, "data.seq_len=512")
    vision, llm = unit_stage(recipe, "vision"), unit_stage(recipe, "llm")
    assert recipe.model.vision is not None
    join = TileJoin.of(recipe.model.vision, recipe.data.image)
    assert join is not None
    generator = torch.Generator().manual_seed(7)

    def words(count: int) -> Tensor:
        return torch.randint(IMAGE_TOKEN + 1, VOCAB, (count,), generator=generator)

    sizes = [(40, 30), (90, 29), (17, 50)]
    num_tiles = [len(item_grids(*size, recipe.data.image, Patches(recipe.model.vision.patch))) for size in sizes]
    assert num_tiles == [5, 4, 4]
    images = [torch.full((join.num_features(size, n),), IMAGE_TOKEN) for size, n in zip(sizes, num_tiles, strict=True)]
    side = recipe.data.image.tile
    tiles = [torch.randn(n, 3, side, side, generator=generator) for n in num_tiles]
    ids = [torch.cat([words(3), images[0], words(2), images[1], words(6)]), words(9), torch.cat([images[2], words(4)])]
    labels = labels_of(ids, IMAGE_TOKEN)
    batch = torch.zeros(2, 5, 3, side, side)  # padded as by the processor
    batch[0], batch[1, :4] = tiles[0], tiles[1]
    heights_and_widths = torch.tensor([size[::-1] for size in sizes])
    expected = torch.cat(
        [
            theirs(input_ids=ids[0][None], pixel_values=batch, image_sizes=heights_and_widths[:2]).logits[0],
            theirs(input_ids=ids[1][None]).logits[0],
            theirs(input_ids=ids[2][None], pixel_values=tiles[2][None], image_sizes=heights_and_widths[2:]).logits[0],
        ]
    )
    packed = torch.cat(ids)
    places = (packed == IMAGE_TOKEN).nonzero().flatten()
    mixes = {"vision": row_mix(join_media(join, sizes, num_tiles))}
    inputs = TextInput(tuple(map(len, ids)), packed, labels, {"vision": places}, feature_mixes=mixes)
    sides = (IMAGE_SIDE,) * sum(num_tiles)
    cells = torch.cat([patches_of(tile) for tile in torch.cat(tiles)])
    features = vision(None, EncoderInput(sides, sides, cells))
    assert len(features) == sum(num_tiles) * join.rows_per_item
    assert_equal_logits_and_loss(llm, inputs, {"vision": features}, expected)
    gradients = full_gradients(vision) | full_gradients(llm)
    assert gradients[f"vision.layers.{recipe.model.vision.layers + 1}.newline"].abs().max() > 0
    assert_equal_gradients(folder, theirs, gradients)


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
            "image_newline": "model.image_newline",
        },
    ],
)
def test_import_and_export_give_the_same_bits_in_every_spelling(spelling: dict[str, str], tmp_path: Path) -> None:
    folder = save(llava_next(), tmp_path / "model", torch.bfloat16)
    rename_tensors(folder, spelling)
    recipe = recipe_from(folder, "data.seq_len=512")
    assert content(export_again(folder, recipe)) == content(folder)


def test_conversations_and_pixels_are_what_the_processor_makes_of_them(tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["llava_next"], folder, 3, num_train=FEW_CONVERSATIONS)
    recipe = tiny_recipe(folder)
    assert recipe.model.vision is not None
    assert (recipe.data.image.scheme, recipe.data.image.tile) == ("pinpoints", 32)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    decoder = VisionItemDecoder(recipe.data.image, recipe.model.vision.patch)
    index, ours = build_index(recipe), load_tokenizer(recipe.data.tokenizer_path)
    num_pictures = 0
    for number, row in enumerate(json.loads((folder / "conversations" / "heldout.json").read_text())[:20]):
        sample = index.samples[number]
        messages = messages_of(row, folder / "conversations")
        expected = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="np")
        ids = ours.encode(sample, index.media_features(number)).ids
        assert ids.tolist() == expected["input_ids"][0].tolist()
        for media, tiles in zip(sample.media["image"], expected.get("pixel_values", ()), strict=True):
            num_pictures += 1
            grids = read_vision_items("image", media, recipe.data.image, recipe.data.video, recipe.model.vision).grids
            num_tiles = len(grids)
            for part, theirs in enumerate(tiles[:num_tiles]):
                patches = normalized(decoder.patches("image", media, part, num_tiles, (4, 4)), recipe.data.image)
                assert_same_pixels(patches, patches_of(torch.from_numpy(theirs), 8))
    assert num_pictures > 10


def test_tokens_from_headers_are_those_of_the_processor(tmp_path: Path) -> None:
    import transformers
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    folder = write_config(tmp_path / "model", HUB_CONFIG)
    (folder / "preprocessor_config.json").write_text(json.dumps(HUB_IMAGES))
    recipe = recipe_from(folder, "data.seq_len=8192")
    assert recipe.model.vision is not None
    join = TileJoin.of(recipe.model.vision, recipe.data.image)
    assert join is not None
    counter = LlavaNextProcessor.__new__(LlavaNextProcessor)  # without a tokenizer
    counter.image_processor = transformers.LlavaNextImageProcessorPil(**HUB_IMAGES)
    counter.patch_size, counter.num_additional_image_tokens = 14, 1
    rng = np.random.default_rng(5)
    random_sizes = [(int(w), int(h)) for w, h in np.exp(rng.uniform(0, np.log(9000), (1000, 2)))]
    for width, height in [*random_sizes, (1, 9000), (9000, 1), (336, 336), (672, 672), (1, 1)]:
        num_items = len(item_grids(width, height, recipe.data.image, Patches(14)))
        expected = counter._get_number_of_features(height, width, 336, 336) - 1
        assert join.num_features((width, height), num_items) == expected, (width, height)
        rows = join.features((width, height), num_items).rows
        assert len(rows) == expected
        assert rows.max() < num_items * join.rows_per_item


def test_the_config_of_the_hub_is_that_of_the_paper(tmp_path: Path) -> None:
    recipe = recipe_from(write_config(tmp_path / "llava-v1.6-mistral-7b-hf", HUB_CONFIG), "data.seq_len=4096")
    vision, llm, image = recipe.model.vision, recipe.model.llm, recipe.data.image
    assert vision is not None
    assert (vision.layers, vision.hidden, vision.max_side, vision.join_tiles) == (23, 1024, 24, True)
    assert (llm.layers, llm.hidden, llm.kv_heads, llm.vocab) == (32, 4096, 8, 32064)
    assert (image.scheme, image.tile) == ("pinpoints", 336)
    assert image.pinpoints == tuple(map(tuple, HUB_CONFIG["image_grid_pinpoints"]))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"vision_feature_select_strategy": "full"}, 'vision_feature_select_strategy: "full" is not supported'),
        ({"image_grid_pinpoints": [[336]]}, "image_grid_pinpoints: allowed: a list of [height, width] in pixels"),
        ({"image_grid_pinpoints": [[336, 500]]}, "pinpoints holds [336, 500]; allowed: multiples of tile 336"),
        ({"use_image_newline_parameter": False}, "use_image_newline_parameter: false is not supported yet"),
    ],
)
def test_other_models_are_rejected_by_the_key(changes: dict[str, object], text: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from(write_config(tmp_path / "model", HUB_CONFIG, **changes), "data.seq_len=4096")
    assert text in str(caught.value)


def test_a_recipe_whose_pictures_are_not_cut_cannot_join_them(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", HUB_CONFIG)
    with pytest.raises(RecipeError) as caught:
        recipe_from(folder, "data.seq_len=4096", "data.image.scheme=fixed", "data.image.size=336")
    assert "model.vision.join_tiles: is set; allowed with data.image.scheme pinpoints, found fixed" in str(caught.value)
    with pytest.raises(RecipeError) as caught:
        recipe_from(folder, "data.seq_len=2900")
    assert "one image becomes up to 2928 LLM tokens, data.seq_len is 2900" in str(caught.value)
