"""Read how many frames a video has, and decode some of them, by their numbers, when they are needed.

Frames are numbered in the order of showing, as the video processors of `transformers` count them. So a rate that varies
does not matter. When each is shown is read from the packets, which are not decoded. FFmpeg decodes, by way of PyAV. It
gets an open file whose container must be on a short list. Otherwise FFmpeg would follow playlists and lists of parts to
any file of this machine, and into the network.

Phones film sideways and record the rotation in the header of the MP4 or QuickTime file. Such a file is a list of boxes,
each a size, a type and a body, which may hold boxes again (ISO/IEC 14496-12).
"""

import math
import os
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, BinaryIO, NamedTuple

from PIL import Image

from mmtrain.data.media.image_grids import Size, fit_picture
from mmtrain.data.media.media_bytes import BadMediaError, Media
from mmtrain.data.media.media_errors import media_errors, open_container
from mmtrain.data.optional_packages import require_package
from mmtrain.recipe.settings.data_settings import ImageSettings

# Containers that hold their frames themselves.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv"
_CLOCKWISE = {1: Image.Transpose.ROTATE_270, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_90}
_SEEK_MARGINS_S = (0.0, 1.0, 10.0)  # how far before the wanted time to seek, tried one after the other
# The last frame stays on show for this long: it may last longer than the others, and sound may outlast it.
_LAST_FRAME_S = 1.0
_LAST_FRAME_SHARE = 0.1  # of the duration
_MAX_BOXES = 10_000  # far more than real files have; a hostile file must not keep us here


class BadVideoError(BadMediaError):
    """A video that cannot be used."""

    missing_kind, other_kind, packages = "missing_video", "not_a_video", ("av",)


@dataclass(frozen=True)
class VideoHeader:
    """What is known of a video before any frame is decoded."""

    width: int  # of upright frames
    height: int
    num_frames: int
    frames_per_second: float


# Returns the numbers of the frames to show, ascending; the last one may be there several times.
FrameChoice = Callable[[VideoHeader], Sequence[int]]


class _Packet(NamedTuple):
    """When the frame of a packet is shown, in units of the stream's time base."""

    start: int
    end: int
    is_key: bool


def read_video_header(media: Media, max_source_pixels: int) -> VideoHeader:
    """Read the header of a video. Raises `BadVideoError` for what no decoder could use.

    MP4 and QuickTime state how many frames they show; of other containers all packets are counted.
    """
    with _open_video(media, "not_a_video", max_source_pixels) as (container, stream):
        width = stream.codec_context.width
        height = stream.codec_context.height
        if not 0 < width * height <= max_source_pixels:  # FFmpeg states no size for frames that it would not decode
            size = f"{width} x {height}" if width * height else "the size of its frames"
            reason = f"{media}: {size} is above data.image.max_source_pixels = {max_source_pixels}"
            raise BadVideoError("too_many_pixels", reason)
        num_frames, rate = _count_frames(media, container, stream)
    if _quarter_turns(media) % 2:
        width, height = height, width
    return VideoHeader(width, height, num_frames, rate)


def _count_frames(media: Media, container: Any, stream: Any) -> tuple[int, float]:
    """Return how many frames are shown, and how many each second on average."""
    is_mov = "mov" in container.format.name.split(",")
    if is_mov and stream.frames and stream.average_rate:
        # An edit list may leave frames out: those behind it are not in the index, those before are discarded.
        num_shown = sum(not entry.is_discard for entry in stream.index_entries)
        return num_shown or stream.frames, float(stream.average_rate)
    stated_s = _stated_seconds(stream)
    packets, num_packets = _read_packets(container, stream)
    if not num_packets:
        raise BadVideoError("empty_video", f"{media}: it has no frames")
    if len(packets) < num_packets:  # some do not state when they are shown
        return num_packets, float(stream.average_rate or 1)
    start, end = packets[0].start, max(packet.end for packet in packets)
    seconds = float((end - start) * stream.time_base)
    if stated_s is not None and stated_s - seconds > _leniency_s(stated_s):
        raise BadVideoError("truncated", f"{media}: {seconds:.1f} s of the {stated_s:.1f} s in its header are there")
    return num_packets, num_packets / seconds if seconds > 0 else float(stream.average_rate or 1)


