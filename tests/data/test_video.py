"""Videos as a few frames, and files that are not videos."""

import io
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.video.stream import VideoStream
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmtrain.data.media.media_bytes import FileMedia, TarMember
from mmtrain.data.media.video import (
    BadVideoError,
    VideoHeader,
    load_video_frames,
    read_quarter_turns,
    read_video_header,
)
from mmtrain.data.media.vision_items import first_of_parts
from mmtrain.recipe.settings.data_settings import ImageSettings
from tests.data.archives import movie, tar, wav

COLOURS = {"red": (255, 0, 0), "lime": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
LIMIT = 1_000_000
SETTINGS = ImageSettings(max_source_pixels=LIMIT)


def _file(path: Path, content: bytes) -> FileMedia:
    path.write_bytes(content)
    return FileMedia(str(path))


def read_video_size(media: FileMedia | TarMember, max_frames: int, limit: int) -> tuple[int, int, int]:
    """Return width, height and the number of frames, at most `max_frames`."""
    header = read_video_header(media, limit)
    return header.width, header.height, min(max_frames, header.num_frames)


def _first_of_parts(media: FileMedia | TarMember, count: int, size: tuple[int, int]) -> list[Image.Image]:
    return load_video_frames(media, count, size, SETTINGS, lambda header: first_of_parts(header.num_frames, count))


def _seen(media: FileMedia | TarMember, count: int) -> list[str]:
    """Return the colours that the frames show."""
    colours = []
    for frame in _first_of_parts(media, count, (32, 24)):
        assert frame.size == (32, 24)
        mean = np.asarray(frame).mean(axis=(0, 1))
        colours.append(min(COLOURS, key=lambda name: float(np.abs(mean - COLOURS[name]).sum())))
    return colours


@pytest.mark.parametrize("form", ["mp4", "matroska", "avi"])
def test_frames_are_evenly_spaced(tmp_path: Path, form: str) -> None:
    media = _file(tmp_path / "x", movie(list(COLOURS), form=form))
    assert read_video_size(media, 4, LIMIT) == (64, 48, 4)
    assert _seen(media, 4) == list(COLOURS)
    assert _seen(media, 2) == ["red", "blue"]
    assert _seen(media, 1) == ["red"]
    assert _seen(media, 8) == [name for name in COLOURS for _ in range(2)]


@pytest.mark.skipif(not hasattr(VideoStream, "set_display_rotation"), reason="this PyAV cannot write it")
@pytest.mark.parametrize(("rotation", "turns"), [(0, 0), (-90, 1), (180, 2), (90, 3)])
@pytest.mark.parametrize("form", ["mp4", "mov"])
def test_videos_are_rotated_as_their_header_says(tmp_path: Path, rotation: int, turns: int, form: str) -> None:
    filmed = Image.new("RGB", (64, 48), "red")
    filmed.paste((0, 0, 255), (32, 0, 64, 48))  # red on the left, blue on the right
    content = movie([filmed], form=form, rotation=rotation)
    with av.open(io.BytesIO(content)) as container:
        assert next(container.decode(video=0)).rotation % 360 == rotation % 360
    media = _file(tmp_path / "x.mp4", content)
    with media.open() as file:
        assert read_quarter_turns(file) == turns
    width, height, _ = read_video_size(media, 1, LIMIT)
    assert (width, height) == ((64, 48) if turns % 2 == 0 else (48, 64))
    (frame,) = _first_of_parts(media, 1, (width, height))
    expected = np.asarray(filmed.rotate(rotation, expand=True), dtype=float)
    assert np.abs(np.asarray(frame, dtype=float) - expected).mean() < 20


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 1 << 64))
def test_damaged_headers_give_some_rotation_and_no_error(noise: bytes, offset: int, size: int) -> None:
    content = movie(["red"], form="mov")
    moov = content.index(b"moov") - 4
    broken = content[: moov + offset] + size.to_bytes(9, "big")[-8:] + noise + content[moov + offset + 20 :]
    for piece in (broken, noise, b"\0\0\0\x01moov" + size.to_bytes(9, "big")[-8:] + noise):
        assert 0 <= read_quarter_turns(io.BytesIO(piece)) <= 3


