"""Qwen2-Audio from a folder computes what `transformers` computes with clips of any length."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor, nn

from mmtrain.data import build_index
from mmtrain.data.media.item_readers import AudioItemReader
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.errors import RecipeError
from mmtrain.families import FAMILIES
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.recipe import Recipe
from mmtrain.weights.tiny_model import write_tiny_model
from tests.families.configs import write_config
from tests.weights.comparison import (
    assert_equal_gradients,
    assert_equal_logits_and_loss,
    content,
    export_again,
    labels_of,
    rename_tensors,
    unit_stage,
)
from tests.weights.pretrained import AUDIO_TOKEN, VOCAB, clip_extractor, qwen2_audio, recipe_from, save, specs_of
from tests.weights.tiny_folders import FEW_CONVERSATIONS

RATE = 16000
# Samples of clips: an odd number of tokens, an even one after an odd number of frames, whole features, all positions.
LENGTHS = (5900, 6561, 9600, 16000)
HUB_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"], "audio_token_index": 151646, "ignore_index": -100,
    "model_type": "qwen2_audio", "torch_dtype": "bfloat16", "transformers_version": "4.38.1", "vocab_size": 156032,
    "audio_config": {
        "activation_dropout": 0.0, "activation_function": "gelu", "attention_dropout": 0.0, "d_model": 1280,
        "dropout": 0.0, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layerdrop": 0.0,
        "encoder_layers": 32, "init_std": 0.02, "initializer_range": 0.02, "max_source_positions": 1500,
        "model_type": "qwen2_audio_encoder", "num_mel_bins": 128, "scale_embedding": False, "torch_dtype": "bfloat16",
    },
    "text_config": {
        "intermediate_size": 11008, "max_position_embeddings": 8192, "model_type": "qwen2", "rms_norm_eps": 1e-05,
        "rope_theta": 10000, "sliding_window": 32768, "torch_dtype": "bfloat16", "use_mrope": False,
        "vocab_size": 156032,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """Make a tiny model, and its folder with the config of its feature extractor."""
    theirs = qwen2_audio()
    folder = save(theirs, tmp_path_factory.mktemp("qwen2_audio") / "model")
    clip_extractor().save_pretrained(folder)
    return theirs, folder


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("clips")
    return [_write_clip(folder / f"{length}.wav", length) for length in LENGTHS]


def _write_clip(path: Path, num_samples: int) -> Path:
    wave = 0.3 * np.random.default_rng(num_samples).standard_normal(num_samples)
    soundfile.write(path, wave.astype(np.float32), RATE, subtype="FLOAT")
    return path


def _read(recipe: Recipe, path: Path) -> tuple[int, Tensor, int]:
    """Return a clip's frames, how many they are, and how many features they become."""
    audio = recipe.model.audio
    assert audio is not None
    reader, media = AudioItemReader(audio, recipe.data), FileMedia(str(path))
    [grid] = reader.read_items("audio", media).grids
    cells = torch.from_numpy(reader.load_cells("audio", media, 0, 1, grid))
    return grid[0], cells, grid[0] // audio.cells_per_feature


def _logits_of_transformers(theirs: nn.Module, ids: Tensor, clips: list[Path]) -> Tensor:
    """Return the logits of one sample, whose clips the family's feature extractor prepares."""
    if not clips:
        return theirs(input_ids=ids[None]).logits[0]
    waves = [soundfile.read(clip, dtype="float32")[0] for clip in clips]
    extracted = clip_extractor()(waves, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
    inputs = {"input_features": extracted.input_features, "feature_attention_mask": extracted.attention_mask}
    logits: Tensor = theirs(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], **inputs).logits[0]
    return logits


