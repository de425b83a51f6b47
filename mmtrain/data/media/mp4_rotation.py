"""Read from an MP4 or QuickTime header how to rotate the video: phones film sideways and record the rotation there.

A file is a list of boxes, each a size, a type and a body, which may hold boxes again (ISO/IEC 14496-12).
"""

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO

_MAX_BOXES = 10_000  # far more than real files have; a hostile file must not keep us here


def read_quarter_turns(file: BinaryIO) -> int:
    """Return the clockwise quarter turns, 0 to 3, that make the first video track upright; 0 for any other file."""
    end = file.seek(0, os.SEEK_END)
    try:
        for moov in _boxes(file, 0, end, b"moov"):
            for trak in _boxes(file, *moov, b"trak"):
                if _is_video_trak(file, trak):
                    return next((_quarter_turns(file, start) for start, _ in _boxes(file, *trak, b"tkhd")), 0)
    except (struct.error, OverflowError):  # the file is cut short, which the decoder will report
        pass
    return 0


def _boxes(file: BinaryIO, start: int, end: int, box_type: bytes) -> Iterator[tuple[int, int]]:
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
    for media in _boxes(file, *trak, b"mdia"):
        for handler, _ in _boxes(file, *media, b"hdlr"):
            file.seek(handler + 8)
            return file.read(4) == b"vide"
    return False


def _quarter_turns(file: BinaryIO, start: int) -> int:
    """Return the quarter turns in the matrix of a track's header, whose body starts at `start`."""
    file.seek(start)
    version = file.read(1)
    file.seek(start + (52 if version == b"\x01" else 40))
    a, b = struct.unpack(">ii", file.read(8))
    turns = {(1, 0): 0, (0, 1): 1, (-1, 0): 2, (0, -1): 3}
    return turns.get((_sign(a), _sign(b)), 0)


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
