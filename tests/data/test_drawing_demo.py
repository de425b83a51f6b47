"""Data to draw with: held-out captions, pictures that are recognized, and the recipe that learns them."""

import json
from pathlib import Path

import pytest
from PIL import Image

from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.data.synthetic.demo_draw import COLOURS, SHAPES
from mmtrain.data.synthetic.drawing_demo import (
    DRAW_TEMPLATE,
    all_drawings,
    find_drawing,
    generate_drawing_demo,
    is_heldout,
    recognize,
)
from mmtrain.errors import DataError
from tests.data.rows import Row

SEED = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawing") / "data"
    generate_drawing_demo(folder, SEED, train=240, heldout=60)
    return folder


def rows_of(folder: Path, split: str) -> list[Row]:
    rows: list[Row] = json.loads((folder / f"{split}.json").read_text())
    return rows


def picture(folder: Path, row: Row) -> Image.Image:
    with Image.open(folder / row["image"][0]) as image:
        return image.convert("RGB")


def test_held_out_pictures_show_what_training_never_shows(folder: Path) -> None:
    drawn = {split: recognize(picture(folder, row) for row in rows_of(folder, split)) for split in ("train", "heldout")}
    assert {is_heldout(drawing, SEED) for drawing in drawn["train"]} == {False}
    assert {is_heldout(drawing, SEED) for drawing in drawn["heldout"]} == {True}
    for words in ({d.colour for d in drawn["train"]}, {d.colour for d in drawn["heldout"]}):
        assert words == set(COLOURS)
    assert {d.shape for d in drawn["train"]} == set(SHAPES)


def test_every_picture_shows_its_caption(folder: Path) -> None:
    rows = [row for split in ("train", "heldout") for row in rows_of(folder, split)]
    captions = [row for row in rows if row["template"] == DRAW_TEMPLATE]
    assert len(captions) == 0.6 * len(rows)
    for row, shown in zip(rows, recognize(picture(folder, row) for row in rows), strict=True):
        question, answer = (turn["value"] for turn in row["conversations"])
        if row["template"] == DRAW_TEMPLATE:
            assert (find_drawing(question), answer) == (shown, "<image>")
        elif row["template"] == "describe":
            assert answer == shown.caption
        else:
            assert answer == getattr(shown, row["template"])


def test_another_caption_is_another_picture() -> None:
    drawings = all_drawings()
    assert len({drawing.caption for drawing in drawings}) == len(drawings) == 240
    assert recognize(drawing.draw(250, COLOURS[drawing.colour]) for drawing in drawings) == [*drawings]
    with pytest.raises(DataError, match="has no caption"):
        find_drawing("Draw a house.")


def test_demo_data_of_either_kind_replaces_the_other_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    generate_drawing_demo(tmp_path / "again", SEED, train=240, heldout=60)
    for path in folder.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(folder)).read_bytes()
    generate_demo(tmp_path / "again", seed=0, train=3, heldout=2)
    assert len(rows_of(tmp_path / "again", "train")) == 3
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept.txt").write_text("kept")
    with pytest.raises(DataError, match="not empty and not demo data"):
        generate_drawing_demo(tmp_path / "mine", SEED, train=3, heldout=2)
    assert (tmp_path / "mine" / "kept.txt").read_text() == "kept"