def test_logits_loss_and_gradients_equal_those_of_transformers(
    model: tuple[nn.Module, Path], clips: list[Path]
) -> None:
    theirs, folder = model
    recipe = recipe_from(folder)
    audio, llm = unit_stage(recipe, "audio"), unit_stage(recipe, "llm")
    frames, cells, features = zip(*(_read(recipe, clip) for clip in clips), strict=True)
    assert [n % 2 for n in frames] == [1, 1, 1, 0], "silence follows all clips but the longest"
    generator = torch.Generator().manual_seed(7)

    def words(count: int) -> Tensor:
        return torch.randint(AUDIO_TOKEN + 1, VOCAB, (count,), generator=generator)

    marks = [torch.full((count,), AUDIO_TOKEN) for count in features]
    ids = [
        torch.cat([words(3), marks[0], words(2), marks[1], words(6)]),
        words(9),
        torch.cat([marks[2], words(4)]),
        torch.cat([words(2), marks[3], words(3)]),
    ]
    labels = labels_of(ids, AUDIO_TOKEN)
    of_samples = (clips[:2], [], clips[2:3], clips[3:])
    expected = [_logits_of_transformers(theirs, *sample) for sample in zip(ids, of_samples, strict=True)]
    packed = torch.cat(ids)
    places = (packed == AUDIO_TOKEN).nonzero().flatten()
    inputs = TextInput(tuple(map(len, ids)), packed, labels, {"audio": places})
    hidden = audio(None, EncoderInput(frames, (1,) * len(frames), torch.cat(cells)))
    assert_equal_logits_and_loss(llm, inputs, {"audio": hidden}, torch.cat(expected))
    frozen = {"audio.layers.0.positions"}
    ours: dict[str, Tensor] = {}
    for stage in (audio, llm):
        params = {f"{stage.unit}.{name}": param for name, param in stage.named_parameters()}
        assert {name for name, param in params.items() if not param.requires_grad} == frozen & params.keys()
        for name, spec in specs_of(stage).items():
            if name not in frozen:
                gradient = params[name].grad
                assert gradient is not None, name
                ours[name] = gradient.view(spec.full_shape)
    assert_equal_gradients(folder, theirs, ours, frozen)
    key_bias = audio.layers["1"].self_attention.linear_qkv.bias.view(4, 3, 8)[:, 1]  # type: ignore[union-attr, operator]
    key_gradient = ours["audio.layers.1.self_attention.linear_qkv.bias"].view(4, 3, 8)[:, 1]
    assert not key_bias.any()
    assert not key_gradient.any()
    theirs.zero_grad()


