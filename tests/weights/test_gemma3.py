"""Gemma 3 with pictures computes what `transformers` computes, and reads pictures and texts like its processor."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mmtrain.balance import assign
from mmtrain.data import BatchBuilder, PayloadNeed, build_index
from mmtrain.errors import RecipeError
from mmtrain.families import FAMILIES
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.weights.tiny_model import write_tiny_model
from tests.families.configs import write_config
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
from tests.weights.pretrained import IMAGE_SIDE, IMAGE_TOKEN, PATCH, VOCAB, gemma3, recipe_from, save, siglip
from tests.weights.test_tiny_model import messages_of, tiny_recipe
from tests.weights.tiny_folders import FEW_CONVERSATIONS

# As on the hub; sections hold what differs from the defaults.
HUB_CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip


def _logits(theirs: nn.Module, ids: Tensor, images: list[Tensor]) -> Tensor:
    """Return what `transformers` computes, with the types of tokens that its processor states."""
    pixels = {"pixel_values": torch.stack(images)} if images else {}
    types = (ids == IMAGE_TOKEN).long()[None]
    logits: Tensor = theirs(input_ids=ids[None], token_type_ids=types, **pixels).logits[0]
    return logits


@pytest.mark.parametrize(
    ("window", "num_features", "text"),
    [
        (16, 4, {}),
        (3, 4, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),  # narrower than an image
        (9, 16, {"num_key_value_heads": 1}),
    ],
)
def test_logits_loss_and_gradients_equal_those_of_transformers(
    window: int, num_features: int, text: dict[str, Any], tmp_path: Path
) -> None:
    """Use two images and a text before, between and behind them, a text, and an image of which an answer begins."""
    theirs = gemma3(window, num_features, **text)
    folder = save(theirs, tmp_path / "model")
    recipe = recipe_from(folder)
    vision, llm = unit_stage(recipe, "vision"), unit_stage(recipe, "llm")
    generator = torch.Generator().manual_seed(7)
    image = torch.full((num_features,), IMAGE_TOKEN)

    def words(count: int) -> Tensor:
        return torch.randint(IMAGE_TOKEN + 1, VOCAB, (count,), generator=generator)

    ids = [torch.cat([words(3), image, words(2), image, words(6)]), words(9), torch.cat([image, words(4)])]
    pixels = torch.randn(3, 3, IMAGE_SIDE * PATCH, IMAGE_SIDE * PATCH, generator=generator)
    labels = labels_of(ids, IMAGE_TOKEN)
    images = [[pixels[0], pixels[1]], [], [pixels[2]]]
    expected = torch.cat([_logits(theirs, *sample) for sample in zip(ids, images, strict=True)])
    packed = torch.cat(ids)
    places = (packed == IMAGE_TOKEN).nonzero().flatten()
    spans = tuple((first, first + num_features) for first in places[::num_features].tolist())
    inputs = TextInput(tuple(map(len, ids)), packed, labels, {"vision": places}, image_spans=spans)
    sides = (IMAGE_SIDE,) * 3
    features = vision(None, EncoderInput(sides, sides, torch.cat([patches_of(picture) for picture in pixels])))
    assert_equal_logits_and_loss(llm, inputs, {"vision": features}, expected)
    assert_equal_gradients(folder, theirs, full_gradients(vision) | full_gradients(llm))


def test_image_spans_of_a_batch_are_the_types_of_tokens_of_the_processor(tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["gemma3"], folder, 3, num_train=FEW_CONVERSATIONS)
    recipe = tiny_recipe(folder)
    index, once = build_index(recipe), {"vision": 1, "llm": 1}
    meta = assign(0, 0, [np.arange(12)], index.lengths, once, once)
    text = BatchBuilder(index, recipe, (PayloadNeed("llm", 0, image_spans=("vision",)),), once).build(meta).text[0, 0]
    assert text.ids is None
    processor = transformers.AutoProcessor.from_pretrained(folder)
    rows = json.loads((folder / "conversations" / "heldout.json").read_text())
    expected = []
    for number in meta.sample_id[meta.microbatch(0, 0)]:
        messages = messages_of(rows[number], folder / "conversations")
        outputs = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="np")
        expected += outputs["token_type_ids"][0].tolist()
    types = np.zeros(sum(text.lengths), dtype=np.int64)
    for start, stop in text.image_spans:
        types[start:stop] = 1
    assert types.tolist() == expected
    assert len(text.image_spans) == len(index.lengths.items["vision"].rows[: index.lengths.items["vision"].first[12]])
    assert len(text.image_spans) > 8


@pytest.mark.parametrize("has_head", [True, False])
def test_import_and_export_give_the_same_bits(has_head: bool, tmp_path: Path) -> None:
    tower = siglip(image_size=IMAGE_SIDE * PATCH, vision_use_head=has_head)
    folder = save(gemma3(tower=tower), tmp_path / "model", torch.bfloat16)
    recipe = recipe_from(folder)
    assert content(export_again(folder, recipe)) == content(folder)


def test_the_config_of_the_hub_is_read(tmp_path: Path) -> None:
    recipe = recipe_from(write_config(tmp_path / "model", HUB_CONFIG), "data.seq_len=512")
    vision, llm, image = recipe.model.vision, recipe.model.llm, recipe.data.image
    assert vision is not None
    assert (vision.layers, vision.patch, vision.max_side, vision.merge) == (27, 14, 64, 4)
    assert (vision.downsample, vision.post_norm, vision.projector.kind) == ("average_pool", True, "linear")
    assert (llm.layers, llm.window, llm.rope_base, llm.window_rope_base) == (34, 1024, 1e6, 1e4)
    assert (llm.image_attention, llm.tie_embeddings, llm.vocab) == ("bidirectional", True, 262208)
    assert (image.scheme, image.size, image.fit, image.resample) == ("fixed", 896, "stretch", "bilinear")


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        (None, "mm_tokens_per_image", 200, "mm_tokens_per_image: 200 is not supported yet; supported: squares"),
        (None, "mm_tokens_per_image", 2500, "squares of divisors of 64"),
        ("text_config", "attn_logit_softcapping", 50.0, "text_config.attn_logit_softcapping: 50.0 is not supported"),
        ("vision_config", "model_type", "clip_vision_model", "vision_config.model_type: .* supported: .siglip_vision"),
    ],
)
def test_what_is_not_supported_is_an_error(
    section: str | None, key: str, value: object, message: str, tmp_path: Path
) -> None:
    config = {**HUB_CONFIG, section: {**HUB_CONFIG[section], key: value}} if section else {**HUB_CONFIG, key: value}
    with pytest.raises(RecipeError, match=message):
        recipe_from(write_config(tmp_path / "model", config))


def test_a_folder_does_not_turn_on_pan_and_scan(tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["gemma3"], folder, 3, num_train=FEW_CONVERSATIONS)
    path = folder / "preprocessor_config.json"
    whole = tiny_recipe(folder).data.image
    pan_and_scan = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
    path.write_text(json.dumps({**json.loads(path.read_text()), **pan_and_scan}))
    assert tiny_recipe(folder).data.image == whole
    processor = transformers.AutoProcessor.from_pretrained(folder)
    wide = np.zeros((64, 512, 3), dtype=np.uint8)
    pixels = processor(text=processor.boi_token, images=[wide])["pixel_values"]
    assert np.shape(pixels) == (1, 3, whole.size, whole.size)
    asked = processor(text=processor.boi_token, images=[wide], images_kwargs=pan_and_scan)["pixel_values"]
    assert len(asked) > 1, "only a call turns it on"
