"""Rotary positions in time, row and column (M-RoPE of Qwen2-VL, arXiv 2409.12191)."""

from collections.abc import Sequence

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.media.image_grids import MediumGrid


def find_media_positions(
    ids: IntArray, feature_tokens: Sequence[int], media: Sequence[MediumGrid], behind_times: bool = False
) -> IntArray:
    """Return (3, T) the positions of a sample's tokens, as `get_rope_index` of `transformers` 5 counts them.

    Text, and so features of clips, counts on in all three. Features of a medium are at the position of the next text
    plus their time, row and column; the text after it goes on behind its longer side or, with `behind_times`, behind
    the largest of all its positions. Of `media` only the first are used if `ids`, those of a prompt, hold no features
    of the others.
    """
    positions = np.empty((3, len(ids)), dtype=np.int64)
    features = np.flatnonzero(np.isin(ids, feature_tokens))
    num_features = 0  # of the media so far
    end = 0  # tokens that have positions
    position = 0  # of the next text
    for medium in media:
        if num_features == len(features):
            break
        start = int(features[num_features])
        positions[:, end:start] = np.arange(position, position + start - end)
        position += start - end
        places = np.meshgrid(np.asarray(medium.times), np.arange(medium.rows), np.arange(medium.cols), indexing="ij")
        of_medium = np.stack(places).reshape(3, -1)
        end = start + of_medium.shape[1]
        num_features += of_medium.shape[1]
        assert features[num_features - 1] == end - 1, "the features of a medium are not in one piece"
        positions[:, start:end] = position + of_medium
        position += max(medium.rows, medium.cols, max(medium.times) + 1 if behind_times else 0)
    positions[:, end:] = np.arange(position, position + len(ids) - end)
    return positions
