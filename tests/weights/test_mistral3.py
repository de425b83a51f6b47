"""Mistral 3 from a folder computes what `transformers` computes, and reads pictures and texts like its processor."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmtrain.costs import num_parameters
from mmtrain.data import build_index
from mmtrain.data.media.vision_items import VisionItemDecoder
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.errors import DataError, RecipeError
from mmtrain.families import FAMILIES
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.weights.inspect_folder import inspect_folder
from mmtrain.weights.tiny_model import write_tiny_model
from tests.families.configs import write_config
from tests.pixels import normalized
from tests.plans import plan_recipe
from tests.weights.comparison import (
    assert_encoded_as_by_processor,
    assert_equal_gradients,
    assert_equal_logits_and_loss,
    content,
    export_again,
    full_gradients,
    labels_of,
    patches_of,
    unit_stage,
)
from tests.weights.pixtral_processor import open_processor
from tests.weights.pretrained import (
    BREAK_TOKEN,
    END_TOKEN,
    IMAGE_TOKEN,
    PATCH,
    VOCAB,
    mistral3,
    recipe_from,
    save,
)
from tests.weights.test_tiny_model import messages_of, tiny_recipe
from tests.weights.tiny_folders import FEW_CONVERSATIONS, write_other_shapes

# As on the hub: Mistral-Small-3.1-24B-Instruct-2503, and Ministral-3-8B-Instruct-2512 in bf16.
SMALL_3_1: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
    "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "vision_feature_layer": -1,
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "intermediate_size": 32768, "max_position_embeddings": 131072,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True,
        "vocab_size": 131072,
    },
    "vision_config": {
        "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
        "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16,
        "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0,
    },
}  # fmt: skip
MINISTRAL_3: dict[str, Any] = {
    **SMALL_3_1, "dtype": "bfloat16", "transformers_version": "5.0.0.dev0", "tie_word_embeddings": False,
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 262144,
        "model_type": "ministral3", "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "sliding_window": None, "use_cache": True, "vocab_size": 131072,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
            "rope_type": "yarn", "type": "yarn",
        },
    },
    "vision_config": {
        **SMALL_3_1["vision_config"], "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}  # fmt: skip
WHATIF_LENGTHS = Path(__file__).parents[2] / "recipes/whatif/lengths/one_image_768.csv"
SHOWN = [[(4, 6), (2, 2)], [], [(8, 2)], [(2, 8), (6, 6)]]  # rows and columns of patches, of the pictures of samples


def _ids(number: int, merge: int) -> Tensor:
    """Return the ids of a sample, with a token behind each row of features."""
    generator = torch.Generator().manual_seed(number)

    def words(count: int) -> Tensor:
        return torch.randint(IMAGE_TOKEN + 1, VOCAB, (count,), generator=generator)

    parts = [words(3)]
    for rows, cols in SHOWN[number]:
        row = torch.tensor([IMAGE_TOKEN] * (cols // merge) + [BREAK_TOKEN])
        of_picture = row.repeat(rows // merge)
        of_picture[-1] = END_TOKEN
        parts += [of_picture, words(2)]
    return torch.cat([*parts, words(9)])


def _their_media(pictures: list[Tensor]) -> dict[str, Tensor]:
    """Return pictures padded to one shape, and their sizes."""
    if not pictures:
        return {}
    sizes = torch.tensor([picture.shape[1:] for picture in pictures])
    padded = torch.zeros(len(pictures), 3, *sizes.amax(dim=0).tolist())
    for place, picture in zip(padded, pictures, strict=True):
        place[:, : picture.shape[1], : picture.shape[2]] = picture
    return {"pixel_values": padded, "image_sizes": sizes}


@pytest.mark.parametrize(
    ("text", "merge", "changes"),
    [
        ("ministral3", 2, {}),
        ("ministral3", 1, {"multimodal_projector_bias": True, "projector_hidden_act": "gelu_pytorch_tanh"}),
        ("mistral", 2, {"tie_word_embeddings": True}),
    ],
)
def test_logits_loss_and_gradients_equal_those_of_transformers(
    text: str, merge: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    theirs = mistral3(text, merge, **changes)
    folder = save(theirs, tmp_path / "model")
    recipe = recipe_from(folder, "data.seq_len=2048")
    vision, llm = unit_stage(recipe, "vision"), unit_stage(recipe, "llm")
    generator = torch.Generator().manual_seed(7)
    pictures = [[torch.randn(3, rows * PATCH, cols * PATCH, generator=generator) for rows, cols in s] for s in SHOWN]
    ids = [_ids(number, merge) for number in range(len(SHOWN))]
    assert max(map(len, ids)) > 20, "queries grow from the fifth token on"
    expected = torch.cat(
        [
            theirs(input_ids=of_sample[None], **_their_media(shown)).logits[0]
            for of_sample, shown in zip(ids, pictures, strict=True)
        ]
    )
    packed = torch.cat(ids)
    places = {"vision": (packed == IMAGE_TOKEN).nonzero().flatten()}
    inputs = TextInput(tuple(map(len, ids)), packed, labels_of(ids, IMAGE_TOKEN), places)
    of_all = [picture for shown in pictures for picture in shown]
    rows, cols = (tuple(grid[axis] for shown in SHOWN for grid in shown) for axis in range(2))
    features = vision(None, EncoderInput(rows, cols, torch.cat([patches_of(picture) for picture in of_all])))
    assert_equal_logits_and_loss(llm, inputs, {"vision": features}, expected)
    assert_equal_gradients(folder, theirs, full_gradients(vision) | full_gradients(llm))


@pytest.mark.parametrize("changes", [{}, {"multimodal_projector_bias": True, "tie_word_embeddings": True}])
def test_import_and_export_give_the_same_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = save(mistral3(**changes), tmp_path / "model", torch.bfloat16)
    recipe = recipe_from(folder, "data.seq_len=2048")
    assert content(export_again(folder, recipe)) == content(folder)


def test_conversations_are_what_the_processor_makes_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["mistral3"], folder, 3, num_train=FEW_CONVERSATIONS)
    recipe = tiny_recipe(folder)
    assert recipe.model.vision is not None
    processor, ours = open_processor(folder), load_tokenizer(recipe.data.tokenizer_path)
    decoder = VisionItemDecoder(recipe.data.image, recipe.model.vision.patch)
    index, conversations = build_index(recipe), folder / "conversations"
    write_other_shapes(conversations)
    index = build_index(recipe)
    rows = json.loads((conversations / "heldout.json").read_text())[:40]
    shapes = set()
    count = ours.length_counter(10_000)
    for number, row in enumerate(rows):
        sample, messages = index.samples[number], messages_of(row, conversations)
        expected = assert_encoded_as_by_processor(processor, messages, ours, count, index, number)
        for i, media in enumerate(sample.media["image"]):
            height, width = (int(side) for side in expected["image_sizes"][i])
            picture = torch.from_numpy(np.asarray(expected["pixel_values"][i]))[:, :height, :width]
            patches = normalized(decoder.patches("image", media, 0, 1, (height // 8, width // 8)), recipe.data.image)
            assert np.abs(patches - patches_of(picture, 8).numpy()).max() <= 1e-4
            shapes.add((height, width))
    assert len(shapes) > 5


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return one conversation of two."""
    pictures = [*first.get("image", ()), *second.get("image", ())]
    turns = [*first["conversations"], *second["conversations"]]
    return {"id": first["id"], "conversations": turns, **({"image": pictures} if pictures else {})}


