"""Tiny models of every family: folders that `transformers` and `model.hf` open."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from mmtrain.data import build_index
from mmtrain.data.media.item_readers import AudioItemReader
from mmtrain.data.media.vision_items import VisionItemDecoder
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.errors import DataError
from mmtrain.families import FAMILIES, Family
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.weights.tiny_model import find_family_by_name, write_tiny_model
from tests.pixels import assert_same_pixels, normalized
from tests.weights.tiny_folders import FEW_CONVERSATIONS

SEED = 3
NUM_COMPARED = 40
# The processors of the others need torchvision; see tests/weights/test_internvl.py and test_qwen_vl.py.
PICTURED = ["gemma3", "llava"]


def tiny_recipe(folder: Path, *overrides: str) -> Recipe:
    path = folder.parent / "recipe.yaml"
    path.write_text(
        f"""
name: tiny
model: {{hf: {folder}}}
data: {{sources: [{{path: {folder}/conversations/heldout.json}}], seq_len: 512}}
train: {{steps: 1, global_batch: 1, optimizer: {{lr: 1e-3}}}}
"""
    )
    return load_recipe(path, overrides, env={}).recipe


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_opens_it(tmp_path: Path, family: str) -> None:
    import transformers

    summary = write_tiny_model(FAMILIES[family], tmp_path, SEED, num_train=FEW_CONVERSATIONS)
    model_class = getattr(transformers, FAMILIES[family].architectures[0])
    model, loading = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values()), loading
    names = (
        "e_score_correction_bias",
        "layer_scalar",
        "std_bias",
        "std_scale",
    )  # of our parameters that are buffers there
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith(names)]
    assert sum(tensor.numel() for tensor in (*model.parameters(), *buffers)) == summary.parameters
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path)) == summary.vocab


def _variant(family: str, **files: dict[str, Any]) -> Family:
    """Return a family whose tiny model has other values in its files; keys of `files` are names before the dot."""
    tiny = dict(FAMILIES[family].tiny)
    for stem, changes in files.items():
        tiny[f"{stem}.json"] = {**tiny[f"{stem}.json"], **changes}
    return replace(FAMILIES[family], tiny=tiny)


_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
}  # fmt: skip
_FULL = {"vision_feature_select_strategy": "full"}
VARIANTS = {
    **{name: FAMILIES[name] for name in PICTURED},
    "llava with class features": _variant("llava", config=_FULL, processor_config=_FULL),
    "llava with siglip": _variant(
        "llava",
        config={**_FULL, "vision_config": _SIGLIP},
        processor_config={**_FULL, "num_additional_image_tokens": 0},
        preprocessor_config={
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 32, "width": 32},
            "crop_size": None,
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_conversations_are_what_the_processor_makes_of_them(tmp_path: Path, variant: str) -> None:
    import transformers

    folder = tmp_path / "model"
    write_tiny_model(VARIANTS[variant], folder, SEED, num_train=FEW_CONVERSATIONS)
    recipe = tiny_recipe(folder)
    assert recipe.model.vision is not None
    processor = transformers.AutoProcessor.from_pretrained(folder)
    tokenizer = load_tokenizer(recipe.data.tokenizer_path)
    decoder = VisionItemDecoder(recipe.data.image, recipe.model.vision.patch)
    side = recipe.model.vision.max_side
    index = build_index(recipe)
    rows = json.loads((folder / "conversations" / "heldout.json").read_text())[:NUM_COMPARED]
    num_pictures = 0
    for number, row in enumerate(rows):
        sample = index.samples[number]
        expected = processor.apply_chat_template(
            messages_of(row, folder / "conversations"), tokenize=True, return_dict=True, return_tensors="np"
        )
        assert tokenizer.encode(sample, index.media_features(number)).ids.tolist() == expected["input_ids"][0].tolist()
        for i, media in enumerate(sample.media["image"]):
            patches = normalized(decoder.patches("image", media, 0, 1, (side, side)), recipe.data.image)
            theirs = expected["pixel_values"][i].reshape(3, side, 8, side, 8).transpose(1, 3, 0, 2, 4)
            assert_same_pixels(patches, theirs.reshape(patches.shape))
            num_pictures += 1
    assert num_pictures > NUM_COMPARED / 2


def test_its_clips_are_what_the_processor_makes_of_them(tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["qwen2_audio"], folder, SEED, num_train=FEW_CONVERSATIONS)
    recipe = tiny_recipe(folder)
    assert recipe.model.audio is not None
    processor = transformers.AutoProcessor.from_pretrained(folder)
    tokenizer = load_tokenizer(recipe.data.tokenizer_path)
    reader = AudioItemReader(recipe.model.audio, recipe.data)
    index = build_index(recipe)
    assert not index.quarantined
    rows = json.loads((folder / "conversations" / "heldout.json").read_text())
    assert {len(row.get("audios", ())) for row in rows[:NUM_COMPARED]} == {0, 1, 2}
    for number, row in enumerate(rows[:NUM_COMPARED]):
        sample = index.samples[number]
        text = processor.apply_chat_template(row["messages"], tokenize=False)
        waves = [soundfile.read(folder / "conversations" / name, dtype="float32")[0] for name in row.get("audios", ())]
        expected = processor(text=text, audio=waves or None, sampling_rate=16000, return_tensors="np")
        assert tokenizer.encode(sample, index.media_features(number)).ids.tolist() == expected["input_ids"][0].tolist()
        for i, media in enumerate(sample.media["audio"]):
            [grid] = reader.read_items("audio", media).grids
            frames = reader.load_cells("audio", media, 0, 1, grid)
            np.testing.assert_allclose(frames, expected["input_features"][i].T[: grid[0]], atol=1e-4)


def messages_of(row: dict[str, Any], root: Path) -> list[dict[str, Any]]:
    """Return a conversation in LLaVA's layout as messages whose contents are lists of parts."""
    pictures = iter(row.get("image", ()))
    messages = []
    for turn in row["conversations"]:
        texts = turn["value"].split("<image>")
        parts: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}] if texts[0] else []
        for text in texts[1:]:
            parts.append({"type": "image", "image": Image.open(root / next(pictures))})
            parts += [{"type": "text", "text": text}] if text else []
        messages.append({"role": "user" if turn["from"] == "human" else "assistant", "content": parts})
    return messages


