"""Qwen2.5-Omni's thinker from a folder computes what `transformers` computes with pictures, videos and clips."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmtrain.checkpoint import open_newest_good
from mmtrain.data import build_index
from mmtrain.data.loading.batch_builder import find_media_positions
from mmtrain.data.media.image_grids import MediumGrid
from mmtrain.data.media.item_readers import AudioItemReader, VisionItemReader
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.errors import ModelFolderError, RecipeError
from mmtrain.families import FAMILIES
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.recipe import Recipe
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.weights import export_folder
from mmtrain.weights.tiny_model import write_tiny_model
from tests.data.archives import movie
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
from tests.weights.omni_media import FIRST_WORD, RATE, in_squares, read_clips, wave, words, write_clip
from tests.weights.pretrained import (
    IMAGE_TOKEN,
    MERGE,
    OMNI_AUDIO_TOKEN,
    OMNI_BORDERS,
    POSITIONS_PER_SECOND,
    SECONDS_PER_PATCH,
    VIDEO_TOKEN,
    clip_extractor,
    qwen2_5_omni,
    recipe_from,
    save,
)
from tests.weights.test_tiny_model import tiny_recipe
from tests.weights.tiny_folders import FEW_CONVERSATIONS

UNITS = ("vision", "audio", "llm")
TOKENS = {"image": IMAGE_TOKEN, "video": VIDEO_TOKEN, "audio": OMNI_AUDIO_TOKEN}
# Frames (in patches), rows and columns of pictures and videos; samples of clips. Clips of 37, 42, 60 and 100 frames are
# cut into chunks of 10, of 5 tokens each: features join tokens of two chunks.
Medium = tuple[str, Any]
SAMPLES: tuple[tuple[Medium, ...], ...] = (
    (("image", (1, 4, 6)), ("image", (1, 2, 2))),
    (),
    (("audio", 5900), ("video", (3, 4, 4)), ("image", (1, 6, 10)), ("audio", 6561)),
    (("audio", 9600), ("audio", 16000)),
    (("video", (2, 2, 6)), ("image", (1, 2, 4))),
)
HUB_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2_5OmniModel"], "enable_audio_output": True, "enable_talker": True,
    "model_type": "qwen2_5_omni", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "talker_config": {"architectures": ["Qwen2OmniTalkerForConditionalGeneration"], "hidden_size": 896},
    "token2wav_config": {"architectures": ["Qwen2_5OmniToken2WavModel"], "dit_config": {"depth": 22}},
    "thinker_config": {
        "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"], "audio_end_token_id": 151648,
        "audio_start_token_id": 151647, "audio_token_index": 151646, "bos_token_id": 151644, "eos_token_id": 151645,
        "ignore_index": -100, "image_token_index": 151655, "init_std": 0.02, "model_type": "qwen2_5_omni_thinker",
        "pad_token_id": 151643, "position_id_per_seconds": 25, "seconds_per_chunk": 2, "torch_dtype": "bfloat16",
        "user_token_id": 872, "video_token_index": 151656, "vision_end_token_id": 151653,
        "vision_start_token_id": 151652, "vision_token_id": 151654,
        "audio_config": {
            "activation_dropout": 0.0, "activation_function": "gelu", "attention_dropout": 0.0, "d_model": 1280,
            "dropout": 0.0, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layerdrop": 0.0,
            "encoder_layers": 32, "init_std": 0.02, "initializer_range": 0.02, "max_source_positions": 1500,
            "model_type": "qwen2_5_omni_audio_encoder", "n_window": 100, "num_hidden_layers": 32,
            "num_mel_bins": 128, "output_dim": 3584, "scale_embedding": False,
        },
        "text_config": {
            "hidden_act": "silu", "hidden_size": 3584, "init_std": 0.02, "initializer_range": 0.02,
            "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
            "model_type": "qwen2_5_omni_text", "num_attention_heads": 28, "num_hidden_layers": 28,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
            "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
            "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
        },
        "vision_config": {
            "depth": 32, "embed_dim": 1280, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu",
            "hidden_size": 1280, "in_channels": 3, "in_chans": 3, "init_std": 0.02, "initializer_range": 0.02,
            "intermediate_size": 3420, "model_type": "qwen2_5_omni_vision_encoder", "num_heads": 16,
            "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
            "temporal_patch_size": 2, "tokens_per_second": 25, "window_size": 112,
        },
    },
}  # fmt: skip
HUB_PROCESSORS = {
    "chunk_length": 300, "dither": 0.0, "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128,
    "hop_length": 160, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "Qwen2VLImageProcessor", "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_pixels": 12845056, "merge_size": 2, "min_pixels": 3136, "n_fft": 400, "n_samples": 4800000,
    "nb_max_frames": 30000, "padding_side": "right", "padding_value": 0.0, "patch_size": 14,
    "processor_class": "Qwen2_5OmniProcessor", "return_attention_mask": True, "sampling_rate": 16000,
    "temporal_patch_size": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """Make a tiny model, and its folder with the config of its feature extractor."""
    theirs = qwen2_5_omni()
    folder = save(theirs, tmp_path_factory.mktemp("qwen2_5_omni") / "model")
    clip_extractor().save_pretrained(folder)
    return theirs, folder


def _recipe(folder: Path, *overrides: str) -> Recipe:
    return recipe_from(folder, "data.image.min_pixels=16", "data.image.max_pixels=576", *overrides)


def _num_features(medium: Medium) -> int:
    kind, size = medium
    if kind != "audio":
        return int(np.prod(size)) // MERGE**2
    frames = -(-size // 160)
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def _ids(number: int) -> Tensor:
    parts = [words(3, number)]
    for place, medium in enumerate(SAMPLES[number]):
        before, after = OMNI_BORDERS["audio" if medium[0] == "audio" else "vision"]
        features = torch.full((_num_features(medium),), TOKENS[medium[0]])
        between = words(place, 10 * number + place)  # none before the first
        parts += [between, torch.tensor([before]), features, torch.tensor([after])]
    return torch.cat([*parts, words(6, number + 20)])


def _their_inputs(number: int, ids: Tensor, pixels: dict[Medium, Tensor]) -> dict[str, Tensor]:
    """Return the arguments of `transformers` for a sample, whose clips the family's feature extractor prepares."""
    arguments = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
    for kind, argument in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        media = [medium for medium in SAMPLES[number] if medium[0] == kind]
        if media:
            squares = [in_squares(pixels[medium], *medium[1][1:]) for medium in media]
            grids = torch.tensor([grid for _, grid in media])
            arguments |= {argument: torch.cat(squares), f"{kind}_grid_thw": grids}
            if kind == "video":
                arguments["video_second_per_grid"] = torch.full((len(media),), SECONDS_PER_PATCH)
    waves = [wave(size) for kind, size in SAMPLES[number] if kind == "audio"]
    if waves:
        extracted = clip_extractor()(
            waves, sampling_rate=RATE, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        arguments |= {
            "input_features": extracted.input_features,
            "feature_attention_mask": extracted.attention_mask,
        }
    return arguments


def _times(num_patches: int) -> list[int]:
    """Return what a video's header says, in fp32 as in `transformers`."""
    seconds = np.arange(num_patches, dtype=np.float32) * np.float32(SECONDS_PER_PATCH)
    return (seconds * np.float32(POSITIONS_PER_SECOND)).astype(int).tolist()


def _positions(number: int, ids: Tensor) -> Tensor:
    media = [(kind, grid) for kind, grid in SAMPLES[number] if kind != "audio"]
    grids = [MediumGrid(_times(t), rows // MERGE, cols // MERGE) for _, (t, rows, cols) in media]
    return torch.from_numpy(find_media_positions(ids.numpy(), (IMAGE_TOKEN, VIDEO_TOKEN), grids, behind_times=True))


@pytest.mark.parametrize(
    ("item_seconds", "frames"), [(30, [37, 42, 60, 100]), (0.38, [37, 40, 40, 20, 40, 40, 20])], ids=["whole", "parts"]
)
def test_logits_loss_and_gradients_equal_those_of_transformers(
    item_seconds: float, frames: list[int], model: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    theirs, folder = model
    recipe = _recipe(folder, f"data.audio.item_seconds={item_seconds}")
    vision, audio, llm = (unit_stage(recipe, unit) for unit in UNITS)
    assert recipe.model.vision is not None
    width = recipe.model.vision.cell_features
    generator = torch.Generator().manual_seed(7)
    shown = [medium for sample in SAMPLES for medium in sample if medium[0] != "audio"]
    pixels = {medium: torch.randn(int(np.prod(medium[1])), width, generator=generator) for medium in shown}
    ids = [_ids(number) for number in range(len(SAMPLES))]
    expected = torch.cat(
        [theirs(**_their_inputs(number, sample, pixels)).logits[0] for number, sample in enumerate(ids)]
    )

    grids = [grid for _, grid in shown]
    rows, cols = (tuple(grid[k] for grid in grids for _ in range(grid[0])) for k in (1, 2))
    images = EncoderInput(rows, cols, torch.cat([pixels[medium] for medium in shown]))
    packed = torch.cat(ids)
    is_seen = (packed == IMAGE_TOKEN) | (packed == VIDEO_TOKEN)
    places = {"vision": is_seen.nonzero().flatten(), "audio": (packed == OMNI_AUDIO_TOKEN).nonzero().flatten()}
    positions = torch.cat([_positions(number, sample) for number, sample in enumerate(ids)], dim=1)
    text = TextInput(tuple(map(len, ids)), packed, labels_of(ids, FIRST_WORD - 1), places, positions)
    sizes = [size for sample in SAMPLES for kind, size in sample if kind == "audio"]
    clips = read_clips(recipe, tmp_path, sizes)
    assert list(clips.rows) == frames, "an item ends with a feature and a chunk; two frames more are no feature"
    features = {"vision": vision(None, images), "audio": audio(None, clips)}
    assert_equal_logits_and_loss(llm, text, features, expected)
    assert_equal_gradients(folder, theirs, full_gradients(vision) | full_gradients(audio) | full_gradients(llm))
    theirs.zero_grad()


def test_positions_are_those_of_get_rope_index(model: tuple[nn.Module, Path]) -> None:
    rng = np.random.default_rng(0)
    theirs: Any = model[0]
    with_positions = theirs if hasattr(theirs, "get_rope_index") else theirs.model  # 5.17, and later versions
    for seed in range(100):
        parts, media, grids, seconds, mel_lengths = [words(int(rng.integers(1, 4)), seed)], [], {}, [], []
        for kind in rng.choice(["image", "video", "audio"], rng.integers(0, 5)):
            size: Any = int(rng.integers(400, RATE))
            if kind == "audio":
                mel_lengths.append(-(-size // 160))
            else:
                size = (int(rng.integers(1, 6)) if kind == "video" else 1, *(2 * rng.integers(1, 5, 2)).tolist())
                grids.setdefault(kind, []).append(size)
                times = [*range(size[0])]
            if kind == "video":
                seconds.append(float(rng.uniform(0.1, 3)))
                of_grids = np.arange(size[0], dtype=np.float32) * np.float32(seconds[-1])
                times = (of_grids * np.float32(POSITIONS_PER_SECOND)).astype(int).tolist()
            if kind != "audio":
                media.append(MediumGrid(times, size[1] // MERGE, size[2] // MERGE))
            before, after = OMNI_BORDERS["audio" if kind == "audio" else "vision"]
            features = torch.full((_num_features((str(kind), size)),), TOKENS[str(kind)])
            parts += [torch.tensor([before]), features, torch.tensor([after]), words(int(rng.integers(0, 3)), seed)]
        ids = torch.cat([*parts, words(2, seed)])
        their_grids = {f"{kind}_grid_thw": torch.tensor(of_kind) for kind, of_kind in grids.items()}
        expected, delta = with_positions.get_rope_index(
            ids[None], attention_mask=torch.ones_like(ids)[None], audio_seqlens=torch.tensor(mel_lengths),
            second_per_grids=torch.tensor(seconds), **their_grids,
        )  # fmt: skip
        ours = find_media_positions(ids.numpy(), (IMAGE_TOKEN, VIDEO_TOKEN), media, behind_times=True)
        assert ours.tolist() == expected[:, 0].tolist()
        assert ours.max() + 1 - len(ids) == delta.item()


def test_times_of_a_video_are_those_of_the_frames_per_second_that_are_set(
    model: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    """A video of two frames a second, of which every second one is taken, counts as if four were."""
    media = FileMedia(str(tmp_path / "video.mp4"))
    Path(media.path).write_bytes(movie(["red", "lime", "blue", "white"], seconds_each=1.0, width=32, height=16))
    recipe = _recipe(model[1], "data.video.fps=4", "data.video.max_frames=8", "data.video.min_pixels=16")
    assert recipe.model.vision is not None
    items = VisionItemReader(recipe.model.vision, recipe.data).read_items("video", media)
    assert items.times == (0, 1, 3, 4)  # half a second each, in thirds


def test_clips_become_the_tokens_and_frames_of_the_processor(model: tuple[nn.Module, Path], tmp_path: Path) -> None:
    """Compare with `Qwen2_5OmniProcessor._get_num_audio_tokens` and its feature extractor; longer clips are cut."""
    recipe = _recipe(model[1])
    audio = recipe.model.audio
    assert audio is not None
    assert (recipe.data.audio.max_seconds, recipe.data.audio.long_clips) == (1, "cut")
    reader = AudioItemReader(audio, recipe.data)
    for length in (321, 480, 5900, 6561, 15841, 16000, 16160, 40000):
        media = write_clip(tmp_path / f"{length}.wav", length)  # a reader keeps the last clip by its path
        [grid] = reader.read_items("audio", media).grids
        extracted = clip_extractor()(
            wave(length), sampling_rate=RATE, padding="max_length", return_attention_mask=True, return_tensors="np"
        )
        frames = int(extracted.attention_mask.sum())
        assert grid == (frames, 1)
        cells = reader.load_cells("audio", media, 0, 1, grid)
        assert np.abs(cells - extracted.input_features[0].T[:frames]).max() < 1e-4
        features = (frames + audio.partial_cells) // audio.cells_per_feature
        assert features == ((frames - 1) // 2 + 1 - 2) // 2 + 1
    for length in (1, 160, 320):
        with pytest.raises(BadMediaError, match="at least 3, one LLM token"):
            reader.read_items("audio", write_clip(tmp_path / "clip.wav", length))


@pytest.mark.parametrize("prefix", ["", "thinker."])
def test_import_and_export_give_the_same_bits_and_leave_other_models_alone(prefix: str, tmp_path: Path) -> None:
    folder = save(qwen2_5_omni(), tmp_path / "model", torch.bfloat16)
    if prefix:
        path = folder / "model.safetensors"
        tensors = {f"{prefix}{name}": value for name, value in load_file(path).items()}
        others = {"talker.model.norm.weight": torch.randn(4), "token2wav.code2wav.bias": torch.randn(2, 3)}
        save_file({**tensors, **others}, path, {"format": "pt"})
        thinker = json.loads((folder / "config.json").read_text())
        whole = {key: HUB_CONFIG[key] for key in HUB_CONFIG if key != "thinker_config"}
        (folder / "config.json").write_text(json.dumps({**whole, "thinker_config": thinker}))
        (folder / "spk_dict.pt").write_bytes(b"voices")
    recipe = _recipe(folder)
    assert content(export_again(folder, recipe)) == content(folder)
    if prefix:
        checkpoint = open_newest_good(tmp_path / "run" / CHECKPOINTS_FOLDER, print)
        export_folder(recipe, checkpoint, tmp_path / "half", "fp16")
        types = {name: value.dtype for name, value in load_file(tmp_path / "half" / "model.safetensors").items()}
        assert types["thinker.lm_head.weight"] == torch.float16
        assert types["talker.model.norm.weight"] == torch.float32


def test_the_config_of_the_hub_is_that_of_the_paper(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", HUB_CONFIG)
    (folder / "preprocessor_config.json").write_text(json.dumps(HUB_PROCESSORS))
    recipe = recipe_from(folder, "data.seq_len=32768")
    vision, audio, llm, data = recipe.model.vision, recipe.model.audio, recipe.model.llm, recipe.data
    assert vision is not None
    assert audio is not None
    assert (vision.layers, vision.hidden, vision.ffn, vision.window) == (32, 1280, 3420, 8)
    assert (vision.time_positions_per_second, vision.patch_seconds) == (25, "stated")
    assert (audio.layers, audio.hidden, audio.mel_bins, audio.chunk, audio.positions) == (
        32,
        1280,
        128,
        200,
        "sinusoidal",
    )
    assert (llm.layers, llm.hidden, llm.vocab, llm.rope_sections) == (28, 3584, 152064, (16, 24, 24))
    assert (llm.rope_after_media, llm.tie_embeddings, llm.qkv_bias) == ("all", False, True)
    assert (data.image.min_pixels, data.image.max_pixels) == (3136, 12845056)
    assert (data.video.min_pixels, data.video.max_pixels, data.video.fps) == (100352, 602112, 2.0)
    assert (data.audio.max_seconds, data.audio.long_clips, data.audio.scheme) == (300, "cut", "dynamic")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"audio_config": {"dropout": 0.1}}, "thinker_config.audio_config.dropout: 0.1 is not supported yet"),
        ({"audio_config": {"output_dim": 1}}, "thinker_config.audio_config.output_dim: 1 is not supported yet"),
        ({"text_config": {"use_sliding_window": True}}, "thinker_config.text_config.use_sliding_window: true is not"),
        ({"vision_config": {"hidden_act": "relu"}}, 'thinker_config.vision_config.hidden_act: "relu" is not'),
        ({"num_experts": 8}, "thinker_config.num_experts: 8 is not supported yet"),
    ],
)
def test_others_are_rejected_by_the_key(changes: dict[str, object], text: str, tmp_path: Path) -> None:
    thinker = {**HUB_CONFIG["thinker_config"], **changes}
    with pytest.raises(RecipeError) as caught:
        recipe_from(write_config(tmp_path / "model", HUB_CONFIG, thinker_config=thinker))
    assert text in str(caught.value)


def test_tensors_that_are_of_no_model_are_named(tmp_path: Path) -> None:
    folder = save(qwen2_5_omni(), tmp_path / "model")
    path = folder / "model.safetensors"
    save_file({**load_file(path), "speaker.weight": torch.zeros(1)}, path, {"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"speaker\.weight: not a tensor of this model"):
        unit_stage(_recipe(folder), "audio")


@pytest.mark.slow
def test_conversations_of_the_tiny_model_are_what_its_processors_make_of_them(tmp_path: Path) -> None:
    """Compose the processor: as a whole it needs torchvision, for videos."""
    import transformers

    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["qwen2_5_omni"], folder, seed=3, num_train=FEW_CONVERSATIONS)
    recipe = tiny_recipe(folder)
    prepare = transformers.AutoImageProcessor.from_pretrained(folder)
    extract = transformers.AutoFeatureExtractor.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours, index = load_tokenizer(recipe.data.tokenizer_path), build_index(recipe)
    assert not index.quarantined
    conversations = folder / "conversations"
    rows = json.loads((conversations / "heldout.json").read_text())[:40]
    kinds = set()
    for number, row in enumerate(rows):
        counts: dict[str, list[int]] = {"<image>": [], "<audio>": []}
        if names := row.get("images"):
            grids = prepare([Image.open(conversations / name) for name in names])["image_grid_thw"]
            counts["<image>"] = [int(np.prod(np.asarray(grid))) // 4 for grid in grids]
        for name in row.get("audios", ()):
            wave = soundfile.read(conversations / name, dtype="float32")[0]
            mask = extract(wave, sampling_rate=RATE, padding="max_length", return_attention_mask=True).attention_mask
            counts["<audio>"].append(((int(np.sum(mask)) - 1) // 2 + 1 - 2) // 2 + 1)
        messages = [{"role": turn["role"], "content": _parts(turn["content"])} for turn in row["messages"]]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        for mark, border in (("<image>", "vision"), ("<audio>", "audio")):
            assert text.count(f"<|{border}_bos|>{mark}<|{border}_eos|>") == len(counts[mark])
            for count in counts[mark]:
                text = text.replace(mark, "<mark>" * count, 1)
            text = text.replace("<mark>", mark)
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(index.samples[number], index.media_features(number)).ids.tolist() == expected
        kinds.add((bool(counts["<image>"]), bool(counts["<audio>"])))
    assert len(kinds) == 4, "pictures, clips, both and text alone"


def _parts(content: str) -> list[dict[str, str]]:
    """Return a content with marks as parts."""
    pieces = re.split("(<image>|<audio>)", content)
    return [
        {"type": piece[1:-1]} if piece in ("<image>", "<audio>") else {"type": "text", "text": piece}
        for piece in pieces
        if piece
    ]
