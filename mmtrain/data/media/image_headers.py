"""Read the size and the orientation of an image from its header, without decoding pixels.

`fast_image_size` reads the size of ordinary PNG and JPEG files from their first bytes, ten times faster than Pillow:
indexing a million images spends most of its time there. Anything unusual (orientation tags, thumbnails, rare chunks,
any damage) gives None, never a guess, and is left to the general reader in `images`.

`read_orientation` finds the orientation in the metadata, as `PIL.ImageOps.exif_transpose` does. The size that an index
holds and the pixels that training sees must agree on it, and so must the models' own processors.
"""

import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from typing import BinaryIO

from PIL import Image

from mmtrain.data.optional_packages import check_package_fits
from mmtrain.system_calls import open_to_read, read_bytes_at

_FIRST_READ_BYTES = 1 << 14  # most headers, and small images as a whole, are shorter
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
# Grey of 16 bits is left to the general reader, which refuses it.
_PNG_DEPTHS_BY_COLOR_TYPE = {0: (1, 2, 4, 8), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
# Chunks before the pixels that change neither size nor orientation.
_PNG_HARMLESS_CHUNKS = frozenset((b"PLTE", b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"bKGD", b"sBIT", b"tIME"))
_PNG_TEXTS = frozenset((b"tEXt", b"zTXt", b"iTXt"))
_PNG_TAIL_BYTES = (1 << 16) + 64  # holds the last chunk of pixels of most writers: libpng 8 KiB, Pillow 64 KiB
_JPEG_MAGIC = b"\xff\xd8\xff"
_JPEG_END = b"\xff\xd9"
_JPEG_FRAMES = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended and progressive, Huffman coded
_JPEG_SCAN = 0xDA
# Tables, restart interval, JFIF, Adobe, comment.
_JPEG_HARMLESS_SEGMENTS = frozenset((0xC4, 0xDB, 0xDD, 0xE0, 0xEE, 0xFE))

_ReadAt = Callable[[int, int], bytes]  # (number of bytes, offset) -> bytes
_ORIENTATION_TAG = 0x0112
_TO_UPRIGHT = {  # EXIF orientation -> the transposition that makes the image upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SWAPS_SIDES = frozenset((5, 6, 7, 8))  # the orientations whose upright image is as wide as the stored one is high
_TIFF_WIDTH_TAG = 256
_TIFF_HEIGHT_TAG = 257
_PNG_MAGIC_BYTES = 8
_PNG_METADATA = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # the chunks that Pillow looks for an orientation in
_MAX_METADATA_BYTES = 16 << 20  # of all these chunks of a file; far above what any camera or editor writes


def fast_image_size(path: str) -> tuple[int, int] | None:
    """Return width and height of a complete, upright PNG or JPEG file; None for anything else, or nothing."""
    try:
        file = open_to_read(path)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return None
        head = os.read(file, _FIRST_READ_BYTES)
        return _image_size(head, status.st_size, partial(read_bytes_at, file))
    except OSError:
        return None
    finally:
        os.close(file)


def fast_image_size_in_stream(file: BinaryIO) -> tuple[int, int] | None:
    """Return the same for an open file, such as a member of an archive. Raises OSError."""

    def read_at(count: int, offset: int) -> bytes:
        file.seek(offset)
        return file.read(count)

    num_bytes = file.seek(0, os.SEEK_END)
    return _image_size(read_at(_FIRST_READ_BYTES, 0), num_bytes, read_at)


def _image_size(head: bytes, num_bytes: int, read_at: _ReadAt) -> tuple[int, int] | None:
    """Return width and height of a file of `num_bytes` bytes that starts with `head`."""
    if head.startswith(_PNG_MAGIC):
        size = _png_size(head, num_bytes, read_at)
        expected_end = _PNG_END
    elif head.startswith(_JPEG_MAGIC):
        size = _jpeg_size(head)
        expected_end = _JPEG_END
    else:
        return None
    if size is None or num_bytes < len(head):
        return None
    if num_bytes == len(head):
        end = head[-len(expected_end) :]
    else:
        end = read_at(len(expected_end), num_bytes - len(expected_end))
    return size if end == expected_end else None


def _png_size(head: bytes, num_bytes: int, read_at: _ReadAt) -> tuple[int, int] | None:
    """Read the chunks around the pixels; all must be harmless, and those before the pixels intact."""
    if head[8:16] != b"\0\0\0\rIHDR" or len(head) < 33:
        return None
    width = int.from_bytes(head[16:20], "big")
    height = int.from_bytes(head[20:24], "big")
    depth, color_type, compression, filter_method, interlace = head[24:29]
    if depth not in _PNG_DEPTHS_BY_COLOR_TYPE.get(color_type, ()):
        return None
    if compression or filter_method or interlace > 1 or not width * height:
        return None
    start = 8  # of a chunk: length, kind, content, checksum
    while True:
        end = start + 8 + int.from_bytes(head[start : start + 4], "big")
        if end + 12 > len(head) or zlib.crc32(head[start + 4 : end]) != int.from_bytes(head[end : end + 4], "big"):
            return None
        start = end + 4
        kind = head[start + 4 : start + 8]
        if kind == b"IDAT":
            return (width, height) if _is_harmless_behind_pixels(head, start, num_bytes, read_at) else None
        if kind not in _PNG_HARMLESS_CHUNKS:
            return None


def _is_harmless_behind_pixels(head: bytes, start: int, num_bytes: int, read_at: _ReadAt) -> bool:
    """Return whether the chunks behind the pixels, which start at byte `start`, are known and state no orientation.

    Chunks of pixels follow each other, so that the last one is found from the end without a walk over all of them.
    """
    tail_start = max(start, num_bytes - _PNG_TAIL_BYTES)
    tail = head[tail_start:] if num_bytes == len(head) else read_at(num_bytes - tail_start, tail_start)
    first_end = start + 12 + int.from_bytes(head[start : start + 4], "big") - tail_start
    if first_end >= 0 and _walks_to_end(tail, first_end):
        return True
    kind_start = tail.rfind(b"IDAT")
    while kind_start >= 4:
        pixels_end = kind_start + 8 + int.from_bytes(tail[kind_start - 4 : kind_start], "big")
        if _walks_to_end(tail, pixels_end):
            return True
        kind_start = tail.rfind(b"IDAT", 0, kind_start)
    return False


def _walks_to_end(tail: bytes, start: int) -> bool:
    """Return whether only harmless chunks lie between byte `start` and the closing chunk."""
    while start + len(_PNG_END) < len(tail):
        end = start + 8 + int.from_bytes(tail[start : start + 4], "big")
        kind = tail[start + 4 : start + 8]
        keyword = tail[start + 8 : end].partition(b"\0")[0].lower()
        is_harmless_text = kind in _PNG_TEXTS and b"exif" not in keyword and b"xmp" not in keyword
        if kind != b"tIME" and not is_harmless_text:
            return False
        start = end + 4
    return tail[start:] == _PNG_END


def _jpeg_size(head: bytes) -> tuple[int, int] | None:
    """Read the segments before the scan; all of them must be harmless."""
    start = 2  # of a segment: marker, length, content
    size = None
    while start + 9 < len(head) and head[start] == 0xFF:
        kind = head[start + 1]
        length = int.from_bytes(head[start + 2 : start + 4], "big")
        if kind == _JPEG_SCAN:
            return size if length == 6 + 2 * head[start + 4] else None  # two bytes for each of its components
        if kind in _JPEG_FRAMES:
            height = int.from_bytes(head[start + 5 : start + 7], "big")
            width = int.from_bytes(head[start + 7 : start + 9], "big")
            depth = head[start + 4]
            num_components = head[start + 9]
            if size is not None or depth != 8 or num_components not in (1, 3, 4) or not width * height:
                return None
            size = width, height
        elif kind not in _JPEG_HARMLESS_SEGMENTS:
            return None
        start += 2 + length
    return None


def read_orientation(image: Image.Image, file: BinaryIO) -> int:
    """Return the EXIF orientation, from 1 to 8, of an opened image; its pixels are not decoded.

    file: what `image` was opened from; its position stays where it is.
    """
    try:
        orientation = int(_read_exif(image, file).get(_ORIENTATION_TAG, 1))
    except Exception as error:  # damaged metadata must not cost the image
        check_package_fits(error, "pillow")
        return 1
    return orientation if orientation in _TO_UPRIGHT else 1


def upright_size(image: Image.Image, orientation: int) -> tuple[int, int]:
    """Return width and height of an image that was opened and not decoded, once it is upright."""
    width, height = image.size
    if image.format == "TIFF":  # from some version on, Pillow has already exchanged them
        tags = image.tag_v2  # type: ignore[attr-defined]
        width, height = tags[_TIFF_WIDTH_TAG], tags[_TIFF_HEIGHT_TAG]
    return (height, width) if orientation in SWAPS_SIDES else (width, height)


def turn_upright(decoded: Image.Image, image_format: str | None, orientation: int) -> Image.Image:
    """Return the pixels of an image upright. Pillow decodes TIFF upright; all other formats as they are stored."""
    if image_format == "TIFF" or orientation not in _TO_UPRIGHT:
        return decoded
    return decoded.transpose(_TO_UPRIGHT[orientation])


def _read_exif(image: Image.Image, file: BinaryIO) -> Image.Exif:
    if image.format != "PNG":
        return image.getexif()
    position = file.tell()
    try:
        file.seek(0)
        magic = file.read(_PNG_MAGIC_BYTES)
        chunks = list(_png_metadata(file))
    finally:
        file.seek(position)
    if all(kind == b"IHDR" for kind, _ in chunks):
        return Image.Exif()
    with Image.open(_png_without_pixels(magic, chunks), formats=("PNG",)) as metadata:
        # The method of PNG images would decode the pixels to look for chunks behind them.
        return Image.Image.getexif(metadata)


def _png_without_pixels(magic: bytes, chunks: Sequence[tuple[bytes, bytes]]) -> BytesIO:
    """Return the header and the metadata of a PNG file, also those behind its pixels, as a PNG file of no pixels."""
    header = BytesIO()
    header.write(magic)
    for kind, content in chunks:
        checksum = zlib.crc32(content, zlib.crc32(kind))  # Pillow ignores the stated one behind the pixels
        header.write(len(content).to_bytes(4, "big") + kind + content + checksum.to_bytes(4, "big"))
    header.write(b"\0\0\0\0IDAT")
    header.seek(0)
    return header


def _png_metadata(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """Yield kind and content of the chunks of a PNG file that matter here, from the file's position on."""
    is_animated = False
    has_pixels = False
    remaining_bytes = _MAX_METADATA_BYTES
    while len(head := file.read(8)) == 8:
        num_bytes = int.from_bytes(head[:4], "big")
        kind = head[4:]
        if kind == b"IEND" or (kind == b"fcTL" and is_animated and has_pixels):
            return  # Pillow reads the first frame of an animation and what is before the next one
        is_animated = is_animated or kind == b"acTL"
        has_pixels = has_pixels or kind == b"IDAT"
        if kind == b"IHDR" or (kind in _PNG_METADATA and num_bytes <= remaining_bytes):
            remaining_bytes -= num_bytes
            yield kind, file.read(num_bytes)
            file.seek(4, 1)
        else:
            file.seek(num_bytes + 4, 1)