def _read_packets(container: Any, stream: Any) -> tuple[list[_Packet], int]:
    """Return when frames are shown, ascending, as far as packets state it, and the number of packets with frames."""
    packets = []
    num_packets = 0
    for packet in container.demux(stream):
        if packet.size and not packet.is_discard:  # an empty one marks the end
            num_packets += 1
            if packet.pts is not None:
                packets.append(_Packet(packet.pts, packet.pts + (packet.duration or 0), packet.is_keyframe))
    return sorted(packets), num_packets


def _leniency_s(seconds: float) -> float:
    """Return how many seconds may be missing at the end of a video."""
    return max(_LAST_FRAME_S, _LAST_FRAME_SHARE * seconds)


def load_video_frames(
    media: Media, count: int, size: Size, settings: ImageSettings, choose: FrameChoice
) -> list[Image.Image]:
    """Decode the `count` frames that `choose` returns, and fit them into `size` (width, height).

    Raises `BadVideoError`.
    """
    header = read_video_header(media, settings.max_source_pixels)
    numbers = choose(header)
    with _open_video(media, "undecodable", settings.max_source_pixels) as (container, stream):
        packets, num_packets = _read_packets(container, stream)
        # AVI states when frames are decoded.
        is_unordered = "avi" in container.format.name.split(",") and stream.codec_context.has_b_frames
        is_timed = len(packets) == num_packets and not is_unordered
    rotation = _CLOCKWISE.get(_quarter_turns(media))
    images = []
    with _open_video(media, "undecodable", settings.max_source_pixels) as (container, stream):
        shown = _timed_frames if is_timed else _counted_frames
        for frame in shown(container, stream, packets, numbers, header.frames_per_second):
            images.append(fit_picture(_to_image(frame, rotation), size, settings))  # one by one: they may be large
    if len(images) < count:
        raise BadVideoError("truncated", f"{media}: {len(images)} of {count} frames are there")
    return images


def _counted_frames(
    container: Any, stream: Any, packets: Sequence[_Packet], numbers: Sequence[int], rate: float
) -> Iterator[Any]:
    """Yield frames by counting all that are decoded."""
    frames = enumerate(container.decode(stream))
    num_lenient = math.ceil(_leniency_s((numbers[-1] + 1) / rate) * rate)
    return _frames_at(frames, numbers, num_lenient)


def _timed_frames(
    container: Any, stream: Any, packets: Sequence[_Packet], numbers: Sequence[int], rate: float
) -> Iterator[Any]:
    """Yield frames by the times at which they are shown; seek where that saves decoding."""
    time_base = stream.time_base
    if not packets:
        return
    last = len(packets) - 1
    wanted = [
        packets[number].start
        if number <= last
        else packets[last].start + math.ceil((number - last) / rate / time_base)  # a header may count too many
        for number in numbers
    ]
    lenient = math.ceil(_leniency_s(float((wanted[-1] - packets[0].start) * time_base)) / time_base)
    for run in _split_into_runs([packet.start for packet in packets if packet.is_key], wanted):
        frames = _frames_from(container, stream, run[0], seek=run[0] > wanted[0])
        yield from _frames_at(((frame.pts, frame) for frame in frames if frame.pts is not None), run, lenient)


def _to_image(frame: Any, rotation: Image.Transpose | None) -> Image.Image:
    image: Image.Image = frame.to_image()
    return image if rotation is None else image.transpose(rotation)


def _quarter_turns(media: Media) -> int:
    with media.open() as file:
        return read_quarter_turns(file)


def _split_into_runs(key_starts: list[int], wanted: list[int]) -> list[list[int]]:
    """Split the wanted times into runs that are decoded without a gap; between two runs a seek is faster."""
    runs = [wanted[:1]]
    for previous, start in pairwise(wanted):
        if bisect_right(key_starts, previous) < bisect_right(key_starts, start):
            runs.append([])
        runs[-1].append(start)
    return runs


