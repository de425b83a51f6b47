"""Find out without decoding whether the length that a sound file states is that of its sound.

Uncompressed sound is as long as its bytes. The headers of compressed files may state no length, an estimate, or that of
another file: then the clip must be decoded to be measured.
"""

import os
import re
from typing import BinaryIO, Literal

# Of MPEG layer III: kbit/s by the index in a frame's header, for MPEG 1 and for MPEG 2 and 2.5.
_MPEG_KBITS = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)
_MPEG_RATES_HZ = (44_100, 48_000, 32_000)  # of MPEG 1; half of them for MPEG 2, a quarter for 2.5
_MAX_SCANNED_BYTES = 1 << 30  # a day of MP3; a larger file would fill the memory
_MPEG_1 = 3  # the code of its version
_XING_END = 48  # of the place in the first frame where its number of frames may be
_MAX_LOST_FRAMES = 4  # 0.1 s at the end of an MP3 file
_ID3_HEADER_BYTES = 10
_OGG_FIRST_PAGE = re.compile(rb"OggS\0[\x02\x06]")  # of a stream: the flag 2 of its header type
_FLAC_HEAD_BYTES = 42  # the mark and the block STREAMINFO
_MAX_FLAC_SAMPLES = (1 << 36) - 1
_FLAC_TAIL_BYTES = 1 << 18  # holds the last frame: of 65,535 samples at most, and mostly of 4,096
_FLAC_FRAME_HEADER_BYTES = 16
_FLAC_BLOCKS = {
    1: 192,
    **{code: 576 << (code - 2) for code in (2, 3, 4, 5)},
    **{code: 1 << code for code in range(8, 16)},
}


StatedLength = Literal["exact", "too_long", "unknown"]


def classify_stated_length(file_format: str, subtype: str, num_samples: int, file: BinaryIO) -> StatedLength:
    """Return whether a clip has as many samples as libsndfile read from the header of its file.

    `too_long`: the end of the file is missing. `unknown`: there may be more or fewer samples.
    file_format, subtype: as libsndfile names them. Reads an MP3 or Ogg file to its end, and the end of a FLAC file.
    """
    if num_samples < 1:  # a length that was to be filled in later
        return "unknown"
    if file_format == "FLAC":
        last = _flac_samples(file)
        if last is None or last > num_samples or num_samples > _MAX_FLAC_SAMPLES:
            return "unknown"
        return "exact" if last == num_samples else "too_long"
    is_scanned = file_format == "OGG" or subtype.startswith("MPEG")
    if is_scanned and file.seek(0, os.SEEK_END) > _MAX_SCANNED_BYTES:
        return "unknown"
    if file_format == "OGG":  # only the first of several streams would be measured and decoded
        file.seek(0)
        return "exact" if len(_OGG_FIRST_PAGE.findall(file.read())) == 1 else "unknown"
    if subtype.startswith("MPEG"):
        file.seek(0)
        return _classify_mp3(file.read(), num_samples) if file_format == "MP3" else "unknown"
    return "exact"


def _classify_mp3(content: bytes, num_samples: int) -> StatedLength:
    """Compare the frames of an MP3 file with the number that its first frame states, or else with its samples."""
    start = _id3_bytes(content)
    first = content[start : start + _mp3_frame_bytes(content, start)]
    num_frames = 0
    while frame_bytes := _mp3_frame_bytes(content, start):
        if start + frame_bytes > len(content):
            break
        start += frame_bytes
        num_frames += 1
    tag = max(first.find(b"Xing", 0, _XING_END), first.find(b"Info", 0, _XING_END))
    num_stated = None
    if tag >= 0 and first[tag + 7] & 1:
        num_stated = int.from_bytes(first[tag + 8 : tag + 12], "big")
        if num_stated - (num_frames - 1) > _MAX_LOST_FRAMES:
            return "too_long"
    if not first or _has_mp3_frames(content, start):  # another clip follows, or bytes that are lost lie between
        return "unknown"
    samples_per_frame = 1152 if first[1] >> 3 & 3 == _MPEG_1 else 576
    is_exact = num_samples == num_frames * samples_per_frame if num_stated is None else num_stated == num_frames - 1
    return "exact" if is_exact else "unknown"


