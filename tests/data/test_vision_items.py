"""Images, tiles and frames as items: in the index, in tokens and as pixels, from files, shards and Parquet."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from mmtrain.balance import assign
from mmtrain.data import BatchBuilder, ChatTokenizer, PayloadNeed, build_index
from mmtrain.data.index.data_index import DataIndex
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.media.vision_items import VisionItemDecoder
from mmtrain.recipe.settings.data_settings import ImageSettings, SourceSettings
from mmtrain.recipe.settings.schema import Recipe
from tests.data.archives import movie, parquet, png, tar
from tests.pixels import normalized

MakeRecipe = Callable[..., Recipe]
TILES = {"scheme": "tiles", "tile": 16, "max_tiles": 4}


def _gradient(width: int, height: int) -> bytes:
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    buffer = io.BytesIO()
    Image.fromarray(np.stack([x, y, 255 - x], axis=-1).astype(np.uint8)).save(buffer, "png")
    return buffer.getvalue()


def _talk(text: str, **media: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "red"}], **media}


def test_tiles_cover_the_canvas_and_the_last_is_the_thumbnail(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(_gradient(32, 16))
    image = ImageSettings(**TILES, mean=(0, 0, 0), std=(1, 1, 1))
    decoder = VisionItemDecoder(image, 8)
    media = FileMedia(str(tmp_path / "a.png"))
    left, right, thumbnail = (normalized(decoder.patches("image", media, part, 3, (2, 2)), image) for part in range(3))
    pixels = np.asarray(Image.open(tmp_path / "a.png"), dtype=np.float32) / 255
    for tile, part in ((left, pixels[:, :16]), (right, pixels[:, 16:])):
        assert np.allclose(tile.reshape(2, 2, 3, 8, 8).transpose(0, 3, 1, 4, 2).reshape(16, 16, 3), part)
    assert abs(thumbnail.mean() - pixels.mean()) < 0.01
    assert thumbnail.std() == pytest.approx(pixels.std(), abs=0.02)


def test_tiles_are_items_and_the_mark_stands_for_all_of_them(tmp_path: Path, recipe: MakeRecipe) -> None:
    sizes = {"wide.png": (32, 16), "small.png": (8, 8), "tall.png": (16, 48)}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(png("red", *size))
    rows = [
        _talk("a<image>b<image>", images=["wide.png", "tall.png"], id="two"),
        _talk("<image>", images=["small.png"]),
    ]
    made = recipe(rows, image=TILES)
    index = build_index(made)
    assert index.lengths.items["vision"].first.tolist() == [0, 7, 8]
    assert index.item_parts["vision"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert (index.unit_features(0, "vision"), index.unit_features(1, "vision")) == ([12, 16], [4])
    assert set(index.lengths.items["vision"].rows.tolist()) == {2}
    assert [index.locate_item(0, "vision", position) for position in (0, 2, 3, 6)] == [
        (0, 0, 3),
        (0, 2, 3),
        (1, 0, 4),
        (1, 3, 4),
    ]
    tokenizer = ChatTokenizer.load(made.data.tokenizer)
    ids = tokenizer.encode(index.samples[0], index.media_features(0)).ids
    assert len(ids) == index.lengths.tokens[0]
    assert (ids == tokenizer.item_ids["vision"][0]).sum() == 28


def test_an_image_replaced_by_one_of_other_tiles_is_quarantined(tmp_path: Path, recipe: MakeRecipe) -> None:
    (tmp_path / "a.png").write_bytes(png("red", 32, 16))
    made = recipe([_talk("<image>", images=["a.png"], id="a")], image=TILES)
    index = build_index(made)
    meta = assign(0, 0, [np.array([0])], index.lengths, {"vision": 1, "llm": 1}, {"vision": 1, "llm": 1})
    batch_builder = BatchBuilder(index, made, (PayloadNeed("vision", 0, media=True),), {"vision": 1, "llm": 1})
    assert batch_builder.build(meta).quarantined == ()
    (tmp_path / "a.png").write_bytes(png("red", 16, 16))
    batch_builder = BatchBuilder(index, made, (PayloadNeed("vision", 0, media=True),), {"vision": 1, "llm": 1})
    data = batch_builder.build(meta)
    [named] = data.quarantined
    assert named.kind == "undecodable"
    assert "it has changed since lengths were read" in named.reason
    assert data.encoders["vision"][0, 0].cells is not None
    assert not data.encoders["vision"][0, 0].cells.any()


def _payload(recipe: Recipe, index: DataIndex) -> np.ndarray:
    """Return the patches of all items, with one microbatch per sample."""
    groups = [np.array([sample]) for sample in range(len(index.samples))]
    counts = dict.fromkeys(("vision", "llm"), len(groups))
    meta = assign(0, 0, groups, index.lengths, {"vision": 1, "llm": 1}, counts)
    data = BatchBuilder(index, recipe, (PayloadNeed("vision", 0, media=True),), counts).build(meta)
    assert data.quarantined == ()
    cells = np.concatenate([data.encoders["vision"][0, i].cells for i in range(len(groups))])
    return normalized(cells, recipe.data.image)


@pytest.mark.parametrize("image", [{"min_pixels": 64, "max_pixels": 1024}, TILES, {"scheme": "fixed", "size": 16}])
def test_the_same_samples_are_the_same_in_every_format(
    tmp_path: Path, recipe: MakeRecipe, image: dict[str, Any]
) -> None:
    contents = {"0.png": _gradient(40, 20), "1.mp4": movie(["red", "blue"], 0.4), "1.png": _gradient(10, 30)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    rows = [
        _talk("<image>?", images=["0.png"], id="0"),
        _talk("x<video>y<image>", videos=["1.mp4"], images=["1.png"], id="1"),
    ]
    made = recipe(rows, image=image, video={"max_frames": 3}, seq_len=256)
    expected = build_index(made)
    payload = _payload(made, expected)
    assert len(payload)
    members = {f"{i}.json": json.dumps(row).encode() for i, row in enumerate(rows)}
    tar(tmp_path / "x.tar", dict(sorted({**members, **contents}.items())))
    columns = {
        "messages": [row["messages"] for row in rows],
        "images": [[contents["0.png"]], [contents["1.png"]]],
        "videos": pa.array([None, [{"bytes": contents["1.mp4"], "path": "1.mp4"}]]),
        "id": ["0", "1"],
    }
    parquet(tmp_path / "x.parquet", columns)
    for name in ("x.tar", "x.parquet"):
        other = made.model_copy(
            update={"data": made.data.model_copy(update={"sources": (SourceSettings(path=tmp_path / name),)})}
        )
        index = build_index(other)
        assert index.quarantined == ()
        assert index.fingerprint == expected.fingerprint
        assert np.array_equal(_payload(other, index), payload)


def test_frames_are_items_in_the_order_of_marks(tmp_path: Path, recipe: MakeRecipe) -> None:
    (tmp_path / "a.mp4").write_bytes(movie(["red", "lime", "blue"], width=16, height=16))
    (tmp_path / "b.png").write_bytes(png("white"))
    row = _talk("<image>then<video>", images=["b.png"], videos=["a.mp4"])
    made = recipe(
        [row], video={"max_frames": 3}, image={"mean": [0, 0, 0], "std": [1, 1, 1], "min_pixels": 64, "max_pixels": 256}
    )
    index = build_index(made)
    assert index.item_parts["vision"].tolist() == [0, 0, 1, 2]
    seen = _payload(made, index).reshape(4, 4, 3, 64).mean(axis=(1, 3))
    assert np.abs(seen - [[1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]).max() < 0.05


def test_a_patch_joins_frames_and_an_image_stands_still(tmp_path: Path, recipe: MakeRecipe) -> None:
    """Three frames fill one and a half items; the fourth one is taken from the video too."""
    (tmp_path / "a.mp4").write_bytes(movie(["red", "lime", "blue"], width=16, height=16))
    (tmp_path / "b.png").write_bytes(png("white"))
    row = _talk("<image>then<video>", images=["b.png"], videos=["a.mp4"])
    made = recipe(
        [row], video={"max_frames": 3}, image={"mean": [0, 0, 0], "std": [1, 1, 1], "min_pixels": 64, "max_pixels": 256}
    )
    vision = made.model.vision
    assert vision is not None
    changes = {"temporal_patch": 2, "time_positions_per_second": 10}
    joining = made.model.model_copy(update={"vision": vision.model_copy(update=changes)})
    made = made.model_copy(update={"model": joining})
    index = build_index(made)
    assert index.item_parts["vision"].tolist() == [0, 0, 1]
    assert index.item_times["vision"].tolist() == [0, 0, 4], "two of three frames last 0.4 s"
    assert [list(medium.times) for medium in index.media_grids(0, "vision", merge=1)] == [[0], [0, 4]]
    seen = _payload(made, index).reshape(3, 4, 3, 2, 64).mean(axis=(1, 4))  # items, channels, frames
    # Of twelve frames, those with the numbers 0, 3, 6 and 9: red twice, lime, blue.
    expected = [[(1, 1), (1, 1), (1, 1)], [(1, 1), (0, 0), (0, 0)], [(0, 0), (1, 0), (0, 1)]]
    assert np.abs(seen - expected).max() < 0.05


def test_frames_count_as_images_and_marks_are_counted(tmp_path: Path, recipe: MakeRecipe) -> None:
    (tmp_path / "a.mp4").write_bytes(movie(["red"] * 4, width=16, height=16))
    rows = [
        _talk("<video>", videos=["a.mp4"], id="fits"),
        _talk("<video><image>", videos=["a.mp4"], images=["b.png"], id="too many"),
        _talk("<video> and <video>", videos=["a.mp4"], id="one there"),
        _talk("none asked", videos=["a.mp4"], id="none asked"),
        _talk("<video>", videos=["gone.mp4"], id="gone"),
    ]
    (tmp_path / "b.png").write_bytes(png())
    index = build_index(recipe(rows, max_images=8))
    assert [s.id for s in index.samples] == ["fits"]
    kinds = {"too many": "too_many_images", "one there": "video_count", "none asked": "video_count"}
    assert {q.id: q.kind for q in index.quarantined} == kinds | {"gone": "missing_video"}


def test_a_bad_medium_is_zeros_in_all_parts_and_quarantined_once(tmp_path: Path, recipe: MakeRecipe) -> None:
    (tmp_path / "a.png").write_bytes(_gradient(32, 16))
    made = recipe([_talk("<image>", images=["a.png"], id="x")], image=TILES)
    index = build_index(made)
    (tmp_path / "a.png").write_bytes(b"gone")
    meta = assign(0, 0, [np.array([0])], index.lengths, {"vision": 1, "llm": 1}, {"vision": 1, "llm": 1})
    data = BatchBuilder(index, made, (PayloadNeed("vision", 0, media=True),), {"vision": 1}).build(meta)
    assert data.encoders["vision"][0, 0].cells.shape == (12, 192)
    assert not data.encoders["vision"][0, 0].cells.any()
    assert [(q.id, q.kind) for q in data.quarantined] == [("x", "not_an_image")]


def test_a_medium_is_decoded_once_for_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmtrain.data.media import vision_items as module

    (tmp_path / "a.png").write_bytes(_gradient(32, 16))
    calls = []
    decode = module.load_rgb_images
    monkeypatch.setattr(module, "load_rgb_images", lambda *a: (calls.append(1), decode(*a))[1])
    decoder = VisionItemDecoder(ImageSettings(**TILES), 8)
    for part in range(3):
        decoder.patches("image", FileMedia(str(tmp_path / "a.png")), part, 3, (2, 2))
    assert len(calls) == 1
