"""Lengths and samples of sound files, against libsndfile and FFmpeg themselves."""

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from mmtrain.data.index.data_check import check_sources
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.media.sound_files import BadAudioError, decode_sound, read_sound_length
from mmtrain.data.media.sound_lengths import classify_stated_length
from mmtrain.recipe.settings.data_settings import SourceSettings

RATE = 16_000
SECONDS = 1.3
NO_XING = {"write_xing": "0"}
VARIABLE = {"global_quality": "590", "flags": "+qscale"}
_Options = dict[str, str]


def _noise(seconds: float, rate: int) -> np.ndarray:
    """Return noise that starts softly, so that the first frames of a variable rate say little of the others."""
    t = np.arange(round(seconds * rate)) / rate
    loud = np.random.default_rng(0).standard_normal(len(t)) * (t > seconds / 2)
    return np.clip(0.3 * np.sin(2764 * t) + 0.3 * loud, -1, 1).astype(np.float32)


def _encode(
    form: str,
    codec: str,
    options: _Options | None = None,
    encoder: _Options | None = None,
    rate: int = RATE,
    path: Path | None = None,
) -> bytes:
    """Encode a clip; a container that is written twice needs a path."""
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV cannot write {codec}")
    buffer = io.BytesIO()
    with av.open(path or buffer, "w", format=form, options=options or {}) as container:
        layout = "stereo" if codec == "vorbis" else "mono"
        encoder = {"strict": "-2", **(encoder or {})}
        stream = container.add_stream(codec, rate=rate, layout=layout, options=encoder)
        if codec.startswith("wma"):
            stream.bit_rate = 64_000
        resampler = av.AudioResampler(format=stream.codec_context.format.name, layout=layout, rate=rate)
        wave = np.stack([_noise(SECONDS, rate)] * (2 if layout == "stereo" else 1))
        for start in range(0, wave.shape[1], 1024):
            piece = np.ascontiguousarray(wave[:, start : start + 1024])
            frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout=layout)
            frame.sample_rate, frame.pts = rate, start
            for converted in resampler.resample(frame):
                container.mux(stream.encode(converted))
        container.mux(stream.encode(None))
    return buffer.getvalue() if path is None else path.read_bytes()


def _sound(form: str, subtype: str, rate: int = RATE) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, _noise(SECONDS, rate)[:, None], rate, format=form, subtype=subtype)
    return buffer.getvalue()


def _by_sndfile(content: bytes) -> np.ndarray | None:
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as sound:
            num_samples = min(sound.frames, 1 << 20)  # a FLAC file without a length states the largest number
            return sound.read(num_samples, dtype="float32", always_2d=True)
    except RuntimeError:
        return None


def _by_ffmpeg(content: bytes) -> np.ndarray | None:
    to_floats = av.AudioResampler(format="fltp")
    pieces = []
    try:
        with av.open(io.BytesIO(content)) as container:
            for frame in container.decode(container.streams.best("audio")):
                pieces += [converted.to_ndarray().T for converted in to_floats.resample(frame)]
    except (av.error.FFmpegError, ValueError):
        return None
    return np.concatenate(pieces) if pieces else None


def _decode(path: Path) -> np.ndarray | None:
    """Return the samples of a clip; None where it is refused. What is measured must be what is decoded."""
    media = FileMedia(str(path))
    try:
        length = read_sound_length(media, 100.0)
        pieces = list(decode_sound(media))
    except BadAudioError:
        return None
    if not pieces:
        assert length.num_samples == 0
        return None  # refused as empty when its frames are counted
    samples = np.concatenate([piece.samples for piece in pieces])
    assert samples.shape == (length.num_samples, length.num_channels)
    assert {piece.rate for piece in pieces} == {length.rate}
    return samples


