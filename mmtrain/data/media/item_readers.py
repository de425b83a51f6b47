"""How each modality reads its media: the grids of their items from the header, and the cells of one item.

An item is an image, a tile, a frame of a video, a clip or a part of one. It is a grid of rows x cols cells: patches of
an image, or log-mel frames of a clip in one column.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from mmtrain.data.media.audio import (
    HOP_SAMPLES,
    SAMPLE_RATE_HZ,
    count_frames,
    load_wave,
    mirrored_log_mels,
    wave_log_mels,
)
from mmtrain.data.media.image_grids import Grid, MediumItems
from mmtrain.data.media.images import CellArray, Float32Array, Uint8Array
from mmtrain.data.media.joined_tiles import TileJoin
from mmtrain.data.media.media_bytes import BadMediaError, Media, describe_changed
from mmtrain.data.media.sound_files import BadAudioError, SoundLength, read_sound_length, require_soundfile
from mmtrain.data.media.vision_items import VisionItemDecoder, check_image_settings, read_vision_items
from mmtrain.recipe.settings.audio_settings import AudioSettings
from mmtrain.recipe.settings.data_settings import DataSettings
from mmtrain.recipe.settings.encoder_settings import EncoderSettings
from mmtrain.recipe.settings.modalities import MediaKind
from mmtrain.recipe.settings.vision_settings import VisionSettings


class ItemReader(Protocol):
    """Reads the media of one encoder. Its methods raise `BadMediaError` for media that cannot be used."""

    def check_settings(self) -> None:
        """Raise `DataError` if the settings contradict each other, or a library is missing."""

    def read_items(self, kind: MediaKind, media: Media) -> MediumItems:
        """Return the items that a medium becomes, from its header alone. Threads may share a reader."""

    def load_cells(self, kind: MediaKind, media: Media, part: int, num_parts: int, grid: Grid) -> CellArray:
        """Return the cells (rows * cols, cell features) of item `part` of the `num_parts` items of a medium."""


class VisionItemReader:
    """Images and videos: an image is one item or several tiles, a video one item for each frame."""

    def __init__(self, settings: VisionSettings, data: DataSettings) -> None:
        """Read as the settings of the encoder and of the data say."""
        self._settings = settings
        self._data = data
        self._decoder = VisionItemDecoder(data.image, settings.patch, settings.temporal_patch, data.video)
        self._unchanged: object = None  # the last medium that had the expected items

    def check_settings(self) -> None:
        """Raise `DataError` if no image could have a valid size."""
        check_image_settings(self._settings, self._data.image)

    def read_items(self, kind: MediaKind, media: Media) -> MediumItems:
        """Return the grid of patches of each tile or frame."""
        return read_vision_items(kind, media, self._data.image, self._data.video, self._settings)

    def load_cells(self, kind: MediaKind, media: Media, part: int, num_parts: int, grid: Grid) -> Uint8Array:
        """Return the patches of one tile or frame."""
        medium = kind, media, num_parts, grid
        if self._unchanged != medium:
            self._check_unchanged(kind, media, num_parts, grid)
            self._unchanged = medium
        return self._decoder.patches(kind, media, part, num_parts, grid)

    def _check_unchanged(self, kind: MediaKind, media: Media, num_parts: int, grid: Grid) -> None:
        """Raise `BadMediaError` for a medium that would become other items than it was indexed as.

        It would be stretched to its former shape otherwise.
        """
        grids = self.read_items(kind, media).grids
        is_one_tile = kind == "image" and num_parts == 1 and not self._data.image.tile_several
        if (grids[:1] if is_one_tile else grids) != (grid,) * num_parts:
            raise BadMediaError("undecodable", describe_changed(media))


class AudioItemReader:
    """Clips: each is one item of log-mel frames in one column, or several, where the encoder hears it in chunks."""

    def __init__(self, settings: AudioSettings, data: DataSettings) -> None:
        """Read as the settings of the encoder and of the data say."""
        self._settings = settings
        self._data = data
        seconds = data.audio.item_seconds
        self._item_cells = None if seconds is None else settings.cells_per_item(seconds)
        # The next item of a clip is usually wanted next.
        self._load_clip = lru_cache(maxsize=1)(self._load_whole_clip)

    def check_settings(self) -> None:
        """Raise `DataError` if the library that reads sound is missing."""
        require_soundfile()

    def read_items(self, kind: MediaKind, media: Media) -> MediumItems:
        """Return the items of (cells, 1) of a clip; its last item may be shorter than the others."""
        frames = self._num_frames(media, read_sound_length(media, self._data.audio.max_seconds))
        return MediumItems(tuple((rows, 1) for rows in self._split_cells(self._settings.count_cells(frames))))

    def load_cells(self, kind: MediaKind, media: Media, part: int, num_parts: int, grid: Grid) -> Float32Array:
        """Return the log-mel frames of an item of a clip."""
        cells = self._load_clip(media)
        items = self._split_cells(len(cells))
        if len(items) != num_parts or items[part] != grid[0]:
            raise BadAudioError("undecodable", describe_changed(media))
        first = sum(items[:part])
        return cells[first : first + grid[0]]

    def _split_cells(self, cells: int) -> list[int]:
        """Return the cells of each item of a clip."""
        if self._item_cells is None:
            return [cells]
        num_whole, rest = divmod(cells, self._item_cells)
        items = [self._item_cells] * num_whole
        if rest + self._settings.partial_cells >= self._settings.cells_per_feature:  # fewer become no feature
            items.append(rest)
        return items

    def _load_whole_clip(self, media: Media) -> Float32Array:
        """Return the log-mel frames of a clip, which depend on all of it: their scale is that of the loudest one."""
        wave = load_wave(media, self._data.audio.max_seconds)
        frames = self._num_frames(media, wave.length)
        settings = self._settings
        if settings.clip_end == "mirrored":
            mels = mirrored_log_mels(wave, settings.mel_bins, self._data.audio.max_seconds)
        else:
            mels = wave_log_mels(wave, frames, settings.mel_bins, silence_follows=frames < self._padded_frames())
        return self._in_cells(mels)

    def _in_cells(self, mels: Float32Array) -> Float32Array:
        """Put log-mel frames where `AudioSettings.count_cells` has them: (frames, bins) -> (cells, bins)."""
        settings = self._settings
        num_cells = settings.count_cells(len(mels))
        if num_cells == len(mels):
            return mels
        assert settings.chunk is not None, "other clips lie in their frames"
        cells = np.zeros((num_cells, mels.shape[1]), dtype=mels.dtype)
        chunk, within = np.divmod(np.arange(len(mels)), settings.chunk)
        cells[chunk * settings.chunk_cells + within] = mels
        return cells

    def _padded_frames(self) -> float:
        """Return the frames to which the feature extractor of the encoder's family pads clips with silence."""
        if self._settings.clip_end == "unpadded":
            return self._data.audio.max_seconds * SAMPLE_RATE_HZ / HOP_SAMPLES
        return self._settings.max_frames if self._settings.clip_end == "silence" else 0

    def _num_frames(self, media: Media, length: SoundLength) -> int:
        """Return the frames of a clip, rounded up so that they become a whole number of features.

        Where silence follows a clip, they become whole tokens, and one frame is added that is only looked at. Where
        clips are not padded, they are not rounded; where they are mirrored, a last frame that is not full is left out.
        """
        settings, data = self._settings, self._data.audio
        if settings.clip_end == "zeros":
            return count_frames(media, length, data, settings.cells_per_feature)
        whole_only = settings.clip_end == "mirrored"
        frames = count_frames(media, length, data, settings.cells_per_token - settings.partial_cells, whole_only)
        fewest = settings.cells_per_feature - settings.partial_cells
        if frames < fewest:
            reason = f"{media}: {frames} log-mel frames of 10 ms; allowed: at least {fewest}, one LLM token"
            raise BadAudioError("clip_too_short", reason)
        return frames if settings.partial_cells else min(frames + 1, settings.max_frames)


def tile_join(settings: EncoderSettings, data: DataSettings) -> TileJoin | None:
    """Return how the LLM joins the items of an image; None for encoders whose items stay as they are."""
    return TileJoin.of(settings, data.image) if isinstance(settings, VisionSettings) else None


# By the name of the modality. Each takes the settings of the encoder and of the data.
ITEM_READERS: Mapping[str, Callable[[Any, DataSettings], ItemReader]] = {
    "vision": VisionItemReader,
    "audio": AudioItemReader,
}
