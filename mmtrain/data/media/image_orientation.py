"""Find the orientation of an image in its metadata, as `PIL.ImageOps.exif_transpose` does, without decoding pixels.

The size that an index holds and the pixels that training sees must agree on it, and so must the models' own processors.
"""

import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import BinaryIO

from PIL import Image

from mmtrain.data.optional_packages import check_package_fits

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
        header = _png_without_pixels(file)
    finally:
        file.seek(position)
    with Image.open(header, formats=("PNG",)) as metadata:
        # The method of PNG images would decode the pixels to look for chunks behind them.
        return Image.Image.getexif(metadata)


def _png_without_pixels(file: BinaryIO) -> BytesIO:
    """Return the header and the metadata of a PNG file, also those behind its pixels, as a PNG file of no pixels."""
    file.seek(0)
    header = BytesIO()
    header.write(file.read(_PNG_MAGIC_BYTES))
    for kind, content in _png_metadata(file):
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