def _check(tmp_path: Path, content: bytes, may_be_refused: bool = False) -> None:
    """Check that a clip is decoded as by one of the two libraries, by the one that finds more where they differ."""
    (tmp_path / "clip").write_bytes(content)
    ours = _decode(tmp_path / "clip")
    judges = [judge for judge in (_by_sndfile(content), _by_ffmpeg(content)) if judge is not None and len(judge)]
    if ours is None:
        assert may_be_refused or not judges, "a clip is refused that others decode"
        return
    if not judges:  # libsndfile cannot seek in some of its formats, which reading with `soundfile` alone does
        return
    equal = [len(judge) == len(ours) and np.abs(judge - ours).max() < 1e-5 for judge in judges]
    assert any(equal), "samples differ from those of both libraries"


def test_mp3_of_variable_rate_without_a_count_of_frames_is_measured_by_decoding(tmp_path: Path) -> None:
    """libsndfile takes the rate of the first frames for that of all, and decodes a quarter of this clip."""
    content = _encode("mp3", "libmp3lame", NO_XING, VARIABLE)
    (tmp_path / "a.mp3").write_bytes(content)
    by_sndfile, by_ffmpeg = _by_sndfile(content), _by_ffmpeg(content)
    assert by_sndfile is not None
    assert by_ffmpeg is not None
    assert len(by_sndfile) < 0.4 * len(by_ffmpeg)
    length = read_sound_length(FileMedia(str(tmp_path / "a.mp3")), 100.0)
    assert length.num_samples == len(by_ffmpeg)
    assert abs(length.num_samples / length.rate - SECONDS) < 0.12  # encoders pad
    _check(tmp_path, content)


def test_clips_that_only_ffmpeg_measures_name_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vbr.mp3").write_bytes(_encode("mp3", "libmp3lame", NO_XING, VARIABLE))
    (tmp_path / "a.m4a").write_bytes(_encode("mp4", "aac"))
    (tmp_path / "good.mp3").write_bytes(_encode("mp3", "libmp3lame"))
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    for name, kind in {"vbr.mp3": "audio_length", "a.m4a": "not_audio"}.items():
        with pytest.raises(BadAudioError, match=r"pip install 'mmtrain\[video\]'") as refused:
            read_sound_length(FileMedia(str(tmp_path / name)), 100.0)
        assert refused.value.kind == kind
    assert read_sound_length(FileMedia(str(tmp_path / "good.mp3")), 100.0).num_samples == round(SECONDS * RATE)


@pytest.mark.parametrize("num_samples", [1, 16, 4095, 4096, 4097, 50_000])
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24"])
@pytest.mark.parametrize("loudness", [0.0, 1.0])
def test_whole_flac_files_need_no_decoding(num_samples: int, subtype: str, loudness: float) -> None:
    for num_channels in (1, 2, 6):
        buffer = io.BytesIO()
        wave = loudness * np.random.default_rng(0).uniform(-1, 1, (num_samples, num_channels))
        soundfile.write(buffer, wave, RATE, format="FLAC", subtype=subtype)
        assert classify_stated_length("FLAC", subtype, num_samples, buffer) == "exact"


def test_what_is_too_long_is_not_decoded_to_its_end_to_be_measured(tmp_path: Path) -> None:
    (tmp_path / "a.m4a").write_bytes(_encode("mp4", "aac"))
    length = read_sound_length(FileMedia(str(tmp_path / "a.m4a")), 0.5)
    assert 0.5 < length.num_samples / length.rate < 0.6


