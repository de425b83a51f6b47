"""Samples with audio: marks, lengths from headers, quarantine, and the payload of a step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from tokenizers import Tokenizer

from mmtrain.balance import Grouping
from mmtrain.data import ChatTokenizer, GroupStream, Loader, PayloadNeed, StepRequest, build_index
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.errors import DataError
from mmtrain.recipe.settings.modalities import AUDIO
from mmtrain.recipe.settings.schema import Recipe
from tests.data.archives import load_log_mels
from tests.data.rows import Row

AUDIO_UNIT = {"layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "mel_bins": 16, "max_frames": 400, "downsample": 4}
MakeRecipe = Callable[..., Recipe]


def _row(text: str, name: str, images: tuple[str, ...] = (), clips: tuple[str, ...] = ()) -> Row:
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "red"}]
    return {"id": name, "image": list(images), "audio": list(clips), "conversations": turns}


@pytest.fixture
def speech_recipe(tmp_path: Path, recipe: MakeRecipe, tokenizer_path: Path) -> MakeRecipe:
    """Write some clips, an image and rows, and make a recipe with an audio unit."""
    rng = np.random.default_rng(0)
    for name, seconds in {"short": 0.1, "long": 0.3, "endless": 5.0}.items():
        soundfile.write(tmp_path / f"{name}.wav", 0.1 * rng.standard_normal(round(8000 * seconds)), 8000)
    (tmp_path / "text.wav").write_text("no sound")
    Image.new("RGB", (16, 8)).save(tmp_path / "a.png")
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.add_special_tokens([AUDIO.placeholder])
    tokenizer.save(str(tmp_path / "speech.json"))

    def make(rows: list[Row], **data: Any) -> Recipe:
        data = {"tokenizer": tmp_path / "speech.json", "audio": {"max_seconds": 4.0}} | data
        plain = recipe(rows, **data).model_dump()
        plain["model"]["audio"] = AUDIO_UNIT
        return Recipe.model_validate(plain)

    return make


def test_lengths_and_marks(speech_recipe: MakeRecipe) -> None:
    rows = [
        _row("<audio>x<image><audio>", "both", ("a.png",), ("short.wav", "long.wav")),
        _row("1 + 2", "text"),
    ]
    made = speech_recipe(rows)
    index = build_index(made)
    items = index.lengths.items["audio"]
    assert items.first.tolist() == [0, 2, 2]
    assert (items.rows.tolist(), items.cols.tolist()) == ([16, 32], [1, 1])  # 10 and 30 frames, in whole features
    assert (items.tokens.tolist(), items.features.tolist()) == ([8, 16], [2, 4])
    assert index.media_features(0) == {"vision": [2], "audio": [2, 4]}
    assert index.unit_features(1, "audio") == []
    tokenizer = ChatTokenizer.load(made.data.tokenizer)
    (audio_id,), (image_id,) = tokenizer.item_ids["audio"], tokenizer.item_ids["vision"]
    ids = tokenizer.encode(index.samples[0], {"vision": [2], "audio": [2, 4]}).ids.tolist()
    assert len(ids) == index.lengths.tokens[0]
    assert ids[1:3] == [audio_id] * 2
    assert ids[4:10] == [image_id] * 2 + [audio_id] * 4
    assert tokenizer.prompt_ids(index.samples[0], {"vision": [2], "audio": [2, 4]}).tolist() == ids[:-2]


def test_every_kind_of_unusable_sample_is_quarantined(speech_recipe: MakeRecipe) -> None:
    rows = {
        "missing_audio": _row("<audio>", "0", clips=("gone.wav",)),
        "not_audio": _row("<audio>", "1", clips=("text.wav",)),
        "clip_too_long": _row("<audio>", "2", clips=("endless.wav",)),
        "audio_count": _row("<audio> and <audio>", "3", clips=("short.wav",)),
        "audio_path": _row("<audio>", "4", clips=("../short.wav",)),
        "good": _row("<audio>", "5", clips=("short.wav",)),
    }
    index = build_index(speech_recipe(list(rows.values())))
    assert [s.id for s in index.samples] == ["5"]
    assert {q.kind: q.id for q in index.quarantined} == {kind: r["id"] for kind, r in rows.items() if kind != "good"}


def test_without_an_audio_unit_clips_are_rejected_and_the_mark_is_text(recipe: MakeRecipe) -> None:
    index = build_index(recipe([_row("<audio>", "heard", clips=("short.wav",)), _row("what is <audio>?", "read")]))
    assert [s.id for s in index.samples] == ["read"]
    assert [q.kind for q in index.quarantined] == ["no_audio"]
    assert index.lengths.tokens[0] > 10  # the mark is text


def test_a_tokenizer_without_the_audio_token_is_named(
    speech_recipe: MakeRecipe, tokenizer_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"features of model\.audio: it lacks the special token <\|audio\|>"):
        build_index(speech_recipe([_row("x", "0")], tokenizer=tokenizer_path))
    assert json.loads((tmp_path / "train.json").read_text())


def test_text_cannot_forge_a_clip(speech_recipe: MakeRecipe) -> None:
    made = speech_recipe([_row("<|audio|>", "0")])
    tokenizer = ChatTokenizer.load(made.data.tokenizer)
    assert tokenizer.item_ids["audio"][0] not in tokenizer.encode(build_index(made).samples[0], {}).ids


def test_payload_follows_the_batch_meta(speech_recipe: MakeRecipe, tmp_path: Path) -> None:
    made = speech_recipe([_row("<audio><audio>", str(s), clips=("long.wav", "short.wav")) for s in range(4)])
    index = build_index(made)
    dp, needs = (
        {"vision": 1, "audio": 2, "llm": 1},
        (PayloadNeed("audio", 0, media=True), PayloadNeed("audio", 1), PayloadNeed("llm", 0, ids=True)),
    )
    stream = GroupStream(index.lengths, Grouping(made.data.seq_len, 100, 2), seed=0)
    with Loader(index, stream, made, StepRequest(0, dp, dict.fromkeys(dp, 1), needs)) as loader:
        data = next(loader)
    table = data.meta.items["audio"]
    item_numbers = table.microbatch(0, 0)
    assert data.encoders["audio"][0, 0].rows == tuple(table.rows[item_numbers].tolist())
    files = [tmp_path / ("long.wav", "short.wav")[p] for p in table.position[item_numbers]]
    expected = [
        load_log_mels(FileMedia(str(f)), n, 16) for f, n in zip(files, data.encoders["audio"][0, 0].rows, strict=True)
    ]
    assert data.encoders["audio"][0, 0].cells is not None
    assert np.array_equal(data.encoders["audio"][0, 0].cells, np.concatenate(expected))
    assert data.encoders["audio"][1, 0].cells is None
    assert len(data.text[0, 0].feature_positions["audio"]) == table.features.sum()
    assert set(data.encoders) == {"audio"}


def test_a_giant_clip_is_spread_over_the_ranks_of_its_encoder(speech_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Its five seconds are two thirds of all sound. An encoder that hears chunks may hear each part elsewhere."""
    rows = [_row("<audio>", str(s), clips=("long.wav",)) for s in range(8)]
    plain = speech_recipe([*rows, _row("<audio>", "giant", clips=("endless.wav",))], seq_len=1000).model_dump()
    plain["model"]["audio"] |= {"chunk": 20, "clip_end": "unpadded"}
    plain["data"]["audio"] |= {"max_seconds": 9.0, "item_seconds": 0.4}
    made = Recipe.model_validate(plain)
    index = build_index(made)
    stream = GroupStream(index.lengths, Grouping(1000, 1000, 2), seed=0)
    dp = {"vision": 1, "audio": 4, "llm": 1}
    needs = tuple(PayloadNeed("audio", replica, media=True) for replica in range(4))
    with Loader(index, stream, made, StepRequest(0, dp, dict.fromkeys(dp, 1), needs)) as loader:
        data = next(loader)
    table = data.meta.items["audio"]
    loads = np.bincount(table.replica, weights=table.tokens, minlength=4)
    assert len(table.tokens) == 8 + 13, "500 frames are twelve items of 40, and one of 20"
    assert loads.max() - loads.min() <= table.tokens.max()
    cells = np.concatenate([data.encoders["audio"][replica, 0].cells for replica in range(4)])
    is_giant = np.repeat(np.bincount(table.sample)[table.sample] > 1, table.rows)
    order = np.argsort(np.repeat(table.position, table.rows)[is_giant], kind="stable")
    whole = load_log_mels(FileMedia(str(tmp_path / "endless.wav")), 500, 16, silence_follows=True)
    assert np.array_equal(cells[is_giant][order], whole)


def test_a_clip_that_breaks_after_indexing_becomes_silence_and_is_quarantined(
    speech_recipe: MakeRecipe, tmp_path: Path
) -> None:
    made = speech_recipe([_row("<audio>", str(s), clips=("short.wav",)) for s in range(2)], max_bad_rate=1.0)
    index = build_index(made)
    (tmp_path / "short.wav").write_text("gone")
    stream = GroupStream(index.lengths, Grouping(16, 100, 2), seed=0)
    once = {"vision": 1, "audio": 1, "llm": 1}
    with Loader(index, stream, made, StepRequest(0, once, once, (PayloadNeed("audio", 0, media=True),))) as loader:
        data = next(loader)
    assert data.encoders["audio"][0, 0].cells is not None
    assert not data.encoders["audio"][0, 0].cells.any()
    assert {q.kind for q in data.quarantined} == {"not_audio"}