def _frames_from(container: Any, stream: Any, start: int, seek: bool) -> Iterator[Any]:
    """Return the frames from the one on show at `start`, or an earlier one; all frames if `seek` is false."""
    for margin_s in _SEEK_MARGINS_S if seek else ():
        container.seek(start - math.ceil(margin_s / stream.time_base), stream=stream)  # to a key frame before it
        frames = container.decode(stream)
        first = next(frames, None)
        # Indexes state when frames are decoded: a key frame may be decoded before `start` and shown after it.
        if first is not None and first.pts is not None and first.pts <= start:
            return chain([first], frames)
    if seek:
        container.seek(0)
    frames_from_start: Iterator[Any] = container.decode(stream)
    return frames_from_start


def _frames_at(frames: Iterator[tuple[int, Any]], wanted: Sequence[int], lenient: int) -> Iterator[Any]:
    """Yield the frames on show at ascending positions.

    frames: each with the position from which it is shown. lenient: how far behind it the last frame stays on show.
    """
    remaining = iter(wanted)
    position = next(remaining, None)
    shown = None
    for start, frame in frames:
        while position is not None and start > position:
            yield frame if shown is None else shown[1]
            position = next(remaining, None)
        if position is None:
            return
        shown = start, frame
    while shown is not None and position is not None and position <= shown[0] + lenient:
        yield shown[1]
        position = next(remaining, None)


def _stated_seconds(stream: Any) -> float | None:
    """Return how long the header says that the frames of a video are shown; None if it does not."""
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    tag = re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", stream.metadata.get("DURATION", ""))
    if tag is not None:  # Matroska; the container's own duration is that of its longest stream, perhaps of sound
        return 3600 * int(tag[1]) + 60 * int(tag[2]) + float(tag[3])
    return None


@contextmanager
def _open_video(media: Media, broken: str, max_source_pixels: int) -> Iterator[tuple[Any, Any]]:
    """Yield the container of a video and its first video stream; errors become a `BadVideoError` of kind `broken`."""
    av = require_package("av", "video", f"{media}: reading videos")
    codec_options = {"max_pixels": str(max_source_pixels)}  # a later frame may be larger than the header states
    with (
        media_errors(media, BadVideoError, broken),
        media.open() as file,
        open_container(av, file, _CONTAINERS, options=codec_options) as container,
    ):
        if not container.streams.video:
            raise BadVideoError("not_a_video", f"{media}: it has no pictures")
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1  # loaders decode several files at a time
        yield container, stream


def read_quarter_turns(file: BinaryIO) -> int:
    """Return the clockwise quarter turns, 0 to 3, that make the first video trak upright; 0 for any other file."""
    end = file.seek(0, os.SEEK_END)
    try:
        for moov in _mp4_boxes(file, 0, end, b"moov"):
            for trak in _mp4_boxes(file, *moov, b"trak"):
                if _is_video_trak(file, trak):
                    return next((_turns_of_trak(file, start) for start, _ in _mp4_boxes(file, *trak, b"tkhd")), 0)
    except (struct.error, OverflowError):  # the file is cut short, which the decoder will report
        pass
    return 0


def _mp4_boxes(file: BinaryIO, start: int, end: int, box_type: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of the body of each box of type `box_type` among the boxes in [start, end)."""
    for _ in range(_MAX_BOXES):
        if start + 8 > end:
            return
        file.seek(start)
        size, kind = struct.unpack(">I4s", file.read(8))
        body = start + 8
        if size == 1:  # the size follows in 64 bits
            (size,) = struct.unpack(">Q", file.read(8))
            body += 8
        box_end = end if size == 0 else start + size
        if not body <= box_end <= end:
            return
        if kind == box_type:
            yield body, box_end
        start = box_end


def _is_video_trak(file: BinaryIO, trak: tuple[int, int]) -> bool:
    for media in _mp4_boxes(file, *trak, b"mdia"):
        for handler, _ in _mp4_boxes(file, *media, b"hdlr"):
            file.seek(handler + 8)
            return file.read(4) == b"vide"
    return False


def _turns_of_trak(file: BinaryIO, start: int) -> int:
    """Return the quarter turns in the matrix of a track's header, whose body starts at `start`."""
    file.seek(start)
    version = file.read(1)
    file.seek(start + (52 if version == b"\x01" else 40))
    a, b = struct.unpack(">ii", file.read(8))
    turns = {(1, 0): 0, (0, 1): 1, (-1, 0): 2, (0, -1): 3}
    return turns.get((_sign(a), _sign(b)), 0)


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
