"""From a video file to a few frames: how many from its header, and their pixels when they are needed.

Decoding is FFmpeg's, by way of PyAV. A file is handed over open and its container must be one of a short list: FFmpeg
would follow playlists and lists of parts to any file of this machine, and into the network.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

from PIL import Image

from mmtrain.data.media.media_bytes import BadMediaError, Media
from mmtrain.data.media.mp4_rotation import read_quarter_turns
from mmtrain.data.optional_packages import require_package

# Containers that hold their frames themselves.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv"
_CLOCKWISE = {1: Image.Transpose.ROTATE_270, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_90}
_SEEK_SECONDS = 8.0  # where key frames are unknown: frames further apart than this are jumped to
_BACK_SECONDS = (0.0, 1.0, 10.0)  # how much earlier a key frame is looked for, one after the other
_SPARE_SECONDS, _SPARE_SHARE = 1.0, 0.1  # the last frame may be shown longer, and sound may outlast it


class BadVideoError(BadMediaError):
    """A video that cannot be used."""


def read_video_size(media: Media, max_frames: int, max_source_pixels: int) -> tuple[int, int, int]:
    """Upright width and height of the frames, and how many of them are used; from the header, without decoding.

    Raises `BadVideoError` for what no decoder could use.
    """
    with _opened(media, "not_a_video", max_source_pixels) as (_, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        _, seconds = read_start_and_duration(media, stream)
        there = stream.frames or math.floor(seconds * float(stream.average_rate or 1))
    if not 0 < width * height <= max_source_pixels:  # FFmpeg tells no size of pictures that it would not decode
        found = f"{width} x {height}" if width * height else "the size of its pictures"
        reason = f"{media}: {found} is above data.image.max_source_pixels = {max_source_pixels}"
        raise BadVideoError("too_many_pixels", reason)
    if _turns(media) % 2:
        width, height = height, width
    return width, height, max(1, min(max_frames, there))


def load_video_frames(media: Media, count: int, size: tuple[int, int], max_source_pixels: int) -> list[Image.Image]:
    """Decode `count` frames, each from the middle of one of as many equal parts, resized to `size` (width, height).

    Raises `BadVideoError`.
    """
    with _opened(media, "undecodable", max_source_pixels) as (container, stream):
        start, seconds = read_start_and_duration(media, stream)
        spare = max(_SPARE_SECONDS, _SPARE_SHARE * seconds)
        times = [start + (i + 0.5) / count * seconds for i in range(count)]
        turn = _CLOCKWISE.get(_turns(media))
        pictures = [  # one by one: whole frames may be large
            _picture(frame, turn, size)
            for run in _runs(stream, times)
            for frame in _shown_at(_from(container, stream, run[0], run[0] > times[0]), run, spare)
        ]
    if len(pictures) < count:
        raise BadVideoError("truncated", f"{media}: {len(pictures)} of {count} frames are there")
    return pictures


def _picture(frame: Any, turn: Image.Transpose | None, size: tuple[int, int]) -> Image.Image:
    whole: Image.Image = frame.to_image()
    return (whole if turn is None else whole.transpose(turn)).resize(size, Image.Resampling.BICUBIC)


def _turns(media: Media) -> int:
    with media.open() as file:
        return read_quarter_turns(file)


def _runs(stream: Any, times: list[float]) -> list[list[float]]:
    """The moments in runs, each decoded through; between runs it takes less to jump to a key frame."""
    entries = getattr(stream, "index_entries", ())
    keys = [float(entry.timestamp * stream.time_base) for entry in entries if entry.is_keyframe]
    runs = [times[:1]]
    for before, time in pairwise(times):
        known = len(entries) > 1  # some containers tell where key frames are only after the first jump
        jump = bisect_right(keys, before) < bisect_right(keys, time) if known else time - before > _SEEK_SECONDS
        if jump:
            runs.append([])
        runs[-1].append(time)
    return runs


def _from(container: Any, stream: Any, time: float, jump: bool) -> Iterator[Any]:
    """The frames from the one on show at `time`, or an earlier one; all of them unless it takes a jump."""
    for back in _BACK_SECONDS if jump else ():
        container.seek(math.floor((time - back) / stream.time_base), stream=stream)  # to a key frame before
        frames = container.decode(stream)
        first = next(frames, None)
        # Indexes go by when frames are decoded: a key frame may be decoded before `time` and shown after it.
        if first is not None and first.time is not None and first.time <= time:
            return chain([first], frames)
    if jump:
        container.seek(0)
    frames_from_start: Iterator[Any] = container.decode(stream)
    return frames_from_start


def _shown_at(frames: Iterator[Any], times: list[float], spare: float) -> Iterator[Any]:
    """The frames on show at some moments, in seconds and ascending; the last stays on show for `spare` seconds."""
    wanted = iter(times)
    time = next(wanted, None)
    shown = None
    for frame in frames:
        if frame.time is None:
            continue
        while time is not None and frame.time > time:
            yield shown if shown is not None else frame
            time = next(wanted, None)
        if time is None:
            return
        shown = frame
    while shown is not None and time is not None and time < shown.time + spare:
        yield shown
        time = next(wanted, None)


def read_start_and_duration(media: Media, stream: Any) -> tuple[float, float]:
    """When a video starts, and how many seconds it lasts."""
    base = stream.time_base
    tag = re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", stream.metadata.get("DURATION", ""))
    if stream.duration is not None and base is not None:
        seconds = float(stream.duration * base)
    elif tag is not None:  # Matroska; the container's own is that of its longest stream, perhaps of sound
        seconds = 3600 * int(tag[1]) + 60 * int(tag[2]) + float(tag[3])
    else:
        seconds = (stream.container.duration or 0) / 1e6
    if seconds <= 0:
        raise BadVideoError("empty_video", f"{media}: the header tells no duration")
    return float((stream.start_time or 0) * base), seconds


@contextmanager
def _opened(media: Media, broken: str, max_source_pixels: int) -> Iterator[tuple[Any, Any]]:
    """Open a video: its container and first stream of pictures; what goes wrong is a `BadVideoError`."""
    av = require_package("av", "video", f"{media}: reading videos")
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "none"}
    decoding = {"max_pixels": str(max_source_pixels)}  # a later picture may be larger than the header says
    try:
        with (
            media.open() as file,
            av.open(file, options=decoding, container_options=options, metadata_errors="ignore") as container,
        ):
            if not container.streams.video:
                raise BadVideoError("not_a_video", f"{media}: it has no pictures")
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # loaders decode several files at once
            yield container, stream
    except FileNotFoundError:
        raise BadVideoError("missing_video", f"{media}: no such file") from None
    except BadVideoError:
        raise
    except Exception as error:
        why = getattr(error, "strerror", None) or error  # FFmpeg's own words, without the number of our stream
        raise BadVideoError(broken, f"{media}: {type(error).__name__}: {why}") from None
