"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 compute what `transformers` computes, with images and videos."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from torch import Tensor, nn
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from mmtrain.costs import num_parameters
from mmtrain.data import DataIndex, build_index
from mmtrain.data.loading.batch_builder import find_media_positions
from mmtrain.data.media.image_grids import MediumGrid
from mmtrain.data.media.vision_items import VisionItemDecoder
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.errors import DataError, RecipeError
from mmtrain.families import FAMILIES
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.recipe import Recipe
from mmtrain.weights.tiny_model import write_tiny_model
from tests.data.archives import movie
from tests.families.configs import write_config
from tests.pixels import assert_same_pixels, normalized
from tests.weights.comparison import (
    assert_equal_gradients,
    assert_equal_logits_and_loss,
    content,
    export_again,
    full_gradients,
    labels_of,
    unit_stage,
)
from tests.weights.pretrained import (
    IMAGE_TOKEN,
    MERGE,
    POSITIONS_PER_SECOND,
    SECONDS_PER_PATCH,
    VIDEO_TOKEN,
    VOCAB,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_5_moe,
    qwen3_vl,
    qwen3_vl_moe,
    recipe_from,
    save,
)
from tests.weights.test_tiny_model import messages_of, tiny_recipe
from tests.weights.tiny_folders import FEW_CONVERSATIONS

MODELS: dict[str, Callable[..., nn.Module]] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
}
QWEN2_VL_2B = {
    "architectures": ["Qwen2VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 1536, "image_token_id": 151655,
    "initializer_range": 0.02, "intermediate_size": 8960, "max_position_embeddings": 32768, "max_window_layers": 28,
    "model_type": "qwen2_vl", "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "video_token_id": 151656, "vision_end_token_id": 151653, "vision_start_token_id": 151652,
    "vision_token_id": 151654, "vocab_size": 151936,
    "vision_config": {
        "depth": 32, "embed_dim": 1280, "hidden_size": 1536, "in_chans": 3, "mlp_ratio": 4, "num_heads": 16,
        "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
    },
}  # fmt: skip
QWEN2_5_VL_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu",
    "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000,
    "max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 152064,
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}  # fmt: skip
QWEN3_VL_8B = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 5000000, "use_cache": True,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "vocab_size": 151936,
    },
    "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0", "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304,
        "model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653, "vision_start_token_id": 151652,
}  # fmt: skip
# transformers 5.17 wrongly cuts the seconds of a patch to a whole number before it computes positions from them.
SECONDS = SECONDS_PER_PATCH if Version(transformers.__version__) >= Version("5.24") else 1.0
# Frames (in patches), rows and columns of what the samples show, and whether it is a video.
ROLES = "user", "assistant"
SHOWN = [[((1, 4, 6), False), ((1, 2, 2), False)], [], [((3, 4, 4), True)], [((1, 6, 10), False), ((2, 2, 6), True)]]


def _recipe(folder: Path) -> Recipe:
    return recipe_from(folder, "data.image.min_pixels=16", "data.image.max_pixels=576")


