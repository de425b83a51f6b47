"""The log-mel front end against Whisper's own, and clips that are damaged or not what they claim to be."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from mmtrain.data.media.audio import log_mel, read_num_frames, resample
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.media.sound_files import BadAudioError
from mmtrain.recipe.settings.data_settings import AudioDataSettings
from tests.data.archives import load_log_mels


def _wave(seconds: float, rate: int = 16000, seed: int = 0) -> np.ndarray:
    """Return a few tones and some noise."""
    t = np.arange(round(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * f * t + p) / (1 + p) for p, f in enumerate((180, 950, 2400)))
    return 0.2 * tones + 0.02 * np.random.default_rng(seed).standard_normal(len(t))


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "clip.wav"
    soundfile.write(path, _wave(0.5), 16000)
    return path


@pytest.mark.parametrize("bins", [80, 128])
def test_frames_equal_those_of_whisper(bins: int) -> None:
    from transformers import WhisperFeatureExtractor

    wave = _wave(0.64)
    extract = WhisperFeatureExtractor(feature_size=bins)
    expected = extract(wave, sampling_rate=16000, padding="longest", return_tensors="np").input_features[0].T
    frames = log_mel(wave, bins)
    assert frames.shape == expected.shape == (64, bins)
    assert frames.dtype == np.float32
    assert np.abs(frames - expected).max() < 1e-4


@pytest.mark.parametrize("bins", [80, 128])
def test_fixed_frames_equal_those_that_whisper_pads_to(tmp_path: Path, bins: int) -> None:
    from transformers import WhisperFeatureExtractor

    wave = _wave(1.3).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", wave, 16000, subtype="FLOAT")
    media = FileMedia(str(tmp_path / "a.wav"))
    frames = read_num_frames(media, AudioDataSettings(scheme="fixed"), 8)
    log_mels = load_log_mels(media, frames, bins)
    extract = WhisperFeatureExtractor(feature_size=bins)
    expected = extract(wave, sampling_rate=16000, return_tensors="np").input_features[0].T
    assert log_mels.shape == expected.shape == (3000, bins)
    assert np.abs(log_mels - expected).max() < 1e-4
    assert read_num_frames(media, AudioDataSettings(scheme="fixed", max_seconds=2.0), 64) == 256  # whole features


def test_mp3_gives_the_frames_of_the_wav_that_it_encodes(tmp_path: Path) -> None:
    wave = _wave(1.0)
    soundfile.write(tmp_path / "a.mp3", np.stack([wave, wave], axis=1), 16000, format="MP3")
    soundfile.write(tmp_path / "a.wav", wave, 16000)
    log_mels = {}
    for name in ("a.mp3", "a.wav"):
        media = FileMedia(str(tmp_path / name))
        assert read_num_frames(media, AudioDataSettings(), 2) in (100, 102, 104)  # encoders pad
        log_mels[name] = load_log_mels(media, 100, 20)
    assert np.abs(log_mels["a.mp3"][:95, :15] - log_mels["a.wav"][:95, :15]).mean() < 0.05


def test_clips_of_many_channels_are_rejected_from_the_header(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros((16, 100)), 8000)
    with pytest.raises(BadAudioError, match="100 channels at 8000 Hz, at most 32") as rejected:
        read_num_frames(FileMedia(str(tmp_path / "a.wav")), AudioDataSettings(), 2)
    assert rejected.value.kind == "audio_too_wide"


def test_resampling_keeps_frequency_and_position_of_tones() -> None:
    for rate in (8000, 11025, 48000):
        low = _wave(1.0, rate) if rate < 16000 else None
        t = np.arange(rate) / rate
        tone = np.sin(2 * np.pi * 440 * t) * np.hanning(rate)
        expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000) * np.hanning(16000)
        resampled = resample(tone, rate)
        assert resampled.shape == (16000,)
        assert np.abs(resampled - expected).max() < 1e-3, rate
        assert low is None or len(resample(low, rate)) == 16000


@pytest.mark.parametrize(("seconds", "multiple", "frames"), [(0.5, 2, 50), (0.501, 2, 52), (0.5, 8, 56), (0.001, 8, 8)])
def test_the_number_of_frames_is_read_from_the_header(
    tmp_path: Path, seconds: float, multiple: int, frames: int
) -> None:
    for rate, kind in ((8000, "wav"), (16000, "flac"), (44100, "wav")):
        path = tmp_path / f"{rate}.{kind}"
        soundfile.write(path, _wave(seconds, rate), rate)
        assert read_num_frames(FileMedia(str(path)), AudioDataSettings(max_seconds=30.0), multiple) == frames
        mels = load_log_mels(FileMedia(str(path)), frames, 20)
        assert mels.shape == (frames, 20)
        assert np.isfinite(mels).all()


def test_channels_are_mixed_and_the_end_is_padded_with_silence(tmp_path: Path) -> None:
    wave = _wave(0.2)
    soundfile.write(tmp_path / "mono.flac", wave, 16000)
    soundfile.write(tmp_path / "stereo.flac", np.stack([1.5 * wave, 0.5 * wave], axis=1), 16000)
    mono, stereo = (load_log_mels(FileMedia(str(tmp_path / f"{name}.flac")), 40, 20) for name in ("mono", "stereo"))
    assert np.abs(mono - stereo).max() < 0.02  # 16 bits round
    assert np.ptp(mono[25:]) == 0  # silence
    assert np.abs(mono[:15] - log_mel(wave, 20)[:15]).max() < 0.02


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("missing.wav", "missing_audio"),
        ("text.wav", "not_audio"),
        ("empty.wav", "empty_audio"),
        ("clip.wav", "clip_too_long"),
    ],
)
def test_faults_in_the_header_are_rejected_before_decoding(clip: Path, name: str, kind: str) -> None:
    (clip.parent / "text.wav").write_text("no sound")
    soundfile.write(clip.parent / "empty.wav", np.zeros(0), 16000)
    with pytest.raises(BadAudioError) as rejected:
        read_num_frames(FileMedia(str(clip.parent / name)), AudioDataSettings(max_seconds=0.4), 2)
    assert rejected.value.kind == kind
    assert name in str(rejected.value)


def test_long_clips_are_cut_where_the_recipe_says_so(tmp_path: Path) -> None:
    """What is behind the cut is not even decoded, except for its first second."""
    wave = _wave(4.0)
    soundfile.write(tmp_path / "long.wav", wave, 16000, subtype="FLOAT")
    soundfile.write(tmp_path / "short.wav", wave[:8000], 16000, subtype="FLOAT")
    wave[40000:] = np.nan
    soundfile.write(tmp_path / "broken.wav", wave, 16000, subtype="FLOAT")
    settings = AudioDataSettings(max_seconds=0.5, long_clips="cut")
    frames = {}
    for name in ("long.wav", "short.wav", "broken.wav"):
        media = FileMedia(str(tmp_path / name))
        assert read_num_frames(media, settings, 2) == 50
        frames[name] = load_log_mels(media, 50, 20)
    assert np.array_equal(frames["long.wav"], frames["short.wav"])
    assert np.array_equal(frames["long.wav"], frames["broken.wav"])


def test_faults_behind_a_good_header_are_rejected_when_decoding(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "intact.flac", _wave(2.0), 16000)
    (tmp_path / "cut.flac").write_bytes((tmp_path / "intact.flac").read_bytes()[:-1])
    soundfile.write(tmp_path / "nan.wav", np.full(32000, np.nan, np.float32), 16000, subtype="FLOAT")
    for name in ("cut.flac", "nan.wav"):
        assert read_num_frames(FileMedia(str(tmp_path / name)), AudioDataSettings(max_seconds=30.0), 2) == 200
        with pytest.raises(BadAudioError) as rejected:
            load_log_mels(FileMedia(str(tmp_path / name)), 200, 20)
        assert rejected.value.kind == "undecodable"