@pytest.mark.slow
def test_clips_of_any_length_become_the_tokens_of_the_processor(model: tuple[nn.Module, Path], tmp_path: Path) -> None:
    """Compare with `Qwen2AudioProcessor._process_audio`, from headers alone."""
    recipe = recipe_from(model[1])
    assert recipe.data.audio.max_seconds == 1
    audio = recipe.model.audio
    assert audio is not None
    reader = AudioItemReader(audio, recipe.data)
    extract = clip_extractor()
    rng = np.random.default_rng(1)
    lengths = sorted({1, 160, 161, 320, 321, 15999, 16000, *rng.integers(1, RATE + 1, 1000).tolist()})
    for length in lengths:
        path = tmp_path / "clip.wav"
        soundfile.write(path, np.zeros(length, dtype=np.int16), RATE)
        mask_length = -(-length // 160)  # as the masks below show
        tokens = (((mask_length - 1) // 2 + 1) - 2) // 2 + 1
        media = FileMedia(str(path))
        if tokens < 1:
            with pytest.raises(BadMediaError, match="at least 4, one LLM token"):
                reader.read_items("audio", media)
            continue
        [(frames, columns)] = reader.read_items("audio", media).grids
        assert (frames // audio.cells_per_feature, columns) == (tokens, 1), length
    some = [np.zeros(length, dtype=np.float32) for length in (1, 160, 161, 8000, 15999, 16000)]
    masks = extract(some, sampling_rate=RATE, return_attention_mask=True, return_tensors="np").attention_mask
    assert masks.sum(axis=1).tolist() == [1, 1, 2, 50, 100, 100]


def test_frames_equal_those_of_the_feature_extractor(model: tuple[nn.Module, Path], clips: list[Path]) -> None:
    recipe = recipe_from(model[1])
    for clip in clips:
        frames, cells, _ = _read(recipe, clip)
        wave = soundfile.read(clip, dtype="float32")[0]
        expected = clip_extractor()(wave, sampling_rate=RATE, return_tensors="np").input_features[0].T
        assert np.abs(cells.numpy() - expected[:frames]).max() < 1e-4


@pytest.mark.parametrize(
    "spelling",
    [
        {},  # as transformers 5 writes
        {
            "language_model.model.": "model.language_model.",
            "language_model.lm_head.": "lm_head.",
            "audio_tower.": "model.audio_tower.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        },
    ],
)
def test_import_and_export_give_the_same_bits_in_every_spelling(spelling: dict[str, str], tmp_path: Path) -> None:
    folder = save(qwen2_audio(), tmp_path / "model", torch.bfloat16)
    rename_tensors(folder, spelling)
    assert content(export_again(folder, recipe_from(folder))) == content(folder)


def test_the_config_of_the_hub_is_that_of_the_paper(tmp_path: Path) -> None:
    recipe = recipe_from(write_config(tmp_path / "model", HUB_CONFIG), "data.seq_len=2048")
    audio, llm = recipe.model.audio, recipe.model.llm
    assert audio is not None
    assert (audio.layers, audio.hidden, audio.mel_bins, audio.max_frames) == (32, 1280, 128, 3000)
    assert (llm.layers, llm.hidden, llm.ffn, llm.vocab, llm.kv_heads) == (32, 4096, 11008, 156032, 32)
    assert (recipe.data.audio.scheme, recipe.data.audio.max_seconds) == ("dynamic", 30)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"audio_config": {"dropout": 0.1}}, "audio_config.dropout: 0.1 is not supported yet"),
        ({"audio_config": {"activation_function": "relu"}}, 'audio_config.activation_function: "relu" is not'),
        ({"audio_config": {"n_window": 100}}, "audio_config.n_window: 100 is not supported yet"),
        ({"text_config": {"model_type": "llama"}}, 'text_config.model_type: "llama" is not supported yet'),
    ],
)
def test_others_are_rejected_by_the_key(changes: dict[str, object], text: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from(write_config(tmp_path / "model", HUB_CONFIG, **changes))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"feature_size": 80}, "feature_size: 80 is not supported yet; supported: 20"),
        ({"hop_length": 100}, "hop_length: 100 is not supported yet; supported: 160"),
        ({"feature_extractor_type": "EncodecFeatureExtractor"}, "supported: WhisperFeatureExtractor"),
    ],
)
def test_other_feature_extractors_are_rejected(
    changes: dict[str, object], text: str, model: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    extractor = json.loads((model[1] / "preprocessor_config.json").read_text())
    (tmp_path / "config.json").write_bytes((model[1] / "config.json").read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(extractor | changes))
    with pytest.raises(RecipeError) as caught:
        recipe_from(tmp_path)
    assert text in str(caught.value)


def test_the_template_of_the_release_gives_the_ids_of_its_processor(tmp_path: Path) -> None:
    """Clips are numbered in it, and each has a token before and one after its features."""
    from transformers import AutoFeatureExtractor, AutoTokenizer, Qwen2AudioProcessor

    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["qwen2_audio"], folder, seed=1, num_train=FEW_CONVERSATIONS)
    vocabulary = (folder / "tokenizer.json").read_text()
    for token, of_release in (("audio", "AUDIO"), ("image", "audio_bos"), ("video", "audio_eos")):
        vocabulary = vocabulary.replace(f'"<{token}>"', f'"<|{of_release}|>"')
    (folder / "tokenizer.json").write_text(vocabulary)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["extra_special_tokens"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    parts = AutoFeatureExtractor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    processor = Qwen2AudioProcessor(*parts)
    (folder / "chat_template.jinja").write_text(processor.chat_template)
    heldout = folder / "conversations" / "heldout.json"
    recipe = recipe_from(folder, f"data.sources.0.path={heldout}", f"data.tokenizer={folder}", "data.seq_len=512")
    tokenizer, index = load_tokenizer(recipe.data.tokenizer_path), build_index(recipe)
    assert not index.quarantined
    for number, row in enumerate(json.loads(heldout.read_text())[:20]):
        question, answer = row["messages"]
        content = [{"type": "audio", "audio_url": name} for name in row.get("audios", ())]
        content.append({"type": "text", "text": question["content"].replace("<audio>", "")})
        text = processor.apply_chat_template([{"role": "user", "content": content}, answer], tokenize=False)
        assert text.count("<|audio_bos|><|AUDIO|><|audio_eos|>") == len(content) - 1
        waves = [soundfile.read(heldout.parent / name, dtype="float32")[0] for name in row.get("audios", ())]
        expected = processor(text=text, audio=waves or None, sampling_rate=RATE, return_tensors="np")["input_ids"][0]
        encoded = tokenizer.encode(index.samples[number], index.media_features(number))
        assert encoded.ids.tolist() == expected.tolist()
