"""Gemma 3 with pictures computes what `transformers` computes, and reads pictures and texts like its processor."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mmtrain.balance import assign
from mmtrain.checkpoint import open_newest_good
from mmtrain.data import BatchBuilder, PayloadNeed, build_index
from mmtrain.errors import RecipeError
from mmtrain.families import FAMILIES
from mmtrain.models.stage_inputs import EncoderInput, TextInput
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.weights import export_folder
from mmtrain.weights.tiny_model import write_tiny_model
from tests.families.configs import write_config
from tests.runtime.models import run_folder
from tests.weights.pretrained import IMAGE_SIDE, IMAGE_TOKEN, PATCH, VOCAB, gemma3, recipe_from, save, siglip
from tests.weights.test_export_weights import content
from tests.weights.test_import_weights import assert_equal_gradients, full_gradients, unit_stage
from tests.weights.test_llava import patches_of
from tests.weights.test_tiny_model import messages_of, tiny_recipe

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
    labels = [torch.where(sample == IMAGE_TOKEN, -100, sample)[1:] for sample in ids]
    labels = [torch.cat([of_sample, torch.tensor([-100])]) for of_sample in labels]
    images = [[pixels[0], pixels[1]], [], [pixels[2]]]
    expected = torch.cat([_logits(theirs, *sample) for sample in zip(ids, images, strict=True)])
    packed = torch.cat(ids)
    places = (packed == IMAGE_TOKEN).nonzero().flatten()
    spans = tuple((first, first + num_features) for first in places[::num_features].tolist())
    inputs = TextInput(tuple(map(len, ids)), packed, torch.cat(labels), {"vision": places}, image_spans=spans)
    sides = (IMAGE_SIDE,) * 3
    features = vision(None, EncoderInput(sides, sides, torch.cat([patches_of(picture) for picture in pixels])))
    with torch.no_grad():
        logits = llm.logits(None, inputs, {"vision": features})[:, :VOCAB]
    assert (logits - expected).abs().max() < 1e-4
    assert expected.std() > 0.1  # else the comparison would prove nothing

    loss = llm(None, inputs, {"vision": features})
    their_loss = torch.nn.functional.cross_entropy(expected, torch.cat(labels), reduction="sum")
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-5)
    loss.backward()
    their_loss.backward()
    assert_equal_gradients(folder, theirs, full_gradients(vision) | full_gradients(llm))


def test_image_spans_of_a_batch_are_the_types_of_tokens_of_the_processor(tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["gemma3"], folder, 3)
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
    run = run_folder(tmp_path / "run", recipe, {unit: unit_stage(recipe, unit) for unit in ("vision", "llm")})
    export_folder(recipe, open_newest_good(run / CHECKPOINTS_FOLDER, print), tmp_path / "out")
    assert content(tmp_path / "out") == content(folder)


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


def test_pan_and_scan_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["gemma3"], folder, 3)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_pan_and_scan": True}))
    with pytest.raises(RecipeError, match=r"do_pan_and_scan: true is not supported yet; .* Set it to false"):
        tiny_recipe(folder)
