"""Qwen3-Omni's thinker from a folder computes what `transformers` computes with pictures, videos and clips."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from torch import Tensor, nn

from mmtrain.checkpoint import open_newest_good
from mmtrain.data import build_index
from mmtrain.data.loading.batch_builder import find_media_positions
from mmtrain.data.media.image_grids import MediumGrid
from mmtrain.data.media.item_readers import AudioItemReader, VisionItemReader
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.errors import RecipeError
from mmtrain.families import FAMILIES
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.planning.whatif import plan_again
from mmtrain.recipe import Recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.weights import export_folder
from mmtrain.weights.tiny_model import write_tiny_model
from tests.data.archives import movie
from tests.families.configs import write_config
from tests.flow.runs import refuse, run_all
from tests.flow.tiny_families import TINY_FAMILIES, load_tiny_recipe
from tests.plans import plan_recipe as planner
from tests.weights.comparison import (
    assert_equal_gradients,
    assert_equal_logits_and_loss,
    content,
    export_again,
    full_gradients,
    labels_of,
    unit_stage,
)
from tests.weights.omni_media import FIRST_WORD, RATE, in_squares, parts_of, read_clips, wave, words
from tests.weights.pretrained import (
    IMAGE_TOKEN,
    MERGE,
    OMNI_AUDIO_TOKEN,
    OMNI_BORDERS,
    POSITIONS_PER_SECOND,
    VIDEO_TOKEN,
    clip_extractor,
    qwen3_omni_moe,
    qwen3_omni_thinker,
    recipe_from,
    save,
)
from tests.weights.test_tiny_model import tiny_recipe

UNITS = ("vision", "audio", "llm")
TOKENS = {"image": IMAGE_TOKEN, "video": VIDEO_TOKEN, "audio": OMNI_AUDIO_TOKEN}
# Frames (in patches), rows and columns of pictures and videos; samples of clips. A clip of less than a chunk of 100
# frames is alone in its sample: `transformers` pads it otherwise, and its convolutions see that.
Medium = tuple[str, Any]
SAMPLES: tuple[tuple[Medium, ...], ...] = (
    (("image", (1, 4, 6)), ("image", (1, 2, 2))),
    (),
    (("audio", 16_160), ("video", (3, 4, 4)), ("image", (1, 6, 10)), ("audio", 20_300)),
    (("audio", 40_003),),
    (("audio", 4_900), ("image", (1, 2, 2))),
    (("video", (2, 2, 6)), ("image", (1, 2, 4))),
)
SECONDS_PER_PATCH = 2.0  # of which a patch takes a whole number of positions
HUB_TEXT: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 768, "max_position_embeddings": 65536,
    "mlp_only_layers": [], "model_type": "qwen3_omni_moe_text", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "interleaved": True, "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
        "type": "default",
    },
    "rope_theta": 1000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 0,
    "sliding_window": None, "use_cache": True, "use_qk_norm": True, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
HUB_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "assistant_token_id": 77091,
    "enable_audio_output": True, "im_end_token_id": 151645, "im_start_token_id": 151644,
    "model_type": "qwen3_omni_moe", "system_token_id": 8948, "transformers_version": "4.57.0.dev0",
    "tts_bos_token_id": 151672, "tts_eos_token_id": 151673, "tts_pad_token_id": 151671, "user_token_id": 872,
    "talker_config": {"model_type": "qwen3_omni_moe_talker"}, "code2wav_config": {"hidden_size": 1024},
    "thinker_config": {
        "audio_end_token_id": 151670, "audio_start_token_id": 151669, "audio_token_id": 151675,
        "dtype": "bfloat16", "image_token_id": 151655, "initializer_range": 0.02,
        "model_type": "qwen3_omni_moe_thinker", "position_id_per_seconds": 13, "seconds_per_chunk": 2,
        "user_token_id": 872, "video_token_id": 151656, "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
        "audio_config": {
            "activation_dropout": 0, "activation_function": "gelu", "attention_dropout": 0, "conv_chunksize": 500,
            "d_model": 1280, "downsample_hidden_size": 480, "dropout": 0, "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120, "encoder_layers": 32, "initializer_range": 0.02, "max_source_positions": 1500,
            "model_type": "qwen3_omni_moe_audio_encoder", "n_window": 50, "n_window_infer": 800,
            "num_hidden_layers": 32, "num_mel_bins": 128, "output_dim": 2048, "scale_embedding": False,
        },
        "text_config": HUB_TEXT,
        "vision_config": {
            "apply_vit_abs_pos_embed": True, "deepstack_visual_indexes": [8, 16, 24], "depth": 27,
            "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "image_size": 768, "in_channels": 3, "in_chans": 3,
            "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_omni_moe_vision_encoder",
            "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16,
            "spatial_merge_size": 2, "spatial_patch_size": 16, "temporal_patch_size": 2, "tokens_per_second": 2,
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """Make a tiny model, and its folder."""
    theirs = qwen3_omni_moe()
    return theirs, save(theirs, tmp_path_factory.mktemp("qwen3_omni_moe") / "model")


def _recipe(folder: Path, *overrides: str) -> Recipe:
    return recipe_from(folder, "data.image.min_pixels=16", "data.image.max_pixels=576", *overrides)


def _num_features(medium: Medium) -> int:
    kind, size = medium
    if kind != "audio":
        return int(np.prod(size)) // MERGE**2
    whole, rest = divmod(size // 160, 100)
    return 13 * whole + -(-rest // 8)


def _ids(number: int) -> Tensor:
    parts = [words(3, number)]
    for place, medium in enumerate(SAMPLES[number]):
        before, after = OMNI_BORDERS["audio" if medium[0] == "audio" else "vision"]
        features = torch.full((_num_features(medium),), TOKENS[medium[0]])
        between = words(place, 10 * number + place)  # none before the first
        parts += [between, torch.tensor([before]), features, torch.tensor([after])]
    return torch.cat([*parts, words(6, number + 20)])


def _their_inputs(number: int, ids: Tensor, pixels: dict[Medium, Tensor]) -> dict[str, Tensor]:
    """Return the arguments of `transformers` for a sample, each of whose clips the extractor prepares by itself."""
    arguments = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
    for kind, argument in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        media = [medium for medium in SAMPLES[number] if medium[0] == kind]
        if media:
            squares = [in_squares(pixels[medium], *medium[1][1:]) for medium in media]
            arguments |= {
                argument: torch.cat(squares),
                f"{kind}_grid_thw": torch.tensor([grid for _, grid in media]),
            }
            if kind == "video":
                arguments["video_second_per_grid"] = torch.full((len(media),), SECONDS_PER_PATCH)
    mels = [
        clip_extractor()(wave(size), sampling_rate=RATE, padding=True, truncation=False, return_tensors="pt")[
            "input_features"
        ][0]
        for kind, size in SAMPLES[number]
        if kind == "audio"
    ]
    if mels:
        longest = max(of_clip.shape[1] for of_clip in mels)
        padded = [nn.functional.pad(of_clip, (0, longest - of_clip.shape[1])) for of_clip in mels]
        masks = [torch.arange(longest) < of_clip.shape[1] for of_clip in mels]
        arguments |= {"input_features": torch.stack(padded), "feature_attention_mask": torch.stack(masks).long()}
    return arguments


def _positions(number: int, ids: Tensor) -> Tensor:
    step = int(SECONDS_PER_PATCH * POSITIONS_PER_SECOND)
    grids = [
        MediumGrid([*range(0, t * step, step)], rows // MERGE, cols // MERGE)
        for kind, (t, rows, cols) in ((kind, grid) for kind, grid in SAMPLES[number] if kind != "audio")
    ]
    return torch.from_numpy(find_media_positions(ids.numpy(), (IMAGE_TOKEN, VIDEO_TOKEN), grids, behind_times=True))


@pytest.mark.parametrize(
    ("item_seconds", "cells"),
    [(32, [[112], [136], [264], [30]]), (2, [[112], [136], [208, 56], [30]])],
    ids=["whole", "parts"],
)
def test_logits_loss_and_gradients_equal_those_of_transformers(
    item_seconds: float, cells: list[list[int]], model: tuple[nn.Module, Path], tmp_path: Path
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
    clips = read_clips(recipe, tmp_path, [size for sample in SAMPLES for kind, size in sample if kind == "audio"])
    assert list(clips.rows) == [rows_of_item for of_clip in cells for rows_of_item in of_clip]
    features = {"vision": vision(None, images), "audio": audio(None, clips)}
    assert_equal_logits_and_loss(llm, text, features, expected)
    assert_equal_gradients(folder, theirs, full_gradients(vision) | full_gradients(audio) | full_gradients(llm))
    theirs.zero_grad()


def test_positions_are_those_of_get_rope_index(model: tuple[nn.Module, Path]) -> None:
    rng = np.random.default_rng(0)
    theirs: Any = model[0]
    # Before `transformers` 5.24 it was a method of the whole model.
    find_positions = theirs.model.get_rope_index if hasattr(theirs.model, "get_rope_index") else theirs.get_rope_index
    for seed in range(100):
        parts, media, grids, seconds, mel_lengths = [words(int(rng.integers(1, 4)), seed)], [], {}, [], []
        kinds = [*rng.choice(["image", "video", "audio"], rng.integers(0, 5)), "image"]  # clips alone count on
        for kind in kinds:
            size: Any = int(rng.integers(400, 4 * RATE))
            if kind == "audio":
                mel_lengths.append(size // 160)
            else:
                size = (int(rng.integers(1, 6)) if kind == "video" else 1, *(2 * rng.integers(1, 5, 2)).tolist())
                grids.setdefault(kind, []).append(size)
                times = [*range(size[0])]
            if kind == "video":
                seconds.append(float(rng.integers(1, 5)))
                times = [int(second * seconds[-1] * POSITIONS_PER_SECOND) for second in times]
            if kind != "audio":
                media.append(MediumGrid(times, size[1] // MERGE, size[2] // MERGE))
            before, after = OMNI_BORDERS["audio" if kind == "audio" else "vision"]
            features = torch.full((_num_features((str(kind), size)),), TOKENS[str(kind)])
            parts += [torch.tensor([before]), features, torch.tensor([after]), words(int(rng.integers(0, 3)), seed)]
        ids = torch.cat([*parts, words(2, seed)])
        their_grids = {f"{kind}_grid_thw": torch.tensor(of_kind) for kind, of_kind in grids.items()}
        expected, delta = find_positions(
            ids[None], attention_mask=torch.ones_like(ids)[None], audio_seqlens=torch.tensor(mel_lengths),
            second_per_grids=torch.tensor(seconds), **their_grids,
        )  # fmt: skip
        ours = find_media_positions(ids.numpy(), (IMAGE_TOKEN, VIDEO_TOKEN), media, behind_times=True)
        assert ours.tolist() == expected[:, 0].tolist()
        assert ours.max() + 1 - len(ids) == delta.item()


def test_a_patch_of_a_video_takes_a_whole_number_of_positions(model: tuple[nn.Module, Path], tmp_path: Path) -> None:
    media = FileMedia(str(tmp_path / "video.mp4"))
    Path(media.path).write_bytes(movie(["red", "lime", "blue", "white"], seconds_each=1.0, width=32, height=16))
    recipe = _recipe(model[1], "data.video.fps=2", "data.video.max_frames=8", "data.video.min_pixels=16")
    assert recipe.model.vision is not None
    items = VisionItemReader(recipe.model.vision, recipe.data).read_items("video", media)
    assert items.times == (0, 3, 6, 9)  # two frames, of which two are of a second, and three positions a second
    with pytest.raises(
        RecipeError, match=r"data\.video\.fps: found 4, of which 3 .* is 1\.5; allowed: those that make"
    ):
        _recipe(model[1], "data.video.fps=4")
    with pytest.raises(RecipeError, match=r"data\.video\.fps: is not set, but videos are timed by it"):
        _recipe(model[1], "data.video.fps=null")


def _whole_model() -> nn.Module:
    """Make a Qwen3-Omni with what speaks, of few weights."""
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    grouped = {**small, "num_key_value_heads": 1}
    talker = {
        "thinker_hidden_size": 48, "accept_hidden_layer": 1, "spatial_merge_size": MERGE, "num_code_groups": 2,
        "text_config": {**grouped, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
                        "shared_expert_intermediate_size": 8, "vocab_size": 40},
        "code_predictor_config": {**grouped, "head_dim": 8, "vocab_size": 20, "num_code_groups": 2},
    }  # fmt: skip
    vocoder = {
        **grouped, "codebook_size": 20, "num_quantizers": 2, "decoder_dim": 16, "upsample_rates": [2],
        "upsampling_ratios": [2],
    }  # fmt: skip
    config = Qwen3OmniMoeConfig(
        thinker_config=qwen3_omni_thinker(2, (0, 2)), talker_config=talker, code2wav_config=vocoder
    )
    return Qwen3OmniMoeForConditionalGeneration(config)


@pytest.mark.parametrize("is_whole", [False, True])
def test_import_and_export_give_the_same_bits_and_leave_other_models_alone(is_whole: bool, tmp_path: Path) -> None:
    folder = save(_whole_model() if is_whole else qwen3_omni_moe(), tmp_path / "model", torch.bfloat16)
    before = content(folder)
    assert content(export_again(folder, _recipe(folder))) == before
    spoken = [name for name in before if name.startswith(("talker.", "code2wav."))]
    assert bool(spoken) == is_whole
    assert {name.partition(".")[0] for name in spoken} == ({"talker", "code2wav"} if is_whole else set())


def test_the_config_of_the_hub_is_that_of_the_paper(tmp_path: Path) -> None:
    recipe = recipe_from(write_config(tmp_path / "model", HUB_CONFIG), "data.seq_len=32768")
    vision, audio, llm, data = recipe.model.vision, recipe.model.audio, recipe.model.llm, recipe.data
    assert vision is not None
    assert audio is not None
    assert llm.moe is not None
    assert (vision.layers, vision.hidden, vision.ffn, vision.deepstack) == (27, 1152, 4304, (8, 16, 24))
    assert (vision.time_positions_per_second, vision.patch_seconds) == (13, "stated_exactly")
    assert (audio.layers, audio.hidden, audio.conv_channels, audio.chunk, audio.window_chunks) == (
        32,
        1280,
        480,
        100,
        8,
    )
    assert (llm.layers, llm.hidden, llm.moe.experts, llm.moe.top_k, llm.moe.ffn) == (48, 2048, 128, 8, 768)
    assert (llm.rope_sections, llm.rope_interleaved, llm.rope_after_media) == ((24, 20, 20), True, "all")
    assert (data.video.min_pixels, data.video.max_pixels, data.video.fps) == (131072, 786432, 1.0)
    assert (data.audio.max_seconds, data.audio.long_clips, data.audio.item_seconds) == (300, "reject", 32)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"audio_config": {"dropout": 0.1}}, "thinker_config.audio_config.dropout: 0.1 is not supported yet"),
        ({"audio_config": {"n_window": 20}}, "thinker_config.audio_config.n_window: 20 is not supported yet"),
        ({"audio_config": {"n_window_infer": 50}}, "audio_config.n_window_infer: found less than a chunk of 100"),
        ({"audio_config": {"output_dim": 1}}, "thinker_config.audio_config.output_dim: 1 is not supported yet"),
        ({"text_config": {"attention_bias": True}}, "thinker_config.text_config.attention_bias: true is not supported"),
        (
            {"text_config": {**HUB_TEXT, "shared_expert_intermediate_size": 8}},
            "text_config.shared_expert_intermediate_size: 8 is not supported yet",
        ),
        (
            {"vision_config": {"hidden_act": "relu"}},
            'thinker_config.vision_config.hidden_act: "relu" is not supported yet',
        ),
        ({"use_audio_in_video": True}, "thinker_config.use_audio_in_video: true is not supported yet"),
    ],
)
def test_others_are_rejected_by_the_key(changes: dict[str, object], text: str, tmp_path: Path) -> None:
    thinker = {**HUB_CONFIG["thinker_config"], **changes}
    with pytest.raises(RecipeError) as caught:
        recipe_from(write_config(tmp_path / "model", HUB_CONFIG, thinker_config=thinker))
    assert text in str(caught.value)


def _extract_each_alone(patch: pytest.MonkeyPatch) -> None:
    """Let the feature extractor prepare the clips of a call one by one, as training reads them."""
    from transformers import WhisperFeatureExtractor

    extract = WhisperFeatureExtractor.__call__

    def extract_apart(self: Any, clips: list[np.ndarray], **options: Any) -> dict[str, Tensor]:
        outputs = [extract(self, clip, **{**options, "return_tensors": "pt"}) for clip in clips]
        mels = [output["input_features"][0].T for output in outputs]
        masks = [output["attention_mask"][0] for output in outputs]
        padded = nn.utils.rnn.pad_sequence(mels, batch_first=True)
        return {
            "input_features": padded.transpose(1, 2),
            "attention_mask": nn.utils.rnn.pad_sequence(masks, batch_first=True),
        }

    patch.setattr(WhisperFeatureExtractor, "__call__", extract_apart)


def _processor(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """Open the folder's processor without that of videos, which needs torchvision."""
    import transformers
    from transformers.processing_utils import ProcessorMixin

    patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda self, name, argument: type(argument))
    _extract_each_alone(patch)
    processor = transformers.Qwen3OmniMoeProcessor(
        image_processor=transformers.AutoImageProcessor.from_pretrained(folder),
        feature_extractor=transformers.AutoFeatureExtractor.from_pretrained(folder),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        chat_template=(folder / "chat_template.jinja").read_text(encoding="utf-8"),
    )
    processor.video_processor = SimpleNamespace(merge_size=MERGE)  # all that is asked of it where there are no videos
    return processor


