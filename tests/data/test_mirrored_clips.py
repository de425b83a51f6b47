"""Clips that are mirrored at their ends are what Whisper's feature extractor makes of each of them alone."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from mmtrain.data.media.item_readers import AudioItemReader
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia
from mmtrain.models.stage.stage_inputs import EncoderInput
from mmtrain.recipe.settings.data_settings import AudioDataSettings, DataSettings
from tests.models.factory import CONVOLVED, settings, stage

RATE, MEL_BINS = 16_000, 20
MODEL = settings(audio={**CONVOLVED, "mel_bins": MEL_BINS, "chunk": 100, "max_frames": 200})
LENGTHS = (201, 319, 1600, 1601, 15_999, 16_000, 16_161, 40_003, 70_000)  # samples


def _reader(**audio: object) -> AudioItemReader:
    assert MODEL.audio is not None
    data = DataSettings(
        sources=[{"path": "none.json"}], tokenizer="none.json", seq_len=64, audio=AudioDataSettings(**audio)
    )
    return AudioItemReader(MODEL.audio, data)


def _clip(folder: Path, samples: int) -> tuple[FileMedia, np.ndarray]:
    wave = (0.3 * np.random.default_rng(samples).standard_normal(samples)).astype(np.float32)
    path = folder / f"{samples}.wav"
    soundfile.write(path, wave, RATE, subtype="FLOAT")
    return FileMedia(str(path)), wave


def test_frames_are_those_of_the_feature_extractor_for_each_clip_alone(tmp_path: Path) -> None:
    from transformers import WhisperFeatureExtractor

    assert MODEL.audio is not None
    extract = WhisperFeatureExtractor(feature_size=MEL_BINS)
    for samples in LENGTHS:
        media, wave = _clip(tmp_path, samples)
        expected = extract(
            wave, sampling_rate=RATE, padding=True, truncation=False, return_attention_mask=True, return_tensors="np"
        )
        mels = expected.input_features[0].T
        assert len(mels) == int(expected.attention_mask.sum()) == samples // 160
        [grid] = _reader().read_items("audio", media).grids
        assert grid == (MODEL.audio.count_cells(len(mels)), 1)
        cells = _reader().load_cells("audio", media, 0, 1, grid)
        rows = np.arange(len(mels))
        places = rows // 100 * 104 + rows % 100
        assert np.abs(cells[places] - mels).max() < 1e-4
        assert not np.delete(cells, places, axis=0).any(), "zeros behind chunks"


def test_parts_of_a_clip_have_the_features_of_the_whole(tmp_path: Path) -> None:
    unit = stage(MODEL, "audio")
    for samples in (70_000, 64_000, 64_160):  # the last with one frame behind whole windows of two chunks
        features = []
        for reader in (_reader(), _reader(item_seconds=2)):
            media, _ = _clip(tmp_path, samples)
            grids = reader.read_items("audio", media).grids
            cells = [reader.load_cells("audio", media, part, len(grids), grid) for part, grid in enumerate(grids)]
            rows = tuple(grid[0] for grid in grids)
            inputs = EncoderInput(rows, (1,) * len(rows), torch.from_numpy(np.concatenate(cells)))
            features.append(unit(None, inputs))
        assert len(grids) == -(-(samples // 160) // 200)
        torch.testing.assert_close(features[1], features[0], rtol=1e-4, atol=1e-5)


def test_a_clip_without_a_whole_frame_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(BadMediaError, match="0 log-mel frames of 10 ms; allowed: at least 1, one LLM token"):
        _reader().read_items("audio", _clip(tmp_path, 159)[0])


def test_a_clip_beyond_the_longest_is_heard_up_to_there(tmp_path: Path) -> None:
    media, wave = _clip(tmp_path, 40_003)
    start = tmp_path / "start.wav"
    soundfile.write(start, wave[: 2 * RATE], RATE, subtype="FLOAT")
    reader = _reader(max_seconds=2.0, long_clips="cut")
    [grid] = reader.read_items("audio", media).grids
    assert grid == (208, 1)
    cut = reader.load_cells("audio", media, 0, 1, grid)
    whole = reader.load_cells("audio", FileMedia(str(start)), 0, 1, grid)
    assert np.array_equal(cut, whole)
