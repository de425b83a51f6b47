"""Several encoders of one modality: each encodes every item, and their features of an item follow one another."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmtrain.balance import assign
from mmtrain.data import BatchBuilder, ChatTokenizer, PayloadNeed, build_index
from mmtrain.data.index.data_check import check_sources_for_recipe
from mmtrain.errors import DataError
from mmtrain.recipe.settings.schema import Recipe
from tests.data.archives import movie, png
from tests.data.rows import Row, row

MakeRecipe = Callable[..., Recipe]
TILES = {"scheme": "tiles", "tile": 16, "max_tiles": 4}
FOUR = {"max_frames": 4}
SHAPE = {"layers": 1, "hidden": 8, "heads": 1, "ffn": 8}
FINE = SHAPE | {"modality": "vision", "patch": 4, "max_side": 16}  # the short form of the fixture has patches of 8


@pytest.fixture
def two_encoders(tmp_path: Path, recipe: MakeRecipe) -> MakeRecipe:
    """Write images and a video; make a recipe that reads rows of them with the encoders `vision` and `fine`."""
    for name, size in {"wide.png": (32, 16), "small.png": (8, 8), "tall.png": (16, 48)}.items():
        (tmp_path / name).write_bytes(png("red", *size))
    (tmp_path / "four.mp4").write_bytes(movie(["red", "lime", "blue", "white"]))

    def make(rows: list[Row], **data: Any) -> Recipe:
        plain = recipe(rows, **{"image": TILES, "seq_len": 512} | data).model_dump()
        plain["model"]["encoders"] = {"fine": FINE}
        return Recipe.model_validate(plain)

    return make


def test_an_image_costs_the_tokens_of_both_encoders(two_encoders: MakeRecipe) -> None:
    made = two_encoders([row("a<image>b<image>", "red", "wide.png", "tall.png"), row("<image>", "red", "small.png")])
    index = build_index(made)
    vision, fine = index.lengths.items["vision"], index.lengths.items["fine"]
    assert list(index.lengths.items) == ["vision", "fine"]
    assert vision.first.tolist() == fine.first.tolist() == [0, 7, 8]
    assert (set(vision.features.tolist()), set(fine.features.tolist())) == ({4}, {16})
    assert index.media_features(0) == {"vision": [3 * 20, 4 * 20]}
    tokenizer = ChatTokenizer.load(made.data.tokenizer_path)
    for number, sample in enumerate(index.samples):
        ids = tokenizer.encode(sample, index.media_features(number)).ids
        assert len(ids) == index.lengths.tokens[number]
        features = sum(index.unit_features(number, "vision")) + sum(index.unit_features(number, "fine"))
        assert np.sum(ids == tokenizer.item_ids["vision"][0]) == features


def test_features_of_an_item_stand_one_encoder_after_another(two_encoders: MakeRecipe) -> None:
    rows = [row("<image>", "red", "small.png"), row("a<image>b<image>", "red", "wide.png", "tall.png"), row("c", "d")]
    made = two_encoders(rows)
    index = build_index(made)
    dp = {"vision": 1, "fine": 2, "llm": 1}
    num_microbatches = {"vision": 1, "fine": 2, "llm": 1}  # spread over four microbatches, and yet in order in the LLM
    meta = assign(0, 0, [np.array([1, 2, 0])], index.lengths, dp, num_microbatches)
    needs = (
        PayloadNeed("llm", 0, ids=True, labels=True),
        PayloadNeed("vision", 0, media=True),
        *(PayloadNeed("fine", replica, media=True) for replica in (0, 1)),
    )
    step = BatchBuilder(index, made, needs, num_microbatches).build(meta)
    text = step.text[0, 0]
    assert text.ids is not None
    image_id = ChatTokenizer.load(made.data.tokenizer_path).item_ids["vision"][0]
    places = np.flatnonzero(text.ids == image_id).reshape(8, 20)  # items of the two samples with images
    assert text.feature_positions["vision"].tolist() == places[:, :4].ravel().tolist()
    assert text.feature_positions["fine"].tolist() == places[:, 4:].ravel().tolist()
    cells = [payload.cells for payloads in step.encoders.values() for payload in payloads.values()]
    assert sorted(len(c) for c in cells if c is not None)[-1] == 8 * 4  # all items of `vision` in one microbatch
    assert {c.shape[1] for c in cells if c is not None} == {3 * 8**2, 3 * 4**2}
    assert not step.quarantined


def test_a_microbatch_of_text_alone_has_no_features(two_encoders: MakeRecipe) -> None:
    made = two_encoders([row("a", "b"), row("<image>", "red", "small.png")])
    index = build_index(made)
    ones = {"vision": 1, "fine": 1, "llm": 1}
    meta = assign(0, 0, [np.array([0])], index.lengths, ones, ones)
    step = BatchBuilder(index, made, (PayloadNeed("llm", 0, ids=True),), ones).build(meta)
    assert {unit: rows.tolist() for unit, rows in step.text[0, 0].feature_positions.items()} == {
        "vision": [],
        "fine": [],
    }


def test_frames_of_a_video_count_once(two_encoders: MakeRecipe) -> None:
    rows = [row("<video><image>", "red", "small.png", name="0") | {"video": "four.mp4"}]
    assert len(build_index(two_encoders(rows, max_images=5, video=FOUR)).samples) == 1
    index = build_index(two_encoders([*rows, row("a", "b")], max_images=4, video=FOUR))
    assert [(q.kind, q.reason) for q in index.quarantined] == [
        ("too_many_images", "5 images, frames of videos included, data.max_images = 4")
    ]


def test_media_are_checked_once(two_encoders: MakeRecipe) -> None:
    rows = [row("<video><image>", "red", "small.png") | {"video": "four.mp4"}, row("<image>", "red", "wide.png")]
    made = two_encoders(rows)
    report = check_sources_for_recipe(made, made.data.sources)
    assert (report.samples, report.media, report.bad) == (2, {"image": 2, "video": 1}, ())


def _stated(path: Path, text: str) -> Recipe:
    path.write_text(text, encoding="utf-8")
    return Recipe.model_validate(
        {
            "name": "stated",
            "model": {
                "encoders": {
                    "coarse": SHAPE | {"modality": "vision", "downsample": "pixel_shuffle", "merge": 2},
                    "fine": FINE,
                },
                "llm": SHAPE | {"vocab": 64},
            },
            "data": {"sources": [{"path": path}], "seq_len": 1000},
            "train": {"steps": 1, "global_batch": 2, "optimizer": {"lr": 1e-3}},
        }
    )


def test_stated_lengths_have_a_column_for_each_encoder(tmp_path: Path) -> None:
    lengths = build_index(_stated(tmp_path / "x.csv", "text,coarse,fine\n10,2x16,64 32\n7,,\n")).lengths
    assert lengths.tokens.tolist() == [10 + 2 * 4 + 64 + 32, 7]
    with pytest.raises(DataError, match=re.escape("x.csv:2: coarse has 2 items, fine has 1; allowed: as many")):
        build_index(_stated(tmp_path / "x.csv", "text,coarse,fine\n10,2x16,64\n"))