FFMPEG_FILES: list[tuple[Any, ...]] = [
    ("mp4", "aac"),
    ("matroska", "aac"),
    ("adts", "aac"),
    ("asf", "wmav2"),
    ("matroska", "libopus", None, None, 48_000),
    ("mp4", "libopus", None, None, 48_000),
    ("ogg", "flac"),
    ("wav", "libmp3lame"),
    ("mp3", "libmp3lame", NO_XING),
    ("mp3", "libmp3lame", {"id3v2_version": "3", "write_id3v1": "1"}, VARIABLE),
]
MORE_FFMPEG_FILES: list[tuple[Any, ...]] = [
    *[(form, "aac") for form in ("mov", "3gp", "mpegts", "flv", "nut", "avi")],
    *[(form, "alac") for form in ("mp4", "caf")],
    *[(form, "ac3", None, None, 48_000) for form in ("ac3", "avi", "mpegts", "matroska", "wav")],
    *[(form, "libmp3lame", None, VARIABLE) for form in ("mp3", "avi", "matroska", "mp4")],
    ("flv", "libmp3lame", None, VARIABLE, 44_100),
    *[("mp3", "libmp3lame", None, None, rate) for rate in (8_000, 24_000, 44_100)],
    *[("mp3", "libmp3lame", NO_XING, VARIABLE, rate) for rate in (8_000, 11_025, 48_000)],
    ("mp3", "libmp3lame", {"id3v2_version": "3", "write_id3v1": "1", "write_xing": "0"}),
    *[(form, "flac") for form in ("flac", "matroska", "mp4")],
    *[(form, "libopus", None, None, 48_000) for form in ("ogg", "webm")],
    *[(form, "vorbis") for form in ("ogg", "matroska")],
    *[(form, "pcm_s16le") for form in ("wav", "w64", "mov", "matroska", "avi")],
    *[(form, "pcm_f32le") for form in ("wav", "matroska")],
    *[("wav", codec) for codec in ("adpcm_ima_wav", "adpcm_ms", "adpcm_yamaha", "pcm_u8", "pcm_s24le", "pcm_alaw")],
    ("wav", "wmav2"),
    ("asf", "wmav1"),
    ("mp2", "mp2"),
    ("mpeg", "mp2"),
    ("eac3", "eac3", None, None, 48_000),
    ("wv", "wavpack"),
    ("tta", "tta"),
    ("amr", "libopencore_amrnb", None, None, 8_000),
    ("3gp", "libopencore_amrnb", None, None, 8_000),
    ("aiff", "pcm_s24be"),
    ("au", "pcm_f32be"),
    ("caf", "pcm_f64le"),
    ("sox", "pcm_s32le"),
    ("voc", "pcm_u8"),
]