def _picture(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.copy()


@pytest.mark.parametrize("number", [20, pytest.param(500, marks=pytest.mark.long)])
def test_conversations_of_the_tiny_model_are_what_its_processor_makes_of_them(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare ids, the numbers of features and log-mel frames; pixels are those of Qwen3-VL."""
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["qwen3_omni_moe"], folder, seed=3, num_train=number)
    conversations = folder / "conversations"
    recipe = tiny_recipe(folder, f"data.sources.0.path={conversations / 'train.json'}")
    processor, index = _processor(folder, monkeypatch), build_index(recipe)
    tokenizer, audio = load_tokenizer(recipe.data.tokenizer_path), recipe.model.audio
    assert not index.quarantined
    assert audio is not None
    reader, kinds = AudioItemReader(audio, recipe.data), set()
    for place, row in enumerate(json.loads((conversations / "train.json").read_text())):
        pictures = [_picture(conversations / name) for name in row.get("images", ())]
        clips = [conversations / name for name in row.get("audios", ())]
        messages = [{"role": turn["role"], "content": parts_of(turn["content"])} for turn in row["messages"]]
        expected = processor(
            text=[processor.tokenizer.apply_chat_template(messages, tokenize=False)], images=pictures or None,
            audio=[soundfile.read(clip, dtype="float32")[0] for clip in clips] or None, return_tensors="pt",
        )  # fmt: skip
        encoded = tokenizer.encode(index.samples[place], index.media_features(place))
        assert encoded.ids.tolist() == expected["input_ids"][0].tolist()
        for clip, mels, mask in zip(
            clips, expected.get("input_features", ()), expected.get("feature_attention_mask", ()), strict=True
        ):
            media = FileMedia(str(clip))
            [grid] = reader.read_items("audio", media).grids
            cells = reader.load_cells("audio", media, 0, 1, grid)
            frames = int(mask.sum())
            assert grid == (audio.count_cells(frames), 1)
            rows = np.arange(frames)
            assert np.abs(cells[rows // 100 * 104 + rows % 100] - mels.T[:frames].numpy()).max() < 2e-4
        kinds.add((bool(pictures), bool(clips)))
    assert {(True, False), (False, True), (True, True)} <= kinds, "pictures, clips, and both"


@pytest.mark.slow
def test_adapters_on_experts_and_both_projectors_train_and_are_merged(tmp_path: Path) -> None:
    tiny, folder, out = TINY_FAMILIES["qwen3_omni_moe"], tmp_path / "model", tmp_path / "out"
    tiny.write(folder)
    targets = ["llm.*linear_qkv", "llm.*experts.*.linear_fc1", "audio.*linear_proj", "*.projector.linear_1"]
    lora = f"train.lora={{rank: 4, targets: {json.dumps(targets)}}}"
    parallel = "{placement: disaggregated, vision: {tp: 1, dp: 1}, audio: {tp: 1, dp: 1}, llm: {tp: 1, pp: 1, dp: 1}}"
    loaded = load_tiny_recipe(folder, parallel, lora)
    request = TrainRequest(loaded, planner, plan_again, "cpu-core", 3, tmp_path / "run")
    assert run_all(*[request] * 3) == [""] * 3
    checkpoint = open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse)
    export_folder(load_run_recipe(request.run_dir), checkpoint, out)
    before, after = content(folder), content(out)
    changed = {name for name in before if before[name] != after[name]}
    assert before.keys() == after.keys()
    assert {name.partition(".")[0] for name in changed} == {"audio_tower", "visual", "model"}
    assert all(re.search(r"(q|k|v|gate|up)_proj|out_proj|proj1|mlp\.0\.weight", name) for name in changed)
    with torch.no_grad():
        theirs = tiny.loss(tiny.open(out), out, request.recipe).item()
    assert read_metrics(request.run_dir)[-1]["val_loss"] == pytest.approx(theirs, rel=1e-4)