def test_a_picture_that_is_cut_off_is_left_out_as_a_whole(tmp_path: Path) -> None:
    """With all of its rows, and what stands between them."""
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["mistral3"], folder, 3, num_train=FEW_CONVERSATIONS)
    path = folder / "conversations" / "heldout.json"
    rows = json.loads(path.read_text())
    path.write_text(json.dumps([_joined(*pair) for pair in zip(rows[::2], rows[1::2], strict=True)]))
    whole = tiny_recipe(folder)
    cut = tiny_recipe(folder, "data.max_sample_tokens=60", "data.too_long=cut", "data.max_bad_rate=1")
    tokenizer = load_tokenizer(whole.data.tokenizer_path)
    before, after = build_index(whole), build_index(cut)
    assert len(after.samples) > 10
    by_name = {str(sample): number for number, sample in enumerate(before.samples)}
    num_cut = 0
    for number, sample in enumerate(after.samples):
        original = by_name[str(sample)]
        features = before.media_features(original, rows_apart=True)
        ids = tokenizer.encode(before.samples[original], features).ids
        num_tokens = int(after.lengths.tokens[number])
        num_cut += num_tokens < len(ids)
        assert after.media_features(number, rows_apart=True) == features
        shown = np.isin(ids[:num_tokens], tokenizer.item_ids["vision"]).sum()
        assert shown == sum(after.unit_features(number, "vision"))
    assert num_cut > 5


