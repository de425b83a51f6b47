"""See without decoding that the end of an image file is there; where it is not seen, Pillow must decide."""

import os
from typing import BinaryIO

_JPEG_TAIL_BYTES = 1 << 16  # searched for the end marker before the whole scan is
_JPEG_NO_MARKERS = (0x00, 0xFF)  # behind 0xFF: a stray byte, and a fill byte before a marker
_JPEG_BARE_MARKERS = (0x01, *range(0xD0, 0xDA))  # TEM, RST, SOI, EOI: no length follows
_BOXES_OF_PIXELS = (b"meta", b"moov", b"mdat")  # of AVIF and HEIF; what follows them may be anything


def has_end(image_format: str | None, file: BinaryIO) -> bool:
    """Return whether the end of an image file is there, as far as its format shows that."""
    if image_format in ("JPEG", "MPO"):
        return _jpeg_has_end(file)
    if image_format == "PNG":
        return _png_has_end(file)
    return image_format not in ("AVIF", "HEIF") or _boxes_have_end(file)


def _png_has_end(file: BinaryIO) -> bool:
    """Return whether the closing chunk is there: at the end, or before bytes that some tool appended."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 12, 0))
    if file.read() == b"\0\0\0\0IEND\xaeB`\x82":
        return True
    file.seek(8)
    while len(head := file.read(8)) == 8:
        if head[4:] == b"IEND":
            return True
        file.seek(int.from_bytes(head[:4], "big") + 4, os.SEEK_CUR)
    return False


def _jpeg_has_end(file: BinaryIO) -> bool:
    """Return whether an end-of-image marker follows the start of the scan.

    The marker cannot occur inside scan data. The metadata before the scan may hold a thumbnail with an end marker of
    its own, so they are skipped segment by segment.
    """
    size = file.seek(0, os.SEEK_END)
    scan = _jpeg_scan_start(file)
    if scan is None:
        return False
    file.seek(max(scan, size - _JPEG_TAIL_BYTES))
    if b"\xff\xd9" in file.read():
        return True
    file.seek(scan)  # cameras append films and second images behind the end
    return b"\xff\xd9" in file.read()


def _jpeg_scan_start(file: BinaryIO) -> int | None:
    """Return where the first scan starts; stray bytes and fill bytes between segments are skipped, as decoders do."""
    file.seek(2)
    while len(head := file.read(4)) == 4:
        is_marker = head[0] == 0xFF and head[1] not in _JPEG_NO_MARKERS
        if not is_marker:
            file.seek(-3, os.SEEK_CUR)
        elif head[1] == 0xDA:
            return file.tell()
        elif head[1] in _JPEG_BARE_MARKERS:
            file.seek(-2, os.SEEK_CUR)
        else:
            file.seek(int.from_bytes(head[2:], "big") - 2, os.SEEK_CUR)
    return None


def _boxes_have_end(file: BinaryIO) -> bool:
    """Return whether the boxes of a file in the ISO base media format (ISO/IEC 14496-12) that matter are complete."""
    end = file.seek(0, os.SEEK_END)
    start = 0
    while start + 8 <= end:
        file.seek(start)
        head = file.read(16)
        size = int.from_bytes(head[:4], "big")
        if size == 1:  # a size of 64 bits follows
            size = int.from_bytes(head[8:], "big")
        if size == 0:  # up to the end of the file
            return True
        if head[4:8] in _BOXES_OF_PIXELS and start + size > end:
            return False
        start += max(size, 8)
    return True