def _has_mp3_frames(content: bytes, start: int) -> bool:
    """Return whether two frames follow each other anywhere behind a byte."""
    at = content.find(b"\xff", start)
    while at >= 0:
        frame_bytes = _mp3_frame_bytes(content, at)
        if frame_bytes and _mp3_frame_bytes(content, at + frame_bytes):
            return True
        at = content.find(b"\xff", at + 1)
    return False


def _id3_bytes(content: bytes) -> int:
    """Return how many bytes ID3 tags take at the start of a file."""
    start = 0
    while content[start : start + 3] == b"ID3":
        size = 0
        for byte in content[start + 6 : start + _ID3_HEADER_BYTES]:
            size = size << 7 | byte & 0x7F
        start += _ID3_HEADER_BYTES + size
    return start


def _mp3_frame_bytes(content: bytes, start: int) -> int:
    """Return the bytes of the frame of layer III that starts at a byte; 0 where none does."""
    header = content[start : start + 4]
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE6 != 0xE2:
        return 0
    version = header[1] >> 3 & 3  # 0: MPEG 2.5, 2: MPEG 2, 3: MPEG 1
    rate_index = header[2] >> 2 & 3
    bits_index = header[2] >> 4
    if version == 1 or rate_index == 3 or bits_index in (0, 15):
        return 0
    is_mpeg_1 = version == _MPEG_1
    rate = _MPEG_RATES_HZ[rate_index] >> {_MPEG_1: 0, 2: 1, 0: 2}[version]
    bits_per_s = _MPEG_KBITS[0 if is_mpeg_1 else 1][bits_index] * 1000
    return (144 if is_mpeg_1 else 72) * bits_per_s // rate + (header[2] >> 1 & 1)


def _flac_samples(file: BinaryIO) -> int | None:
    """Return the samples that the last frame of a FLAC file ends at; None where no frame is found."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = _id3_bytes(file.read(_ID3_HEADER_BYTES))
    file.seek(start)
    head = file.read(_FLAC_HEAD_BYTES)
    block = int.from_bytes(head[8:10], "big")
    is_fixed = head[8:10] == head[10:12]  # the smallest and the largest block
    file.seek(max(start + _FLAC_HEAD_BYTES, size - _FLAC_TAIL_BYTES))
    tail = file.read()
    mark = b"\xff\xf8" if is_fixed else b"\xff\xf9"
    ends = []
    at = tail.find(mark)
    while at >= 0:
        header = tail[at : at + _FLAC_FRAME_HEADER_BYTES].ljust(_FLAC_FRAME_HEADER_BYTES, b"\0")
        end = _flac_frame_end(header, block if is_fixed else 1)  # a frame of silence is shorter than that
        if end is not None:
            ends.append(end)
        at = tail.find(mark, at + 1)
    return max(ends, default=None)


def _flac_frame_end(header: bytes, unit: int) -> int | None:
    """Return the sample at which a FLAC frame ends; None for bytes that are no header of a frame.

    unit: the samples that the number in the header counts in.
    """
    block_code = header[2] >> 4
    if not block_code or header[3] & 1:
        return None
    number_bytes = max(8 - (header[4] ^ 0xFF).bit_length(), 1)  # the leading ones, as in UTF-8
    number = header[4] & (0x7F if number_bytes == 1 else 0x7F >> number_bytes)
    for byte in header[5 : 4 + number_bytes]:
        number = number << 6 | byte & 0x3F
    end = 4 + number_bytes
    block_bytes = {6: 1, 7: 2}.get(block_code, 0)
    block = int.from_bytes(header[end : end + block_bytes], "big") + 1
    end += block_bytes + {12: 1, 13: 2, 14: 2}.get(header[2] & 15, 0)
    if end >= len(header) or _crc8(header[:end]) != header[end]:
        return None
    return number * unit + (block if block_bytes else _FLAC_BLOCKS[block_code])


def _crc8(content: bytes) -> int:
    """Return the checksum of a FLAC frame's header: CRC-8 with the polynomial x^8 + x^2 + x + 1."""
    remainder = 0
    for byte in content:
        remainder ^= byte
        for _ in range(8):
            remainder = (remainder << 1 ^ 0x107) if remainder & 0x80 else remainder << 1
    return remainder
