"""Videos as a few frames, and files that are not videos."""

import io
from pathlib import Path

import av
import numpy as np
import pytest
from av.video.stream import VideoStream
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmtrain.data.media.media_bytes import FileMedia, TarMember
from mmtrain.data.media.mp4_rotation import read_quarter_turns
from mmtrain.data.media.video import BadVideoError, load_video_frames, read_start_and_duration, read_video_header
from mmtrain.recipe.data_settings import ImageSettings
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


def _seen(media: FileMedia | TarMember, count: int) -> list[str]:
    """Return the colours that the frames show."""
    colours = []
    for frame in load_video_frames(media, count, (32, 24), SETTINGS):
        assert frame.size == (32, 24)
        mean = np.asarray(frame).mean(axis=(0, 1))
        colours.append(min(COLOURS, key=lambda name: float(np.abs(mean - COLOURS[name]).sum())))
    return colours


@pytest.mark.parametrize("form", ["mp4", "matroska", "avi"])
def test_frames_are_evenly_spaced(tmp_path: Path, form: str) -> None:
    media = _file(tmp_path / "x", movie(list(COLOURS), form=form))
    assert read_video_size(media, 4, LIMIT) == (64, 48, 4)
    assert _seen(media, 4) == list(COLOURS)
    assert _seen(media, 2) == ["lime", "white"]  # 1/4 and 3/4 of the way
    assert _seen(media, 1) == ["blue"]
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
    (frame,) = load_video_frames(media, 1, (width, height), SETTINGS)
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


@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])  # the second stores frames in another order than it shows them
@pytest.mark.parametrize("form", ["mp4", "matroska", "mpegts"])
@pytest.mark.parametrize("key_every", [5, 24])
def test_frames_are_those_shown_at_their_times_with_and_without_seeking(
    tmp_path: Path, codec: str, form: str, key_every: int
) -> None:
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV cannot write {codec}")
    shades = [Image.new("L", (32, 32), 4 * i).convert("RGB") for i in range(60)]
    content = movie(shades, 0.5, 32, 32, rate=2, form=form, codec=codec, key_every=key_every)
    with av.open(io.BytesIO(content)) as container:
        frames_by_time = [
            (frame.time, float(np.asarray(frame.to_image().convert("L")).mean())) for frame in container.decode(video=0)
        ]
    media = _file(tmp_path / "x", content)
    with av.open(io.BytesIO(content)) as container:
        start, seconds = read_start_and_duration(media, container.streams.video[0])
    for count in (1, 2, 3, 7, 20, 60):
        times = [start + (i + 0.5) / count * seconds for i in range(count)]
        expected = [[shade for time, shade in frames_by_time if time <= shown_at][-1] for shown_at in times]
        brightness = [
            float(np.asarray(frame.convert("L")).mean())
            for frame in load_video_frames(media, count, (32, 32), SETTINGS)
        ]
        assert np.abs(np.array(brightness) - expected).max() < 0.5, count


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
    assert read_video_size(media, 4, LIMIT)[2] == 4  # the header is fine
    with pytest.raises(BadVideoError) as rejected:
        load_video_frames(media, 4, (32, 24), SETTINGS)
    assert rejected.value.kind in ("truncated", "undecodable")
