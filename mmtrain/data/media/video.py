"""Read from the header of a video how many of its frames are used, and decode these frames when they are needed.

FFmpeg decodes, by way of PyAV. It gets an open file whose container must be on a short list: otherwise FFmpeg would
follow playlists and lists of parts to any file of this machine, and into the network.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from PIL import Image

from mmtrain.data.media.fitting import Size, fit_picture
from mmtrain.data.media.media_bytes import BadMediaError, Media, NotAFileError, describe_missing
from mmtrain.data.media.mp4_rotation import read_quarter_turns
from mmtrain.data.optional_packages import require_package
from mmtrain.errors import RemoteReadError
from mmtrain.recipe.data_settings import ImageSettings

# Containers that hold their frames themselves.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv"
_CLOCKWISE = {1: Image.Transpose.ROTATE_270, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_90}
_MIN_SEEK_GAP_S = 8.0  # without an index of key frames: seek between frames that are further apart than this
_SEEK_MARGINS_S = (0.0, 1.0, 10.0)  # how far before the wanted time to seek, tried one after the other
# The last frame stays on show for this long: it may last longer than the others, and sound may outlast it.
_LAST_FRAME_S = 1.0
_LAST_FRAME_SHARE = 0.1  # of the duration


class BadVideoError(BadMediaError):
    """A video that cannot be used."""


@dataclass(frozen=True)
class VideoHeader:
    """What the header of a video says."""

    width: int  # of upright frames
    height: int
    num_frames: int
    frames_per_second: float


# Returns the numbers of the frames to show, ascending; the last one may be there several times. A fraction is a moment
# between the middles of two frames.
FrameChoice = Callable[[VideoHeader], Sequence[float]]


def read_video_header(media: Media, max_source_pixels: int) -> VideoHeader:
    """Read the header of a video. Raises `BadVideoError` for what no decoder could use."""
    with _open_video(media, "not_a_video", max_source_pixels) as (_, stream):
        width = stream.codec_context.width
        height = stream.codec_context.height
        _, seconds = read_start_and_duration(media, stream)
        rate, num_frames = _rate_and_frames(stream, seconds)
    if not 0 < width * height <= max_source_pixels:  # FFmpeg states no size for frames that it would not decode
        size = f"{width} x {height}" if width * height else "the size of its frames"
        reason = f"{media}: {size} is above data.image.max_source_pixels = {max_source_pixels}"
        raise BadVideoError("too_many_pixels", reason)
    if _quarter_turns(media) % 2:
        width, height = height, width
    return VideoHeader(width, height, num_frames, rate)


def _rate_and_frames(stream: Any, seconds: float) -> tuple[float, int]:
    """Return frames per second, and how many frames there are; at least one."""
    rate = float(stream.average_rate or 1)
    return rate, max(1, stream.frames or math.floor(seconds * rate))


def load_video_frames(
    media: Media, count: int, size: Size, settings: ImageSettings, choose: FrameChoice | None = None
) -> list[Image.Image]:
    """Decode `count` frames and fit them into `size` (width, height).

    They are those that `choose` returns. Without it the video is divided into `count` equal parts, and of each the
    frame in the middle is returned. Raises `BadVideoError`.
    """
    with _open_video(media, "undecodable", settings.max_source_pixels) as (container, stream):
        start_s, duration_s = read_start_and_duration(media, stream)
        last_frame_s = max(_LAST_FRAME_S, _LAST_FRAME_SHARE * duration_s)
        times_s = [start_s + (i + 0.5) / count * duration_s for i in range(count)]
        if choose is not None:
            rate, num_frames = _rate_and_frames(stream, duration_s)
            header = VideoHeader(stream.codec_context.width, stream.codec_context.height, num_frames, rate)
            times_s = [start_s + (frame + 0.5) / rate for frame in choose(header)]
        rotation = _CLOCKWISE.get(_quarter_turns(media))
        images = []
        for run in _split_into_runs(stream, times_s):
            frames = _frames_from(container, stream, run[0], seek=run[0] > times_s[0])
            for frame in _frames_at(frames, run, last_frame_s):
                # One by one: decoded frames may be large.
                images.append(fit_picture(_to_image(frame, rotation), size, settings))
    if len(images) < count:
        raise BadVideoError("truncated", f"{media}: {len(images)} of {count} frames are there")
    return images


def _to_image(frame: Any, rotation: Image.Transpose | None) -> Image.Image:
    image: Image.Image = frame.to_image()
    return image if rotation is None else image.transpose(rotation)


def _quarter_turns(media: Media) -> int:
    with media.open() as file:
        return read_quarter_turns(file)


def _split_into_runs(stream: Any, times_s: list[float]) -> list[list[float]]:
    """Split the wanted times into runs that are decoded without a gap; between two runs a seek is faster."""
    entries = getattr(stream, "index_entries", ())
    key_times_s = [float(entry.timestamp * stream.time_base) for entry in entries if entry.is_keyframe]
    knows_key_frames = len(entries) > 1  # some containers state key frames only after the first seek
    runs = [times_s[:1]]
    for previous_s, time_s in pairwise(times_s):
        if knows_key_frames:
            starts_run = bisect_right(key_times_s, previous_s) < bisect_right(key_times_s, time_s)
        else:
            starts_run = time_s - previous_s > _MIN_SEEK_GAP_S
        if starts_run:
            runs.append([])
        runs[-1].append(time_s)
    return runs


def _frames_from(container: Any, stream: Any, time_s: float, seek: bool) -> Iterator[Any]:
    """Return the frames from the one on show at `time_s`, or an earlier one; all frames if `seek` is false."""
    for margin_s in _SEEK_MARGINS_S if seek else ():
        container.seek(math.floor((time_s - margin_s) / stream.time_base), stream=stream)  # to a key frame before it
        frames = container.decode(stream)
        first = next(frames, None)
        # Indexes state when frames are decoded: a key frame may be decoded before `time_s` and shown after it.
        if first is not None and first.time is not None and first.time <= time_s:
            return chain([first], frames)
    if seek:
        container.seek(0)
    frames_from_start: Iterator[Any] = container.decode(stream)
    return frames_from_start


def _frames_at(frames: Iterator[Any], times_s: list[float], last_frame_s: float) -> Iterator[Any]:
    """Yield the frames on show at ascending times; the last frame stays on show for `last_frame_s` seconds."""
    remaining_s = iter(times_s)
    time_s = next(remaining_s, None)
    shown = None
    for frame in frames:
        if frame.time is None:
            continue
        while time_s is not None and frame.time > time_s:
            yield shown if shown is not None else frame
            time_s = next(remaining_s, None)
        if time_s is None:
            return
        shown = frame
    while shown is not None and time_s is not None and time_s < shown.time + last_frame_s:
        yield shown
        time_s = next(remaining_s, None)


def read_start_and_duration(media: Media, stream: Any) -> tuple[float, float]:
    """Return when a video starts and how long it lasts, in seconds."""
    time_base = stream.time_base
    tag = re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", stream.metadata.get("DURATION", ""))
    if stream.duration is not None and time_base is not None:
        seconds = float(stream.duration * time_base)
    elif tag is not None:  # Matroska; the container's own duration is that of its longest stream, perhaps of sound
        seconds = 3600 * int(tag[1]) + 60 * int(tag[2]) + float(tag[3])
    else:
        seconds = (stream.container.duration or 0) / 1e6
    if seconds <= 0:
        raise BadVideoError("empty_video", f"{media}: the header states no duration")
    return float((stream.start_time or 0) * time_base), seconds


@contextmanager
def _open_video(media: Media, broken: str, max_source_pixels: int) -> Iterator[tuple[Any, Any]]:
    """Yield the container of a video and its first video stream; errors become a `BadVideoError` of kind `broken`."""
    av = require_package("av", "video", f"{media}: reading videos")
    container_options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "none"}
    codec_options = {"max_pixels": str(max_source_pixels)}  # a later frame may be larger than the header states
    try:
        with (
            media.open() as file,
            av.open(
                file, options=codec_options, container_options=container_options, metadata_errors="ignore"
            ) as container,
        ):
            if not container.streams.video:
                raise BadVideoError("not_a_video", f"{media}: it has no pictures")
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # loaders decode several files at a time
            yield container, stream
    except FileNotFoundError:
        raise BadVideoError("missing_video", describe_missing(media)) from None
    except NotAFileError as error:
        raise BadVideoError("not_a_video", f"{media}: {error}") from None
    except (BadVideoError, RemoteReadError):
        raise
    except Exception as error:
        why = getattr(error, "strerror", None) or error  # FFmpeg's own message, without the number of our stream
        raise BadVideoError(broken, f"{media}: {type(error).__name__}: {why}") from None