def test_a_short_video_yields_no_more_frames_than_it_holds(tmp_path: Path) -> None:
    media = _file(tmp_path / "x.mp4", movie(["red", "blue"], seconds_each=0.1))
    assert read_video_size(media, 64, LIMIT) == (64, 48, 4)
    assert _seen(media, 4) == ["red", "red", "blue", "blue"]


def _these(numbers: list[int], header: VideoHeader) -> list[int]:
    return numbers


def _uneven(num_frames: int, start_ms: int, form: str, codec: str, options: Mapping[str, str] | None = None) -> bytes:
    """Encode frames that differ, each shown for another time: the rate of the video varies."""
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV cannot write {codec}")
    rng = np.random.default_rng(num_frames)
    milliseconds = Fraction(1, 1000)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form, options=dict(options or {})) as container:
        stream = container.add_stream(codec, rate=100)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.gop_size = 10
        stream.codec_context.time_base = milliseconds
        shown_ms = 0
        packets = []
        for number in range(num_frames):
            noise = rng.integers(0, 8, (48, 64, 3)) + 37 * number % 240
            frame = av.VideoFrame.from_ndarray(noise.astype(np.uint8))
            frame.pts, frame.time_base = shown_ms, milliseconds
            packets += stream.encode(frame)
            shown_ms += int(rng.choice([10, 10, 20, 33, 200, 1500]))
        for packet in [*packets, *stream.encode(None)]:
            shift = int(Fraction(start_ms, 1000) / packet.time_base)
            packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
            container.mux(packet)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("form", "codec", "start_ms", "options"),
    [
        ("mp4", "mpeg4", 0, {}),
        ("mp4", "libx264", 2000, {}),  # which stores frames in another order than it shows them
        ("mp4", "libx264", -700, {"avoid_negative_ts": "disabled"}),  # an edit list leaves out its start
        ("mp4", "libx264", 0, {"movflags": "frag_keyframe+empty_moov"}),  # no index, and no number of frames
        ("mov", "mpeg4", 500, {}),
        ("matroska", "libx264", 0, {}),
        ("webm", "libvpx-vp9", 700, {}),
        ("mpegts", "libx264", 0, {}),
        ("flv", "libx264", 0, {}),
        ("avi", "mpeg4", 0, {}),  # with empty packets, which show the frame before
        ("avi", "libx264", 0, {}),  # which states when frames are decoded
    ],
)
def test_frames_of_any_container_and_rate_are_found_by_their_numbers(
    tmp_path: Path, form: str, codec: str, start_ms: int, options: dict[str, str]
) -> None:
    content = _uneven(50, start_ms, form, codec, options)
    media = _file(tmp_path / "x", content)
    with av.open(io.BytesIO(content)) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(decoded) == 50 if start_ms >= 0 else 30 < len(decoded) < 50
    assert read_video_header(media, LIMIT).num_frames == len(decoded)
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 17, len(decoded)):
        numbers: list[int] = sorted(rng.choice(len(decoded), count, replace=False).tolist())
        frames = load_video_frames(media, count, (64, 48), SETTINGS, partial(_these, numbers))
        for number, frame in zip(numbers, frames, strict=True):
            assert np.array_equal(np.asarray(frame), decoded[number]), (count, number)


@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])
@pytest.mark.parametrize("start_ms", [0, 2000])
def test_frames_of_a_variable_rate_are_those_that_transformers_loads(tmp_path: Path, codec: str, start_ms: int) -> None:
    load_video = pytest.importorskip("transformers.video_utils").load_video
    media = _file(tmp_path / "x.mp4", _uneven(40, start_ms, "mp4", codec))
    for count in (1, 5, 7, 39):

        def choose(metadata: Any, count: int = count, **_: Any) -> np.ndarray:
            return np.array(first_of_parts(metadata.total_num_frames, count))

        theirs, metadata = load_video(media.path, sample_indices_fn=choose)
        header = read_video_header(media, LIMIT)
        assert (header.num_frames, header.frames_per_second) == (metadata.total_num_frames, metadata.fps)
        ours = _first_of_parts(media, count, (64, 48))
        assert np.array_equal(np.stack([np.asarray(frame) for frame in ours]), theirs)


