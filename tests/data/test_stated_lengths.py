"""Stated lengths: grouping and planning see what the CSV file states."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmtrain.data import GroupStream, build_index
from mmtrain.errors import DataError, TooManyBadSamples
from mmtrain.recipe.settings.schema import Recipe

UNIT = {"layers": 1, "hidden": 32, "heads": 4, "ffn": 64}


def recipe(path: Path, text: str, **data: Any) -> Recipe:
    path.write_text(text, encoding="utf-8")
    return Recipe.model_validate(
        {
            "name": "stated",
            "model": {
                "vision": UNIT | {"downsample": "pixel_shuffle", "merge": 2, "class_token": True},
                "audio": UNIT | {"downsample": 5},
                "llm": UNIT | {"vocab": 64},
            },
            "data": {"sources": [{"path": path, "weight": 2.0}], "seq_len": 1000} | data,
            "train": {"steps": 1, "global_batch": 2, "optimizer": {"lr": 1e-3}},
        }
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lengths.csv"


def test_rows_become_samples_with_items(file: Path) -> None:
    index = build_index(recipe(file, "# stated\ntext,vision,audio,count\n10,2x16 4,25,2\n\n7,,,1  # only text\n"))
    lengths = index.lengths
    assert lengths.tokens.tolist() == [10 + 4 + 4 + 1 + 5] * 2 + [7]
    assert lengths.targets.tolist() == [10, 10, 7]
    vision, audio = lengths.items["vision"], lengths.items["audio"]
    assert vision.first.tolist() == [0, 3, 6, 6]
    assert vision.tokens.tolist() == [17, 17, 5] * 2  # each with its class token
    assert vision.features.tolist() == [4, 4, 1] * 2
    assert audio.first.tolist() == [0, 1, 2, 2]
    assert (audio.rows.tolist(), audio.tokens.tolist(), audio.features.tolist()) == ([50, 50], [25, 25], [5, 5])
    assert index.weights.tolist() == [2.0, 2.0, 2.0]


def test_a_resampler_makes_as_many_features_of_every_item(file: Path) -> None:
    settings = recipe(file, "text,vision\n10,2x16 4\n").model_dump()
    settings["model"]["vision"] |= {"downsample": "identity", "merge": 1, "class_token": False}
    settings["model"]["vision"]["projector"] |= {"kind": "resampler", "queries": 6}
    lengths = build_index(Recipe.model_validate(settings)).lengths
    assert lengths.tokens.tolist() == [10 + 3 * 6]
    assert (lengths.items["vision"].tokens.tolist(), lengths.items["vision"].features.tolist()) == (
        [16, 16, 4],
        [6] * 3,
    )


def test_a_generated_image_takes_context_tokens_in_the_llm(file: Path) -> None:
    settings = recipe(file, "text,generator\n10,64 2x256\n")
    plain = settings.model_dump() | {}
    plain["model"]["generator"] = {
        "kind": "unet", "widths": (8, 8, 8), "heads": (2, 2, 2), "layers": 1, "context_width": 8, "context_tokens": 7,
        "norm_groups": 4,
    }  # fmt: skip
    lengths = build_index(Recipe.model_validate(plain)).lengths
    images = lengths.items["generator"]
    assert lengths.tokens.tolist() == [10 + 3 * 7]
    assert (images.tokens.tolist(), images.features.tolist()) == ([64, 256, 256], [7, 7, 7])
    file.write_text("text,generator\n10,24\n", encoding="utf-8")
    with pytest.raises(DataError, match="24 tokens are not a multiple of the 16"):
        build_index(Recipe.model_validate(plain))


def test_lengths_are_grouped_as_samples_are(file: Path) -> None:
    settings = recipe(file, "count,text,vision\n20,100,16\n5,900,\n")
    index = build_index(settings)
    stream = GroupStream.of(settings, index)
    epoch = stream.epoch(0)
    assert np.bincount(epoch.samples).tolist() == [2] * 25


def test_two_files_differ_in_their_fingerprint(file: Path) -> None:
    first = build_index(recipe(file, "text\n1\n2\n")).fingerprint
    assert build_index(recipe(file, "text\n1\n3\n")).fingerprint != first


def test_samples_that_are_too_long_are_quarantined_and_counted(file: Path) -> None:
    text = "count,text\n98,10\n2,1001\n"
    index = build_index(recipe(file, text, max_bad_rate=0.02))
    assert len(index.lengths) == 98
    assert [(q.kind, q.id) for q in index.quarantined] == [("too_long", f"{file}:3")] * 2
    with pytest.raises(TooManyBadSamples, match=r"2 of 100 samples are unusable \(too_long 2\)"):
        build_index(recipe(file, text))


def test_where_all_samples_are_too_long_the_limit_is_named_once(file: Path) -> None:
    with pytest.raises(DataError, match=r"data\.seq_len: all 7 samples are longer than this") as caught:
        build_index(recipe(file, "count,text\n7,1001\n"))
    assert str(caught.value).count("too_long") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the columns are nothing; needed: text; allowed besides, once each: count, vision, audio"),
        ("text,video\n1,2\n", "the columns are text, video; needed: text"),
        ("text,text\n1,2\n", "the columns are text, text"),
        ("text\n", "no usable rows"),
        ("text,vision\n1\n", ":2: 1 values for the 2 columns text, vision"),
        ("text\n-1\n", ":2: text: found '-1'; allowed: a whole number from 0"),
        ("text\nmany\n", ":2: text: found 'many'"),
        ("count,text\n0,1\n", ":2: count: found '0'; allowed: a whole number from 1"),
        ("text,vision\n1,0x4\n", ":2: vision: found '0'"),
        ("text,vision\n1,4x\n", ":2: vision: found ''"),
        ("text,vision\n1,18\n", ":2: vision: 18 tokens are not a multiple of the 4"),
        ("text,count\n1,10000000\n1,10000000\n1,10000000\n", "more than 20,000,000 samples in all"),
    ],
)
def test_invalid_lengths_are_reported_with_their_line(file: Path, text: str, message: str) -> None:
    with pytest.raises(DataError) as error:
        build_index(recipe(file, text))
    assert message in str(error.value)
    assert str(error.value).startswith((str(file), "data.sources"))


def test_a_missing_file_of_lengths_is_rejected(file: Path) -> None:
    settings = recipe(file, "text\n1\n")
    file.unlink()
    with pytest.raises(DataError, match="cannot read the lengths: No such file"):
        build_index(settings)