def _words(count: int, seed: int) -> Tensor:
    return torch.randint(IMAGE_TOKEN + 1, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def _spans(name: str, number: int) -> list[tuple[tuple[int, int, int], bool]]:
    """Return what the text of a sample shows one after another: Qwen3-VL writes text between the parts of a video."""
    if not name.startswith("qwen3"):
        return SHOWN[number]
    return [((1, rows, cols), is_video) for (frames, rows, cols), is_video in SHOWN[number] for _ in range(frames)]


def _ids(name: str, number: int) -> Tensor:
    parts = [_words(3, number)]
    for (frames, rows, cols), is_video in _spans(name, number):
        token = VIDEO_TOKEN if is_video else IMAGE_TOKEN
        parts += [torch.full((frames * rows * cols // MERGE**2,), token), _words(2, number + 10)]
    return torch.cat([*parts, _words(4, number + 20)])


def in_squares(cells: Tensor, rows: int, cols: int) -> Tensor:
    """Order patches (frames * rows * cols, features), row by row, as `transformers` expects them."""
    split = cells.view(-1, rows // MERGE, MERGE, cols // MERGE, MERGE, cells.shape[1])
    return split.transpose(2, 3).reshape(cells.shape)


def _their_media(name: str, number: int, cells: list[Tensor]) -> dict[str, Tensor]:
    """Return the arguments of `transformers` for the media of a sample."""
    kinds: dict[str, tuple[list[Tensor], list[tuple[int, ...]]]] = {"image": ([], []), "video": ([], [])}
    for (grid, is_video), of_medium in zip(SHOWN[number], cells, strict=True):
        pixels, grids = kinds["video" if is_video else "image"]
        pixels.append(in_squares(of_medium, *grid[1:]))
        grids.append(grid)
    arguments = {}
    for kind, (pixels, grids) in kinds.items():
        if pixels:
            argument = "pixel_values" if kind == "image" else "pixel_values_videos"
            arguments |= {argument: torch.cat(pixels), f"{kind}_grid_thw": torch.tensor(grids)}
    if kinds["video"][0] and name == "qwen2_5_vl":
        arguments["second_per_grid_ts"] = torch.full((len(kinds["video"][0]),), SECONDS)
    ids = _ids(name, number)
    types = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    return {**arguments, "mm_token_type_ids": types[None]} if arguments else {}


def _times(name: str, num_patches: int) -> list[int]:
    if name != "qwen2_5_vl":
        return [*range(num_patches)]
    return (np.arange(num_patches) * SECONDS * POSITIONS_PER_SECOND).astype(int).tolist()


def _our_inputs(
    name: str, cells: list[list[Tensor]], ids: list[Tensor], labels: list[Tensor]
) -> tuple[EncoderInput, TextInput]:
    grids = [grid for of_sample in SHOWN for grid, _ in of_sample]
    rows, cols = (tuple(grid[k] for grid in grids for _ in range(grid[0])) for k in (1, 2))
    images = EncoderInput(rows, cols, torch.cat([of_medium for of_sample in cells for of_medium in of_sample]))
    positions = []
    for number, sample_ids in enumerate(ids):
        spans = _spans(name, number)
        media = [MediumGrid(_times(name, t), rows // MERGE, cols // MERGE) for (t, rows, cols), _ in spans]
        positions.append(find_media_positions(sample_ids.numpy(), (IMAGE_TOKEN, VIDEO_TOKEN), media))
    packed = torch.cat(ids)
    places = (packed <= IMAGE_TOKEN).nonzero().flatten()
    position_ids = torch.from_numpy(np.concatenate(positions, axis=1))
    return images, TextInput(tuple(map(len, ids)), packed, labels, {"vision": places}, position_ids)


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = MODELS[name]()
    folder = save(theirs, tmp_path / "model")
    recipe = _recipe(folder)
    vision, llm = unit_stage(recipe, "vision"), unit_stage(recipe, "llm")
    assert recipe.model.vision is not None
    width = recipe.model.vision.cell_features
    generator = torch.Generator().manual_seed(7)
    cells = [
        [torch.randn(int(np.prod(grid)), width, generator=generator) for grid, _ in of_sample] for of_sample in SHOWN
    ]
    ids = [_ids(name, number) for number in range(len(SHOWN))]
    labels = labels_of(ids, IMAGE_TOKEN)
    expected = torch.cat(
        [
            theirs(input_ids=sample[None], **_their_media(name, number, cells[number])).logits[0]
            for number, sample in enumerate(ids)
        ]
    )
    images, text = _our_inputs(name, cells, ids, labels)
    features = vision(None, images)
    assert_equal_logits_and_loss(llm, text, {"vision": features}, expected)
    assert_equal_gradients(folder, theirs, full_gradients(vision) | full_gradients(llm))


@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_give_the_same_bits(name: str, tmp_path: Path) -> None:
    folder = save(MODELS[name](), tmp_path / "model", torch.bfloat16)
    recipe = _recipe(folder)
    assert content(export_again(folder, recipe)) == content(folder)


def test_the_config_of_the_hub_is_that_of_the_paper(tmp_path: Path) -> None:
    recipe = recipe_from(write_config(tmp_path / "model", QWEN2_VL_2B), "data.seq_len=32768")
    vision, llm, image = recipe.model.vision, recipe.model.llm, recipe.data.image
    assert vision is not None
    assert (vision.layers, vision.hidden, vision.ffn, vision.projector.ffn) == (32, 1280, 5120, 5120)
    assert (vision.patch, vision.temporal_patch, vision.merge, vision.activation) == (14, 2, 2, "quick_gelu")
    assert (llm.layers, llm.hidden, llm.kv_heads, llm.rope_sections) == (28, 1536, 2, (16, 24, 24))
    assert (llm.rope_base, llm.tie_embeddings, llm.qkv_bias, llm.norm_eps) == (1e6, True, True, 1e-6)
    assert (image.scheme, image.min_pixels, image.max_pixels) == ("native", 3136, 1003520)


def test_the_config_of_qwen2_5_vl_on_the_hub_is_that_of_the_paper(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", QWEN2_5_VL_7B)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({
            "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
            "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
            "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
        })
    )  # fmt: skip
    recipe = recipe_from(folder, "data.seq_len=32768", "data.video.max_pixels=401408")
    vision, llm, data = recipe.model.vision, recipe.model.llm, recipe.data
    assert vision is not None
    assert (vision.layers, vision.hidden, vision.ffn, vision.norm, vision.gated_mlp) == (32, 1280, 3420, "rms", True)
    assert (vision.window, vision.full_attention_blocks) == (8, (7, 15, 23, 31))
    assert (vision.time_positions_per_second, llm.rope_sections, llm.hidden) == (2.0, (16, 24, 24), 3584)
    assert (data.image.min_pixels, data.image.max_pixels) == (3136, 12845056)
    video = data.video
    assert (video.fps, video.min_frames, video.max_frames) == (2.0, 4, 768)
    assert (video.min_pixels, video.max_pixels) == (3136, 401408), "the folder's, and the recipe's"


def test_the_config_of_qwen3_vl_on_the_hub_is_that_of_the_paper(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", QWEN3_VL_8B)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({
            "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
            "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
            "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
        })
    )  # fmt: skip
    recipe = recipe_from(folder, "data.seq_len=32768")
    vision, llm, image = recipe.model.vision, recipe.model.llm, recipe.data.image
    assert vision is not None
    assert (vision.layers, vision.hidden, vision.ffn, vision.activation) == (27, 1152, 4304, "gelu_tanh")
    assert (vision.patch, vision.merge, vision.position_grid, vision.patch_bias) == (16, 2, 48, True)
    assert (vision.deepstack, vision.projector.ffn) == ((8, 16, 24), 4608)
    assert (llm.layers, llm.hidden, llm.qk_norm, llm.rope_base) == (36, 4096, True, 5e6)
    assert (llm.rope_sections, llm.rope_interleaved) == ((24, 20, 20), True)
    assert (image.min_pixels, image.max_pixels, image.mean) == (65536, 16777216, (0.5, 0.5, 0.5))
    parameters = {unit.name: sum(map(num_parameters, unit.layers)) for unit in build_model_shape(recipe).units}
    assert parameters == {"vision": 576_388_336, "llm": 8_190_735_360}


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("vision_config", {"deepstack_visual_indexes": [2, 40]}, "allowed: a list of blocks, 0 to 26"),
        ("vision_config", {"deepstack_visual_indexes": [2, 1]}, "supported: numbers that ascend"),
        ("vision_config", {"num_position_embeddings": 2305}, "2305 is not supported yet; supported: squares"),
        ("text_config", {"num_hidden_layers": 2}, "3 blocks feed as many of the LLM, which has 2"),
    ],
)
def test_what_qwen3_vl_does_not_support_is_said(
    section: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config: dict[str, Any] = {**QWEN3_VL_8B}
    config[section] = {**config[section], **changes}
    with pytest.raises(RecipeError, match=message):
        recipe_from(write_config(tmp_path / "model", config))


@pytest.mark.parametrize(
    "name", ["qwen2_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5_vl", "qwen3_vl"))]
)
def test_conversations_of_the_tiny_model_are_what_its_processor_makes_of_them(name: str, tmp_path: Path) -> None:
    """Compose the processor: as a whole it needs torchvision, for videos."""
    import transformers

    folder = tmp_path / "model"
    write_tiny_model(FAMILIES[name], folder, seed=3, num_train=FEW_CONVERSATIONS)
    recipe = tiny_recipe(folder)
    vision = recipe.model.vision
    assert vision is not None
    image_processor = transformers.AutoImageProcessor.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(recipe.data.tokenizer_path)
    decoder = VisionItemDecoder(recipe.data.image, vision.patch, vision.temporal_patch)
    index = build_index(recipe)
    rows = json.loads((folder / "conversations" / "heldout.json").read_text())[:30]
    sizes = set()
    for number, row in enumerate(rows):
        messages = messages_of(row, folder / "conversations")
        images = [part["image"] for turn in messages for part in turn["content"] if part["type"] == "image"]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        pixels, grids = Tensor(), []
        if images:
            prepared = image_processor(images, return_tensors="pt")
            pixels, grids = prepared["pixel_values"], prepared["image_grid_thw"].tolist()
        for _, height, width in grids:
            text = text.replace("<image>", "<mark>" * (height * width // vision.merge**2), 1)
        expected = tokenizer(text.replace("<mark>", "<image>"), add_special_tokens=False)["input_ids"]
        sample = index.samples[number]
        assert ours.encode(sample, index.media_features(number)).ids.tolist() == expected
        for media, (_, height, width) in zip(sample.media["image"], grids, strict=True):
            cells = decoder.patches("image", media, 0, 1, (height, width))
            patches_of_image = torch.from_numpy(normalized(cells, recipe.data.image))
            theirs, pixels = pixels.split([height * width, len(pixels) - height * width])
            assert_same_pixels(in_squares(patches_of_image, height, width), theirs)
            sizes.add((height, width))
    assert len(sizes) > 2


def test_videos_of_qwen3_vl_are_what_its_processor_makes_of_them(tmp_path: Path) -> None:
    """Compose the processor: as a whole it needs torchvision. Lengths are read from headers."""
    import transformers
    from transformers import Qwen3VLModel
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["qwen3_vl"], folder, seed=3, num_train=FEW_CONVERSATIONS)
    conversations = folder / "conversations"
    sides = [(64, 48), (96, 40), (33, 90)]
    frames = [1, 31, 100]  # at 20 a second
    for number, (size, count) in enumerate(zip(sides, frames, strict=True)):
        shown = movie([Image.new("RGB", size, "red")] * count, seconds_each=0.05, width=size[0], height=size[1])
        (conversations / f"{number}.mp4").write_bytes(shown)
    picture = next(row["image"][0] for row in _heldout(folder) if row.get("image"))
    rows = [
        {"id": 1, "video": "1.mp4", "image": picture, "conversations": _asked("Look:<video> and <image>?")},
        {"id": 2, "video": ["2.mp4", "1.mp4"], "conversations": _asked("<video> then <video>.")},
    ]
    (conversations / "heldout.json").write_text(json.dumps(rows))
    recipe = tiny_recipe(folder, "data.seq_len=4096")
    vision = recipe.model.vision
    assert vision is not None
    video = recipe.data.video
    assert (video.fps, video.max_frames, video.sampling, video.pixel_limits) == (2.0, 16, "ends", "video")
    index, ours = build_index(recipe), load_tokenizer(recipe.data.tokenizer_path)
    assert not index.quarantined
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sampler = SimpleNamespace(num_frames=None, fps=2, min_frames=4, max_frames=16)
    processor: Any = SimpleNamespace(
        video_token=tokenizer.video_token, vision_start_token=tokenizer.vision_start_token,
        vision_end_token=tokenizer.vision_end_token,
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
    )  # fmt: skip
    processor._calculate_timestamps = lambda *args: Qwen3VLProcessor._calculate_timestamps(processor, *args)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = Qwen3VLModel.get_vision_position_ids.__get__(model)
    for number, (row, shown) in enumerate(zip(rows, ([1], [2, 1]), strict=True)):
        sample = index.samples[number]
        messages = [
            {"role": role, "content": _parts(turn["value"])}
            for role, turn in zip(ROLES, row["conversations"], strict=True)
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        grids = []
        for which in shown:
            metadata = SimpleNamespace(total_num_frames=frames[which], fps=20.0)
            metadata.frames_indices = Qwen3VLVideoProcessor.sample_frames(sampler, metadata)
            resized = smart_resize(
                len(metadata.frames_indices), sides[which][1], sides[which][0], 2, 16, 4 * 32 * 32, 16 * 64 * 64
            )
            grids.append([-(-len(metadata.frames_indices) // 2), resized[0] // 8, resized[1] // 8])
            inputs = {"video_grid_thw": torch.tensor(grids[-1:]), "video_metadata": [metadata]}
            written = Qwen3VLProcessor.replace_video_token(processor, inputs, 0)
            text = text.replace(processor.video_token, written.replace(processor.video_token, "<mark>"), 1)
        text = text.replace("<mark>", processor.video_token)
        features = index.media_features(number)
        image_grids = []
        if number == 0:
            [pictured] = [medium for medium in features["vision"] if isinstance(medium, int)]
            text = text.replace("<image>", "<image>" * pictured)
            image_grids = [[1, *next(
                grid for grid in zip(*_rows_and_cols(index, number), strict=True) if grid[0] * grid[1] == 4 * pictured
            )]]  # fmt: skip
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ours.encode(sample, features).ids
        assert ids.tolist() == expected
        assert index.lengths.tokens[number] == len(expected)
        image_token, video_token = (
            tokenizer.convert_tokens_to_ids(token) for token in ("<image>", processor.video_token)
        )
        types = (torch.tensor(expected) == image_token).int() + 2 * (torch.tensor(expected) == video_token).int()
        their_positions, _ = Qwen3VLModel.get_rope_index(
            model, torch.tensor([expected]), types[None], torch.tensor(image_grids) if image_grids else None,
            torch.tensor(grids),
        )  # fmt: skip
        assert ours.writes_items_apart
        media = index.media_grids(number, "vision", 2, items_apart=True)
        positions = find_media_positions(ids, ours.item_ids["vision"], media)
        np.testing.assert_array_equal(positions, their_positions[:, 0].numpy())
    with pytest.raises(DataError, match=r"data.video.sampling is parts, but .* known of `ends`, "):
        build_index(tiny_recipe(folder, "data.video.sampling=parts"))


def _heldout(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "conversations" / "heldout.json").read_text())
    return rows


def _asked(question: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": "Nothing."}]


def _parts(text: str) -> list[dict[str, str]]:
    pieces = [piece for piece in re.split("(<image>|<video>)", text) if piece]
    return [{"type": piece[1:-1]} if piece[0] == "<" else {"type": "text", "text": piece} for piece in pieces]


def _rows_and_cols(index: DataIndex, number: int) -> tuple[list[int], list[int]]:
    items = index.lengths.items["vision"]
    of_sample = slice(items.first[number], items.first[number + 1])
    return items.rows[of_sample].tolist(), items.cols[of_sample].tolist()
