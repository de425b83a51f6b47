"""GLM-4.5V computes what `transformers` computes, with images and videos."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mmtrain.data.loading.batch_builder import find_media_positions
from mmtrain.data.media.image_grids import MediumGrid
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.recipe import Recipe
from tests.weights.comparison import (
    assert_equal_gradients,
    assert_equal_logits_and_loss,
    content,
    export_again,
    full_gradients,
    labels_of,
    unit_stage,
)
from tests.weights.pretrained import IMAGE_TOKEN, MERGE, VOCAB, glm4v_moe, recipe_from, save
from tests.weights.test_qwen_vl import in_squares

# Frames (in patches), rows and columns of what the samples show. `transformers` takes images or videos, not both.
IMAGES, VIDEO, WIDE_IMAGE = [(1, 4, 6), (1, 2, 2)], [(3, 4, 4)], [(1, 6, 10)]
SHOWN = [IMAGES, [], VIDEO, WIDE_IMAGE]
VIDEOS = {2}  # samples


def _recipe(folder: Path) -> Recipe:
    return recipe_from(folder, "data.image.min_pixels=16", "data.image.max_pixels=576")


def _words(count: int, seed: int) -> Tensor:
    return torch.randint(IMAGE_TOKEN + 1, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def _pictures(number: int) -> list[tuple[int, int]]:
    """Return rows and columns of what a sample shows one after another: text stands between the frames of a video."""
    return [(rows, cols) for frames, rows, cols in SHOWN[number] for _ in range(frames)]


def _ids(number: int) -> Tensor:
    parts = [_words(3, number)]
    for rows, cols in _pictures(number):
        parts += [torch.full((rows * cols // MERGE**2,), IMAGE_TOKEN), _words(2, number + 10)]
    return torch.cat([*parts, _words(4, number + 20)])


def _their_media(number: int, cells: list[Tensor]) -> dict[str, Tensor]:
    if not cells:
        return {}
    pixels = torch.cat([in_squares(of_medium, *grid[1:]) for grid, of_medium in zip(SHOWN[number], cells, strict=True)])
    grids = torch.tensor(SHOWN[number])
    is_image = (_ids(number) == IMAGE_TOKEN).int()[None]
    if number in VIDEOS:
        return {"pixel_values_videos": pixels, "video_grid_thw": grids, "mm_token_type_ids": 2 * is_image}
    return {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": is_image}


def test_logits_loss_and_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    theirs = glm4v_moe()
    folder = save(theirs, tmp_path / "model")
    recipe = _recipe(folder)
    vision, llm = unit_stage(recipe, "vision"), unit_stage(recipe, "llm")
    assert recipe.model.vision is not None
    width, generator = recipe.model.vision.cell_features, torch.Generator().manual_seed(7)
    cells = [[torch.randn(int(np.prod(grid)), width, generator=generator) for grid in grids] for grids in SHOWN]
    numbers = range(len(SHOWN))
    ids = [_ids(number) for number in numbers]
    labels = labels_of(ids, IMAGE_TOKEN)
    expected = torch.cat(
        [theirs(input_ids=ids[number][None], **_their_media(number, cells[number])).logits[0] for number in numbers]
    )
    pictures = [picture for number in numbers for picture in _pictures(number)]
    rows, cols = (tuple(picture[k] for picture in pictures) for k in range(2))
    images = EncoderInput(rows, cols, torch.cat([of_medium for of_sample in cells for of_medium in of_sample]))
    grids = [[MediumGrid([0], rows // MERGE, cols // MERGE) for rows, cols in _pictures(number)] for number in numbers]
    positions = [find_media_positions(ids[number].numpy(), (IMAGE_TOKEN,), grids[number]) for number in numbers]
    packed = torch.cat(ids)
    places = {"vision": (packed == IMAGE_TOKEN).nonzero().flatten()}
    position_ids = torch.from_numpy(np.concatenate(positions, axis=1))
    text = TextInput(tuple(map(len, ids)), packed, labels, places, position_ids)
    assert_equal_logits_and_loss(llm, text, {"vision": vision(None, images)}, expected)
    assert_equal_gradients(folder, theirs, full_gradients(vision) | full_gradients(llm))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": False}])
def test_import_and_export_give_the_same_bits(changes: dict[str, bool], tmp_path: Path) -> None:
    folder = save(glm4v_moe(**changes), tmp_path / "model", torch.bfloat16)
    assert content(export_again(folder, _recipe(folder))) == content(folder)
