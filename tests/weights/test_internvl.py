"""InternVL from a folder computes what `transformers` computes, and reads pictures and texts like its processor."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mmtrain.data import build_index
from mmtrain.data.media.image_grids import Patches, item_grids
from mmtrain.data.media.item_readers import VisionItemReader
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.media.vision_items import VisionItemDecoder
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.errors import RecipeError
from mmtrain.families import FAMILIES
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.weights.tiny_model import write_tiny_model
from tests.data.archives import movie
from tests.data.model_folders import write_like_internvl
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
from tests.weights.pretrained import IMAGE_SIDE, IMAGE_TOKEN, PATCH, VOCAB, internvl, recipe_from, save
from tests.weights.test_tiny_model import messages_of, tiny_recipe
from tests.weights.tiny_folders import FEW_CONVERSATIONS

# As on the hub; sections hold what differs from the defaults.
HUB_CONFIG: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl", "downsample_ratio": 0.5,
    "image_seq_length": 256, "image_token_id": 151667, "projector_hidden_act": "gelu", "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151674, "rope_theta": 1000000.0,
        "rope_scaling": None, "use_sliding_window": False, "max_window_layers": 70,
    },
    "vision_config": {
        "architectures": ["InternVisionModel"], "attention_bias": True, "hidden_size": 1024,
        "image_size": [448, 448], "intermediate_size": 4096, "layer_norm_eps": 1e-06, "layer_scale_init_value": 0.1,
        "model_type": "internvl_vision", "norm_type": "layer_norm", "num_attention_heads": 16,
        "num_hidden_layers": 24, "patch_size": [14, 14], "use_absolute_position_embeddings": True,
        "use_mask_token": False, "use_mean_pooling": True, "use_qk_norm": False,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "ratio", "tower"),
    [
        ("qwen2", 0.5, {}),
        ("qwen3", 0.5, {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False}),
        ("llama", 0.25, {"use_mean_pooling": False, "layer_norm_eps": 1e-3}),
        ("qwen3_moe", 0.5, {}),
    ],
)
def test_logits_loss_and_gradients_equal_those_of_transformers(
    text: str, ratio: float, tower: dict[str, Any], tmp_path: Path
) -> None:
    """Use two images of three tiles and of one, a text, and an image of one tile."""
    theirs = internvl(text, ratio, **tower)
    folder = save(theirs, tmp_path / "model")
    recipe = recipe_from(folder)
    vision, llm = unit_stage(recipe, "vision"), unit_stage(recipe, "llm")
    generator = torch.Generator().manual_seed(7)
    tile = torch.full((int(IMAGE_SIDE * ratio) ** 2,), IMAGE_TOKEN)

    def words(count: int) -> Tensor:
        return torch.randint(IMAGE_TOKEN + 1, VOCAB, (count,), generator=generator)

    ids = [torch.cat([words(3), tile, tile, tile, words(2), tile, words(6)]), words(9), torch.cat([tile, words(4)])]
    tiles = torch.randn(5, 3, IMAGE_SIDE * PATCH, IMAGE_SIDE * PATCH, generator=generator)
    labels = labels_of(ids, IMAGE_TOKEN)
    expected = torch.cat(
        [
            theirs(input_ids=ids[0][None], pixel_values=tiles[:4]).logits[0],
            theirs(input_ids=ids[1][None]).logits[0],
            theirs(input_ids=ids[2][None], pixel_values=tiles[4:]).logits[0],
        ]
    )
    packed = torch.cat(ids)
    places = (packed == IMAGE_TOKEN).nonzero().flatten()
    inputs = TextInput(tuple(map(len, ids)), packed, labels, {"vision": places})
    sides = (IMAGE_SIDE,) * 5
    features = vision(None, EncoderInput(sides, sides, torch.cat([patches_of(image) for image in tiles])))
    assert_equal_logits_and_loss(llm, inputs, {"vision": features}, expected)
    assert_equal_gradients(folder, theirs, full_gradients(vision) | full_gradients(llm))


@pytest.mark.parametrize("tower", [{}, {"use_mask_token": True, "use_mean_pooling": False, "use_qk_norm": True}])
def test_import_and_export_give_the_same_bits(tower: dict[str, Any], tmp_path: Path) -> None:
    folder = save(internvl(**tower), tmp_path / "model", torch.bfloat16)
    recipe = recipe_from(folder)
    assert content(export_again(folder, recipe)) == content(folder)


def test_conversations_are_what_the_processor_makes_of_them(tmp_path: Path) -> None:
    """The whole processor needs torchvision for videos, so its parts for images and texts are asked."""
    import transformers

    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["internvl"], folder, 3, num_train=FEW_CONVERSATIONS)
    recipe = tiny_recipe(folder)
    assert recipe.model.vision is not None
    assert (recipe.data.image.scheme, recipe.data.image.tile, recipe.data.image.max_tiles) == ("tiles", 32, 4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "preprocessor_config.json").read_text())
    sized = {key: config[key] for key in ("size", "min_patches", "max_patches", "image_mean", "image_std")}
    images = transformers.GotOcr2ImageProcessorPil(**sized, crop_to_patches=True)  # as the processor passes it
    decoder = VisionItemDecoder(recipe.data.image, recipe.model.vision.patch)
    index, ours = build_index(recipe), load_tokenizer(recipe.data.tokenizer_path)
    rows = json.loads((folder / "conversations" / "heldout.json").read_text())[:20]
    num_tiles = []
    for number, row in enumerate(rows):
        sample = index.samples[number]
        messages = messages_of(row, folder / "conversations")
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        pictures = [part["image"] for turn in messages for part in turn["content"] if part["type"] == "image"]
        for media, picture in zip(sample.media["image"], pictures, strict=True):
            pixels = images(picture, return_tensors="np")["pixel_values"]
            num_tiles.append(len(pixels))
            text = text.replace("<IMG_CONTEXT>", f"<img>{'<mark>' * 4 * len(pixels)}</img>", 1)
            for part, expected in enumerate(pixels):
                patches = normalized(decoder.patches("image", media, part, len(pixels), (4, 4)), recipe.data.image)
                np.testing.assert_allclose(patches, patches_of(torch.from_numpy(expected), 8), atol=1e-4)
        text = text.replace("<mark>", "<IMG_CONTEXT>")
        expected_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(sample, index.media_features(number)).ids.tolist() == expected_ids
    assert len(set(num_tiles)) > 1


def test_tiles_from_headers_are_those_of_the_processor(tmp_path: Path) -> None:
    import transformers

    image = recipe_from(write_config(tmp_path / "model", HUB_CONFIG), "data.seq_len=8192").data.image
    theirs = transformers.GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True)
    rng = np.random.default_rng(5)
    for height, width in rng.integers(10, 3000, (1000, 2)).tolist():
        grids = item_grids(width, height, image, Patches(14, 2))
        assert set(grids) == {(32, 32)}
        assert len(grids) == theirs.get_number_of_image_patches(height, width, {}), (height, width)


def test_the_config_of_the_hub_is_that_of_the_paper(tmp_path: Path) -> None:
    recipe = recipe_from(write_config(tmp_path / "InternVL3-1B-hf", HUB_CONFIG), "data.seq_len=8192")
    vision, llm = recipe.model.vision, recipe.model.llm
    assert vision is not None
    assert (vision.layers, vision.hidden, vision.max_side, vision.merge) == (24, 1024, 32, 2)
    assert (llm.layers, llm.hidden, llm.vocab, llm.tie_embeddings) == (24, 896, 151674, False)
    assert (recipe.data.image.tile, recipe.data.image.max_tiles) == (448, 12)


@pytest.mark.parametrize(
    ("section", "changes", "text"),
    [
        (None, {"vision_feature_select_strategy": "full"}, 'vision_feature_select_strategy: "full" is not supported'),
        (None, {"downsample_ratio": 0.3}, "downsample_ratio: 0.3 is not supported yet; supported: 1, 0.5, 0.25"),
        (None, {"image_seq_length": 255}, "image_seq_length: 255 is not supported yet; supported: 256"),
        ("text_config", {"model_type": "phi"}, "text_config.model_type: 'phi' is not supported yet"),
        ("vision_config", {"image_size": [448, 224]}, "vision_config.image_size: [448, 224] is not supported yet"),
        ("vision_config", {"norm_type": "batch_norm"}, 'vision_config.norm_type: "batch_norm" is not supported yet'),
        ("vision_config", {"hidden_dropout_prob": 0.1}, "vision_config.hidden_dropout_prob: 0.1 is not supported yet"),
    ],
)
def test_other_internvls_are_rejected_by_the_key(
    section: str | None, changes: dict[str, object], text: str, tmp_path: Path
) -> None:
    changed = changes if section is None else {section: {**HUB_CONFIG[section], **changes}}
    with pytest.raises(RecipeError) as caught:
        recipe_from(write_config(tmp_path / "model", HUB_CONFIG, **changed), "data.seq_len=8192")
    assert text in str(caught.value)


def test_a_video_is_written_frame_by_frame(tmp_path: Path) -> None:
    """Lengths from headers are those of the ids; frames are those in the middle of equal parts, a tile each."""
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["internvl"], folder, 3, num_train=FEW_CONVERSATIONS)
    conversations = folder / "conversations"
    # One second of each shade, 20 frames a second: 60 frames.
    shades = [Image.new("RGB", (64, 48), (shade, shade, shade)) for shade in (20, 120, 220)]
    (conversations / "long.mp4").write_bytes(movie(shades, seconds_each=1.0))
    (conversations / "short.mp4").write_bytes(movie(["red"], seconds_each=0.1))
    heldout = json.loads((conversations / "heldout.json").read_text())
    picture = next(row["image"][0] for row in heldout if row.get("image"))
    rows = [
        _row("<video>\nWhat happens, and then <image>?", video="long.mp4", image=picture),
        _row("<image>\nAnd <video>", video="short.mp4", image=picture),
    ]
    (conversations / "heldout.json").write_text(json.dumps(rows))
    recipe = tiny_recipe(folder, "data.seq_len=1024", "data.video.max_frames=12")
    assert recipe.model.vision is not None
    index, tokenizer = build_index(recipe), load_tokenizer(folder)
    assert not index.quarantined
    assert len(index.samples) == 2
    for number in range(2):
        features = index.media_features(number)
        encoded = tokenizer.encode(index.samples[number], features)
        assert index.lengths.tokens[number] == len(encoded.ids)
        kinds = [kind for kind, _ in index.samples[number].media_of(("image", "video"))]
        texts = [write_like_internvl(kind, medium) for kind, medium in zip(kinds, features["vision"], strict=True)]
        text = tokenizer.decode(encoded.ids)
        assert "".join(re.findall("Frame[0-9]+: ", text)) == "".join(re.findall("Frame[0-9]+: ", "".join(texts)))
    [video] = [medium for medium in index.media_features(0)["vision"] if isinstance(medium, tuple)]
    assert video == (4,) * 12
    [video] = [medium for medium in index.media_features(1)["vision"] if isinstance(medium, tuple)]
    assert video == (4,) * 2

    # As `InternVLVideoProcessor.sample_frames` takes them, which needs torchvision.
    wanted = torch.arange(60 / 12 / 2, 60, 60 / 12).int().tolist()
    reader = VisionItemReader(recipe.model.vision, recipe.data)
    image = recipe.data.image
    for part, frame in enumerate(wanted):
        cells = reader.load_cells("video", FileMedia(str(conversations / "long.mp4")), part, 12, (4, 4))
        patches = normalized(cells, image)
        shade = np.asarray(shades[frame // 20], dtype=np.float32)[0, 0] / 255
        pixels = patches.reshape(16, 3, -1).mean(axis=(0, 2))
        np.testing.assert_allclose(pixels, (shade - np.array(image.mean)) / np.array(image.std), atol=0.1)


def _row(question: str, **media: str) -> dict[str, object]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "Nothing."}]
    return {"id": question, "conversations": turns, **media}
