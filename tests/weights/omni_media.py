"""Clips and texts by which Qwen's omni models are compared with `transformers`."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from mmtrain.data.media.item_readers import AudioItemReader
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.models.stage.stage_inputs import EncoderInput
from mmtrain.recipe import Recipe
from tests.weights.pretrained import MERGE, VOCAB

RATE = 16000
FIRST_WORD = 8


def wave(num_samples: int) -> np.ndarray:
    """Draw a clip of so many samples, always the same."""
    return (0.3 * np.random.default_rng(num_samples).standard_normal(num_samples)).astype(np.float32)


def write_clip(path: Path, num_samples: int) -> FileMedia:
    """Write that clip into a file."""
    soundfile.write(path, wave(num_samples), RATE, subtype="FLOAT")
    return FileMedia(str(path))


def words(count: int, seed: int) -> Tensor:
    """Draw ids that stand for no medium."""
    return torch.randint(FIRST_WORD, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def in_squares(cells: Tensor, rows: int, cols: int) -> Tensor:
    """Order patches (frames * rows * cols, features), row by row, as `transformers` expects them."""
    split = cells.view(-1, rows // MERGE, MERGE, cols // MERGE, MERGE, cells.shape[1])
    return split.transpose(2, 3).reshape(cells.shape)


def read_clips(recipe: Recipe, folder: Path, sizes: Iterable[int]) -> EncoderInput:
    """Read clips of these numbers of samples as training does."""
    audio = recipe.model.audio
    assert audio is not None
    reader = AudioItemReader(audio, recipe.data)
    rows, cells = [], []
    for size in sizes:
        media = write_clip(folder / f"{size}.wav", size)
        grids = reader.read_items("audio", media).grids
        for part, grid in enumerate(grids):
            rows.append(grid[0])
            cells.append(torch.from_numpy(reader.load_cells("audio", media, part, len(grids), grid)))
    return EncoderInput(tuple(rows), (1,) * len(rows), torch.cat(cells))