@pytest.mark.parametrize("arguments", FFMPEG_FILES, ids=lambda arguments: "-".join(map(str, arguments[:2])))
def test_sound_of_ffmpeg_is_decoded_sample_by_sample(tmp_path: Path, arguments: tuple[Any, ...]) -> None:
    content = _encode(*arguments)
    _check(tmp_path, content)
    for damaged in (content[: len(content) * 6 // 10], content[:-5]):
        _check(tmp_path, damaged, may_be_refused=True)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", MORE_FFMPEG_FILES, ids=lambda arguments: "-".join(map(str, arguments[:2])))
def test_more_sound_of_ffmpeg_is_decoded_sample_by_sample(tmp_path: Path, arguments: tuple[Any, ...]) -> None:
    content = _encode(*arguments)
    _check(tmp_path, content)
    for damaged in (content[: len(content) * 6 // 10], content[:-5], content * 2, content + b"xyz" * 40):
        _check(tmp_path, damaged, may_be_refused=True)


UNWRITABLE = ("RAW", "SD2")  # no header, and a header in a second file


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in soundfile.available_formats() if form not in UNWRITABLE])
def test_every_format_of_libsndfile_is_decoded_as_it_does(tmp_path: Path, form: str) -> None:
    for subtype in soundfile.available_subtypes(form):
        try:
            content = _sound(form, subtype, 8_000)
        except RuntimeError:  # libsndfile reads this one only
            continue
        _check(tmp_path, content)
        for damaged in (content[: len(content) * 6 // 10], content[:-1], content * 2, content + bytes(777)):
            _check(tmp_path, damaged, may_be_refused=True)


def _put(content: bytes, mark: bytes, offset: int, field: bytes) -> bytes:
    at = content.index(mark) + offset
    return content[:at] + field + content[at + len(field) :]


def _flac_of(content: bytes, num_samples: int) -> bytes:
    stated = int.from_bytes(content[18:26], "big") >> 36 << 36 | num_samples
    return content[:18] + stated.to_bytes(8, "big") + content[26:]


NUM_SAMPLES = round(SECONDS * RATE)
WRONG_LENGTHS: dict[str, Callable[[], bytes]] = {
    **{
        f"wav-{size:x}": lambda size=size: _put(_sound("WAV", "PCM_16"), b"data", 4, struct.pack("<I", size))  # type: ignore[misc]
        for size in (0, 0xFFFFFFFF, 0x7FFFFFFF, 0xFFFFFFF0, NUM_SAMPLES, 4 * NUM_SAMPLES)
    },
    **{
        f"au-{size:x}": lambda size=size: _put(_sound("AU", "PCM_16"), b".snd", 8, struct.pack(">I", size))  # type: ignore[misc]
        for size in (0xFFFFFFFF, 4 * NUM_SAMPLES)
    },
    **{
        f"aiff-{count}": lambda count=count: _put(_sound("AIFF", "PCM_16"), b"COMM", 10, struct.pack(">I", count))  # type: ignore[misc]
        for count in (0, 2 * NUM_SAMPLES)
    },
    **{
        f"caf-{size}": lambda size=size: _put(_sound("CAF", "PCM_16"), b"data", 4, struct.pack(">q", size))  # type: ignore[misc]
        for size in (-1, 8 * NUM_SAMPLES)
    },
    **{
        f"flac-{count}": lambda count=count: _flac_of(_sound("FLAC", "PCM_16"), count)  # type: ignore[misc]
        for count in (0, NUM_SAMPLES // 2, NUM_SAMPLES - 1)
    },
    "ogg-chained": lambda: _sound("OGG", "VORBIS") + _sound("OGG", "VORBIS"),
    "opus-chained": lambda: _sound("OGG", "OPUS") + _sound("OGG", "OPUS"),
    "mp3-joined": lambda: _encode("mp3", "libmp3lame", {"id3v2_version": "0"}) * 2,
}


@pytest.mark.parametrize("name", WRONG_LENGTHS)
def test_lengths_that_headers_state_wrongly_are_measured(tmp_path: Path, name: str) -> None:
    content = WRONG_LENGTHS[name]()
    _check(tmp_path, content)
    ours = _decode(tmp_path / "clip")
    judges = [judge for judge in (_by_sndfile(content), _by_ffmpeg(content)) if judge is not None]
    is_shorter_by_design = name == f"wav-{NUM_SAMPLES:x}"
    assert ours is not None
    assert len(ours) == max(map(len, judges)) or is_shorter_by_design


@pytest.mark.parametrize("name", ["flac-long", "flac-cut", "mp3-cut", "m4a-cut", "mkv-cut"])
def test_clips_whose_end_is_missing_are_refused_when_they_are_measured(tmp_path: Path, name: str) -> None:
    flac, mp3 = _sound("FLAC", "PCM_16"), _encode("mp3", "libmp3lame")
    m4a, mkv = (
        _encode("mp4", "aac", {"movflags": "faststart"}, path=tmp_path / "a.m4a"),
        _encode("matroska", "pcm_s16le"),
    )
    contents = {
        "flac-long": _flac_of(flac, NUM_SAMPLES + 1),
        "flac-cut": flac[: len(flac) * 6 // 10],
        "mp3-cut": mp3[: len(mp3) * 6 // 10],
        "m4a-cut": m4a[: len(m4a) * 6 // 10],
        "mkv-cut": mkv[: len(mkv) * 6 // 10],
    }
    (tmp_path / "clip").write_bytes(contents[name])
    with pytest.raises(BadAudioError) as refused:
        read_sound_length(FileMedia(str(tmp_path / "clip")), 100.0)
    assert refused.value.kind in ("truncated", "undecodable")


def test_data_check_counts_all_seconds_of_such_clips(tmp_path: Path) -> None:
    (tmp_path / "vbr.mp3").write_bytes(_encode("mp3", "libmp3lame", NO_XING, VARIABLE))
    (tmp_path / "a.m4a").write_bytes(_encode("mp4", "aac"))
    turns = [{"from": "human", "value": "<audio>"}, {"from": "gpt", "value": "noise"}]
    rows = [{"id": name, "audio": name, "conversations": turns} for name in ("vbr.mp3", "a.m4a")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    report = check_sources([SourceSettings(path=tmp_path / "rows.json")])
    assert not report.bad
    assert abs(report.seconds_of_sound - 2 * SECONDS) < 0.2
