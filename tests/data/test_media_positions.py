"""Positions in time, row and column against those of `transformers`."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mmtrain.data.loading.batch_builder import find_media_positions
from mmtrain.data.media.image_grids import MediumGrid

IMAGE, VIDEO, WORD = 3, 4, 9


def _theirs(ids: list[int], **grids: Any) -> np.ndarray:
    from transformers import Qwen2VLModel

    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = Qwen2VLModel.get_vision_position_ids.__get__(model)
    types = torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in ids]])
    positions, _ = Qwen2VLModel.get_rope_index(model, torch.tensor([ids]), types, **grids)
    return positions[:, 0].numpy()


def test_images_and_videos_between_words_have_the_positions_of_transformers() -> None:
    ids = [WORD] * 2 + [IMAGE] * 6 + [WORD] + [VIDEO] * 12 + [WORD] * 3 + [IMAGE]
    expected = _theirs(
        ids, image_grid_thw=torch.tensor([[1, 4, 6], [1, 2, 2]]), video_grid_thw=torch.tensor([[3, 4, 4]])
    )
    media = [MediumGrid((0,), 2, 3), MediumGrid(range(3), 2, 2), MediumGrid((0,), 1, 1)]
    ours = find_media_positions(np.array(ids), (IMAGE, VIDEO), media)
    np.testing.assert_array_equal(ours, expected)
    assert ours[:, -2].tolist() == [10, 10, 10], "the text goes on behind the longer side of a medium"
    # The prompt of a conversation that shows its last image later.
    np.testing.assert_array_equal(find_media_positions(np.array(ids[:-2]), (IMAGE, VIDEO), media), expected[:, :-2])


def test_text_alone_counts_on() -> None:
    assert find_media_positions(np.array([WORD] * 4), (IMAGE,), []).tolist() == [[0, 1, 2, 3]] * 3
    assert find_media_positions(np.array([], dtype=np.int64), (IMAGE,), []).shape == (3, 0)
