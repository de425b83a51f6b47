"""Tiles that the LLM joins: the rows of a step that its features are made of, wherever the encoder computes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmtrain.balance import assign
from mmtrain.data import BatchBuilder, ChatTokenizer, PayloadNeed, build_index
from mmtrain.data.media.joined_tiles import FeatureMix, TileJoin
from mmtrain.recipe.settings.data_settings import ImageSettings
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.recipe.settings.vision_settings import VisionSettings
from tests.data.archives import movie, png
from tests.data.rows import row

CANVASES = ((16, 32), (32, 16), (32, 32), (48, 48))
JOINING = {"join_tiles": True, "max_joined_tiles": 2, "pool_frames": True}
SHAPE = {"layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "patch": 4, "max_side": 16}


@pytest.fixture
def joining(tmp_path: Path, recipe: Callable[..., Recipe]) -> Recipe:
    """Make a recipe of samples with two images, an image alone, a text, and a video beside an image."""
    for name, size in {"wide.png": (32, 14), "tall.png": (16, 48), "large.png": (48, 40)}.items():
        (tmp_path / name).write_bytes(png("red", *size))
    (tmp_path / "three.mp4").write_bytes(movie(["red", "lime", "blue"]))
    rows = [
        row("<image>and<image>", "red", "wide.png", "tall.png"),
        row("<image>", "red", "large.png"),
        row("how many", "3"),
        row("<video><image>", "red", "wide.png") | {"video": "three.mp4"},
    ]
    image = {"scheme": "pinpoints", "tile": 16, "pinpoints": CANVASES, "tile_several": False}
    plain = recipe(rows, image=image, video={"max_frames": 3}, seq_len=512).model_dump()
    plain["model"]["vision"] = SHAPE | JOINING
    return Recipe.model_validate(plain)


def test_a_step_says_what_its_features_are_made_of(joining: Recipe) -> None:
    index = build_index(joining)
    assert not index.quarantined
    # Two images of one tile; 10 x 12 features shrunk to 5 x 6; three frames of 2 x 2, and an image of two tiles.
    assert np.diff(index.lengths.items["vision"].first).tolist() == [2, 10, 0, 3 + 3]
    features = [index.unit_features(number, "vision") for number in range(4)]
    assert features == [[17, 17], [16 + 5 * 7], [], [3 * 4 + 1, 16 + 4 * 9]]
    tokenizer = ChatTokenizer.load(joining.data.tokenizer_path)
    for number, sample in enumerate(index.samples):
        assert len(tokenizer.encode(sample, index.media_features(number)).ids) == index.lengths.tokens[number]
    dp, num_microbatches = {"vision": 2, "llm": 1}, {"vision": 3, "llm": 2}
    meta = assign(0, 0, [np.array([3, 2, 0]), np.array([1])], index.lengths, dp, num_microbatches)
    step = BatchBuilder(index, joining, (PayloadNeed("llm", 0, ids=True),), num_microbatches).build(meta)
    for microbatch, samples in enumerate(([3, 2, 0], [1])):
        payload = step.text[0, microbatch]
        mix = payload.feature_mixes["vision"]
        assert len(mix.rows) == len(payload.feature_positions["vision"]) == sum(sum(features[s]) for s in samples)
        num_items = sum(np.diff(index.lengths.items["vision"].first)[samples])
        assert (num_items - 1) * 17 < mix.rows.max() < num_items * 17, "a row of the last tile"
        np.testing.assert_allclose(mix.weights.sum(axis=1), 1, atol=1e-6)


def _mixed(mix: FeatureMix, rows: torch.Tensor) -> torch.Tensor:
    return (rows[torch.from_numpy(mix.rows)] * torch.from_numpy(mix.weights)[..., None]).sum(dim=1)


@pytest.mark.parametrize("side", [3, 4])
def test_frames_and_pictures_are_shrunk_as_torch_does(side: int) -> None:
    image: dict[str, Any] = {"scheme": "pinpoints", "tile": 4 * side, "pinpoints": ((12 * side, 8 * side),)}
    vision = VisionSettings(**SHAPE, **JOINING)
    join = TileJoin.of(vision, ImageSettings(**image))
    assert join is not None
    rows = torch.randn(7 * join.rows_per_item, 5, generator=torch.Generator().manual_seed(1))
    items = rows.view(7, join.rows_per_item, 5)
    pictures, newline = items[:, :-1].view(7, side, side, 5), items[0, -1]

    def resized(picture: torch.Tensor, height: int, width: int) -> torch.Tensor:
        channels = picture.permute(2, 0, 1)[None]
        return torch.nn.functional.interpolate(channels, [height, width], mode="bilinear")[0].permute(1, 2, 0)

    half = (side + 1) // 2
    frames = [resized(picture, half, half).reshape(-1, 5) for picture in pictures]
    torch.testing.assert_close(_mixed(join.features(None, 7), rows), torch.cat([*frames, newline[None]]))
    whole = torch.cat([torch.cat([*pictures[1 + 2 * r : 3 + 2 * r]], dim=1) for r in range(3)])
    shrunk = resized(whole, *(int(n // 3**0.5) for n in (3 * side, 2 * side)))  # six tiles to two
    ended = torch.cat([shrunk, newline.expand(len(shrunk), 1, 5)], dim=1)
    expected = torch.cat([items[0, :-1], ended.reshape(-1, 5)])
    torch.testing.assert_close(_mixed(join.features((80, 120), 7), rows), expected)