@pytest.mark.parametrize(
    ("config", "text"),
    [(SMALL_3_1, {"rope_base": 1e9}), (MINISTRAL_3, {"rope_base": 1e6, "query_growth": 0.1})],
    ids=["Mistral Small 3.1", "Ministral 3"],
)
def test_the_config_of_the_hub_has_the_parameters_of_transformers(
    config: dict[str, Any], text: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig, Mistral3ForConditionalGeneration

    folder = write_config(tmp_path / "model", config)
    recipe = recipe_from(folder, "data.seq_len=8192")
    vision, llm, image = recipe.model.vision, recipe.model.llm, recipe.data.image
    assert vision is not None
    assert (vision.layers, vision.patch, vision.merge, vision.activation) == (24, 14, 2, "silu")
    assert (vision.rotary_frequencies, vision.downsample) == ("alternating", "linear")
    assert (image.scheme, image.pixel_limits, image.max_pixels) == ("native", "sides", 1540**2)
    assert {name: getattr(llm, name) for name in text} == text
    if llm.rope_scaling is not None:
        assert (llm.rope_scaling.kind, llm.rope_scaling.amplitude) == ("yarn", 1.0)
    with torch.device("meta"):
        theirs = Mistral3ForConditionalGeneration(AutoConfig.from_pretrained(folder))
    parts = (theirs.model.vision_tower, theirs.model.multi_modal_projector)
    expected = {"vision": sum(parameter.numel() for part in parts for parameter in part.parameters())}
    expected["llm"] = sum(parameter.numel() for parameter in theirs.parameters()) - expected["vision"]
    shape = build_model_shape(recipe)
    assert {unit.name: sum(map(num_parameters, unit.layers)) for unit in shape.units} | (
        {"llm": expected["llm"]} if llm.tie_embeddings else {}
    ) == expected


PROCESSOR: dict[str, Any] = {  # of Mistral Small 3.1 on the hub
    "crop_size": None, "data_format": "channels_first", "default_to_square": True, "device": None,
    "do_center_crop": None, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_processor_type": "PixtralImageProcessorFast",
    "image_std": [0.26862954, 0.26130258, 0.27577711], "input_data_format": None, "patch_size": 14,
    "processor_class": "PixtralProcessor", "resample": 3, "rescale_factor": 0.00392156862745098,
    "return_tensors": None, "size": {"longest_edge": 1024},
}  # fmt: skip
OF_TEXT = {
    "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "image_token": "[IMG]", "patch_size": 14,
    "processor_class": "PixtralProcessor", "spatial_merge_size": 2,
}  # fmt: skip


@pytest.mark.parametrize("is_joint", [False, True])
def test_the_processor_of_the_hub_is_read(is_joint: bool, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", SMALL_3_1)
    joint = {**OF_TEXT, "image_processor": {**PROCESSOR, "patch_size": {"height": 14, "width": 14}}}
    (folder / "processor_config.json").write_text(json.dumps(joint if is_joint else OF_TEXT))
    if not is_joint:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    image = recipe_from(folder, "data.seq_len=8192").data.image
    assert (image.pixel_limits, image.max_pixels, image.resample, image.decode) == ("sides", 1024**2, "bicubic", "full")


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL_3_1, MINISTRAL_3], ids=["Mistral Small 3.1", "Ministral 3"])
def test_the_config_alone_is_planned(config: dict[str, Any], tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", config)
    assert {unit.name for unit in inspect_folder(folder).units} == {"vision", "llm"}
    source = f"data.sources=[{{path: {WHATIF_LENGTHS}}}]"
    recipe = recipe_from(folder, source, "data.seq_len=8192", "train.precision=bf16", "parallel.placement=colocated")
    lengths = build_index(recipe).lengths
    plan = plan_recipe(recipe, lengths, world_size=32, hardware="h100-80g", recipe_sha256="")
    assert plan.world_size == 32
    assert plan.predicted.step_time_s > 0


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        (None, {"vision_feature_layer": [-2, -1]}, "vision_feature_layer: .* is not supported yet; supported: -1"),
        (None, {"text_config": None}, "text_config: missing; allowed: the section of a model"),
        (None, {"projector_hidden_act": "relu"}, 'projector_hidden_act: "relu" is not supported yet'),
        ("vision_config", {"model_type": "siglip_vision_model"}, "vision_config.model_type: .* supported: .pixtral"),
        ("vision_config", {"head_dim": 32}, "vision_config.head_dim: 32 is not supported yet; supported: 64"),
        ("vision_config", {"rope_theta": 5e5}, "vision_config.rope_theta: 500000.0 is not supported yet"),
        ("text_config", {"model_type": "mistral4"}, "text_config.model_type: 'mistral4' is not supported yet"),
        (
            "text_config",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            "rope_parameters.llama_4_scaling_beta: found null, allowed: a number above 0",
        ),
        (
            "text_config",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "rope_parameters.rope_type: it is not supported yet that queries grow beside it; supported: yarn",
        ),
    ],
)
def test_what_is_not_supported_is_said(
    section: str | None, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    inner = MINISTRAL_3[section] if section else {}
    config = {**MINISTRAL_3, **({section: {**inner, **changes}} if section else changes)}
    with pytest.raises(RecipeError, match=message):
        recipe_from(write_config(tmp_path / "model", config))


def test_a_decoder_without_rotary_settings_has_those_of_its_class(tmp_path: Path) -> None:
    text = {key: value for key, value in MINISTRAL_3["text_config"].items() if key != "rope_parameters"}
    stated = recipe_from(write_config(tmp_path / "stated", MINISTRAL_3), "data.seq_len=8192").model.llm
    assumed = recipe_from(write_config(tmp_path / "assumed", MINISTRAL_3, text_config=text), "data.seq_len=8192")
    assert assumed.model.llm == stated


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.encoders={fine: {modality: vision, layers: 1, hidden: 32, heads: 2, ffn: 32, patch: 16}}"],
            r"model: vision and fine read images, but .* writes each row .* allowed: one vision encoder",
        ),
        (
            ["data.image.scheme=tiles", "data.image.tile=64"],
            "data.image.scheme is tiles, but .* allowed: native, fixed",
        ),
    ],
)
def test_what_has_no_rows_is_refused(overrides: list[str], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["mistral3"], folder, 3, num_train=FEW_CONVERSATIONS)
    with pytest.raises(DataError, match=message):
        build_index(tiny_recipe(folder, *overrides))