@pytest.mark.parametrize("form", ["matroska", "mov", "avi"])
def test_sound_longer_than_the_pictures_does_not_change_the_frames(tmp_path: Path, form: str) -> None:
    media = _file(tmp_path / "x", movie(["red", "blue"], seconds_each=2, form=form, seconds_of_sound=30))
    assert _seen(media, 4) == ["red", "red", "blue", "blue"]


def test_seeking_over_long_gaps_finds_the_same_frames(tmp_path: Path) -> None:
    colours = ["red", "lime", "blue", "white"]
    media = _file(tmp_path / "x.mp4", movie(colours, seconds_each=12, rate=2))
    assert _seen(media, 4) == colours  # 12 s apart: by seeking
    assert _seen(media, 8) == [name for name in colours for _ in range(2)]  # 6 s apart: without seeking


def test_a_video_may_be_a_member_of_a_shard(tmp_path: Path) -> None:
    content = movie(["red", "blue"])
    path = tar(tmp_path / "x.tar", {"a.txt": b"y" * 700, "a.mp4": content})
    offset = path.read_bytes().index(content)
    media = TarMember(str(path), "a.mp4", offset, len(content))
    assert read_video_size(media, 2, LIMIT) == (64, 48, 2)
    assert _seen(media, 2) == ["red", "blue"]


def _list_of_parts(other: Path) -> bytes:
    return f"ffconcat version 1.0\nfile '{other}'\n".encode()


def _playlist(other: Path) -> bytes:
    return f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{other}\n#EXT-X-ENDLIST\n".encode()


@pytest.mark.parametrize("hostile", [_list_of_parts, _playlist])
def test_lists_that_name_other_files_are_not_followed(tmp_path: Path, hostile: object) -> None:
    other = tmp_path / "secret.mp4"
    other.write_bytes(movie(["red"]))
    assert callable(hostile)
    with pytest.raises(BadVideoError) as rejected:
        read_video_size(_file(tmp_path / "x.mp4", hostile(other)), 4, LIMIT)
    assert rejected.value.kind == "not_a_video"


@pytest.mark.parametrize(
    ("content", "kind"),
    [(None, "missing_video"), (b"no video", "not_a_video"), (wav(0.2), "not_a_video"), (b"", "not_a_video")],
)
def test_faults_in_the_header_are_rejected_before_decoding(tmp_path: Path, content: bytes | None, kind: str) -> None:
    media = FileMedia(str(tmp_path / "x.mp4")) if content is None else _file(tmp_path / "x.mp4", content)
    with pytest.raises(BadVideoError, match=r"x\.mp4") as rejected:
        read_video_size(media, 4, LIMIT)
    assert rejected.value.kind == kind


def test_too_many_pixels_are_rejected_from_the_header(tmp_path: Path) -> None:
    media = _file(tmp_path / "x.mp4", movie(["red"]))
    with pytest.raises(BadVideoError, match=r"is above data\.image\.max_source_pixels = 3071") as rejected:
        read_video_size(media, 4, 64 * 48 - 1)
    assert rejected.value.kind == "too_many_pixels"


def test_missing_frames_are_an_error(tmp_path: Path) -> None:
    intact = movie(["red", "lime", "blue", "white"], seconds_each=2, form="matroska")
    media = _file(tmp_path / "x.mkv", intact[: len(intact) // 2])
    with pytest.raises(BadVideoError, match=r"s of the 8\.0 s in its header are there") as rejected:
        read_video_header(media, LIMIT)
    assert rejected.value.kind == "truncated"
    media = _file(tmp_path / "x.mp4", movie(["red", "lime"]))
    with pytest.raises(BadVideoError, match="0 of 1 frames are there") as rejected:
        load_video_frames(media, 1, (32, 24), SETTINGS, lambda _: [100])
    assert rejected.value.kind == "truncated"


def test_a_tag_that_is_no_text_costs_nothing(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        container.metadata["title"] = "TITLE"
        stream = container.add_stream("mpeg4", rate=20)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (64, 48), "red"))))
        container.mux(stream.encode(None))
    content = buffer.getvalue()
    assert content.count(b"TITLE") == 1
    media = _file(tmp_path / "x", content.replace(b"TITLE", b"T\xefT\xe9\xff"))
    assert read_video_header(media, LIMIT).num_frames == 1
