from dataclasses import replace

import numpy as np
import pytest
import torch

from mmtrain.errors import DataError
from mmtrain.models.shapes.layer_shape import Attention, LayerShape
from mmtrain.models.stage.stage_inputs import EncoderInput
from mmtrain.models.stage.vision_layers import PatchEmbed, PatchGrid, VisionContext
from tests.models.factory import CPU, WINDOWED, images, randomize, settings, stage

LAYER = LayerShape("vit_block", 8, 8, mixer=Attention())


def _context(inputs: EncoderInput, extra_tokens: int = 0) -> VisionContext:
    return VisionContext(inputs, extra_tokens, CPU)


def test_patch_grid_runs_row_by_row() -> None:
    grid = PatchGrid.of((2, 1), (3, 2))
    assert grid.image.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert grid.row.tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert grid.col.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert grid.token_positions(1).tolist() == [1, 2, 3, 4, 5, 6, 8, 9]
    assert PatchGrid.of((), ()).image.shape == (0,)


def test_factorized_positions_are_a_row_plus_a_column() -> None:
    embed = stage(settings(), "vision", (0, 1)).layers["0"]
    assert isinstance(embed, PatchEmbed)
    inputs = images((2, 3))
    assert inputs.cells is not None
    assert embed.row_positions is not None
    assert embed.col_positions is not None
    got = embed(None, _context(inputs)).view(2, 3, -1)
    plain = embed.proj(inputs.cells).view(2, 3, -1)
    torch.testing.assert_close(got, plain + embed.row_positions[:2, None] + embed.col_positions[None, :3])


def test_grid_positions_with_class_token() -> None:
    model = settings(vision={"positions": "grid", "class_token": True, "max_side": 4})
    embed = stage(model, "vision", (0, 1)).layers["0"]
    assert isinstance(embed, PatchEmbed)
    assert embed.grid_positions is not None
    assert embed.class_token is not None
    assert embed.grid_positions.shape == (17, 32)
    inputs = images((2, 2), (4, 4))
    assert inputs.cells is not None
    got = embed(None, _context(inputs, extra_tokens=1))
    plain = embed.proj(inputs.cells)
    assert got.shape == (22, 32)
    for first in (0, 5):  # where each image starts
        torch.testing.assert_close(got[first], embed.class_token + embed.grid_positions[0])
    torch.testing.assert_close(got[3], plain[2] + embed.grid_positions[1 + 4])  # row 1, column 0 of a 4 x 4 grid
    torch.testing.assert_close(got[6:], plain[4:] + embed.grid_positions[1:])


def test_pixel_shuffle_merges_squares_of_neighboring_patches() -> None:
    order = _context(EncoderInput((2, 4), (4, 2)), extra_tokens=1).merge_order(2)
    # the class tokens are 0 and 9; each line is one feature: top left, top right, bottom left, bottom right
    assert order.reshape(-1, 4).tolist() == [[1, 2, 5, 6], [3, 4, 7, 8], [10, 11, 12, 13], [14, 15, 16, 17]]


def test_windows_are_packed_sequences_of_their_own() -> None:
    """An image of 3 x 5 patches has windows of 2 x 2, 2 x 1, 1 x 2 and 1 x 1 patches."""
    context = VisionContext(EncoderInput((3, 2), (5, 2)), 0, CPU, window_side=2)
    assert context.window_order is not None
    assert context.window_order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    windowed, whole = (replace(LAYER, mixer=Attention(window_side=side)) for side in (2, 0))
    assert context.block_packing(windowed).lengths == (4, 4, 2, 2, 2, 1, 4)
    assert context.block_packing(whole).lengths == (15, 4)
    nothing = VisionContext(EncoderInput((), ()), 0, CPU, window_side=2)
    assert nothing.block_packing(windowed).lengths == ()


def test_merged_squares_are_found_among_windows() -> None:
    """Windows of 4 x 4 patches, and squares of 2 x 2: whatever the order of patches, features run row by row."""
    inputs = EncoderInput((4, 8), (8, 4))
    plain, windowed = (VisionContext(inputs, 0, CPU, window_side=side) for side in (0, 4))
    patches = np.arange(64)
    assert windowed.window_order is not None
    packed = patches[windowed.window_order]
    assert packed.tolist() != patches.tolist()
    assert packed[windowed.merge_order(2)].tolist() == plain.merge_order(2).tolist()


def test_a_rotated_windowed_encoder_computes_images_one_by_one() -> None:
    vision = stage(settings(vision=WINDOWED), "vision")
    randomize(vision)
    both = images((4, 6), (2, 2))
    assert both.cells is not None
    features = vision(None, both)
    first = vision(None, EncoderInput((4,), (6,), both.cells[:24]))
    second = vision(None, EncoderInput((2,), (2,), both.cells[24:]))
    torch.testing.assert_close(features, torch.cat([first, second]), rtol=1e-4, atol=1e-5)
    assert vision(None, EncoderInput((), (), both.cells[:0])).shape == (0, 48)
    transposed = vision(None, EncoderInput((6,), (4,), both.cells[:24]))
    assert not torch.allclose(transposed, first), "positions change nothing"


def test_number_of_features_and_packing() -> None:
    vision = stage(settings(), "vision")
    randomize(vision)
    two_images = images((4, 6), (2, 2))
    features = vision(None, two_images)
    assert features.shape == (4 * 6 // 4 + 1, 48)
    assert two_images.cells is not None
    first = vision(None, EncoderInput((4,), (6,), two_images.cells[:24]))
    second = vision(None, EncoderInput((2,), (2,), two_images.cells[24:]))
    torch.testing.assert_close(features, torch.cat([first, second]), rtol=1e-4, atol=1e-5)


def test_identity_downsampling_keeps_every_patch() -> None:
    vision = stage(settings(vision={"downsample": "identity", "merge": 1}), "vision")
    assert vision(None, images((3, 5))).shape == (15, 48)


def test_an_image_beyond_the_position_table_is_rejected() -> None:
    with pytest.raises(DataError, match=r"9 patches long, but the encoder's `max_side` is 8"):
        stage(settings(), "vision", (0, 1))(None, images((2, 9)))


def test_an_image_that_merge_does_not_divide_is_rejected() -> None:
    with pytest.raises(DataError, match=r"3 x 4 patches, but the encoder's `merge` 2"):
        stage(settings(), "vision")(None, images((3, 4)))


def test_feature_order_is_a_permutation_of_the_patches() -> None:
    order = _context(EncoderInput((8, 2, 4), (6, 8, 4))).merge_order(2)
    assert np.array_equal(np.sort(order), np.arange(8 * 6 + 16 + 16))
