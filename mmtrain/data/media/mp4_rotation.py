"""How a film in an MP4 or QuickTime file is to be turned, from its header: telephones film sideways and say so there.

A file is a list of boxes, each a size, a type and a body, which may be boxes again (ISO/IEC 14496-12).
"""

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO

_MOST_BOXES = 10_000  # no file that people make comes near; a hostile one would keep us here


def read_quarter_turns(file: BinaryIO) -> int:
    """Clockwise quarter turns that stand its first film upright, 0 to 3; 0 for any other file."""
    end = file.seek(0, os.SEEK_END)
    try:
        for moov in _boxes(file, 0, end, b"moov"):
            for track in _boxes(file, *moov, b"trak"):
                if _is_film(file, track):
                    return next((_turns(file, start) for start, _ in _boxes(file, *track, b"tkhd")), 0)
    except (struct.error, OverflowError):  # cut short; whoever decodes it will tell
        pass
    return 0


def _boxes(file: BinaryIO, start: int, end: int, wanted: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of the body of each box of one type among those in [start, end)."""
    for _ in range(_MOST_BOXES):
        if start + 8 > end:
            return
        file.seek(start)
        size, kind = struct.unpack(">I4s", file.read(8))
        body = start + 8
        if size == 1:  # the size follows in 64 bits
            (size,) = struct.unpack(">Q", file.read(8))
            body += 8
        stop = end if size == 0 else start + size
        if not body <= stop <= end:
            return
        if kind == wanted:
            yield body, stop
        start = stop


def _is_film(file: BinaryIO, track: tuple[int, int]) -> bool:
    for media in _boxes(file, *track, b"mdia"):
        for handler, _ in _boxes(file, *media, b"hdlr"):
            file.seek(handler + 8)
            return file.read(4) == b"vide"
    return False


def _turns(file: BinaryIO, start: int) -> int:
    """Quarter turns in the matrix of a track's header."""
    file.seek(start)
    version = file.read(1)
    file.seek(start + (52 if version == b"\x01" else 40))
    a, b = struct.unpack(">ii", file.read(8))
    turns = {(1, 0): 0, (0, 1): 1, (-1, 0): 2, (0, -1): 3}
    return turns.get(((a > 0) - (a < 0), (b > 0) - (b < 0)), 0)