def test_the_same_seed_makes_the_same_files(tmp_path: Path) -> None:
    contents = []
    for name, seed in (("a", SEED), ("b", SEED), ("c", SEED + 1)):
        write_tiny_model(FAMILIES["llama"], tmp_path / name, seed)
        contents.append(_contents(tmp_path / name))
    assert contents[0] == contents[1]
    for changed in ("model.safetensors", "conversations/train.json", "conversations/heldout.json"):
        assert contents[0][changed] != contents[2][changed]


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_whoever_may_read_the_config_may_read_the_weights(tmp_path: Path) -> None:
    write_tiny_model(FAMILIES["qwen2"], tmp_path, SEED, num_train=4)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir() if path.is_file()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_no_question_is_both_trained_on_and_held_out(tmp_path: Path) -> None:
    write_tiny_model(FAMILIES["qwen2"], tmp_path, SEED)
    questions = []
    for split in ("train", "heldout"):
        rows = json.loads((tmp_path / "conversations" / f"{split}.json").read_text())
        questions.append({turn["content"] for row in rows for turn in row["messages"] if turn["role"] == "user"})
    assert min(map(len, questions)) > 20
    assert not questions[0] & questions[1]


def test_other_folders_and_unknown_families_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(DataError, match="not empty and not a tiny model"):
        write_tiny_model(FAMILIES["llama"], tmp_path, SEED, num_train=FEW_CONVERSATIONS)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(DataError, match=r"FAMILY: found 'gpt5'; allowed: .*qwen2"):
        find_family_by_name("gpt5")
