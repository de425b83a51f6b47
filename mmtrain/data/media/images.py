"""From an image file to patches: its size from the header alone, and the pixels when they are needed."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from mmtrain.data.media.image_headers import fast_image_size, fast_image_size_in_stream
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia, Media
from mmtrain.recipe.schema import ImageSettings

Float32Array = npt.NDArray[np.float32]

# Formats that decode in this process (Pillow would hand EPS to Ghostscript).
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# `max_source_pixels` is checked from the header before any pixel is decoded; Pillow's own limit would only warn.
Image.MAX_IMAGE_PIXELS = None

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {  # EXIF orientation -> what makes the picture stand upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAPS_SIDES = (5, 6, 7, 8)


class BadImageError(BadMediaError):
    """An image that cannot be used."""


def read_image_size(media: Media, max_source_pixels: int) -> tuple[int, int]:
    """Upright width and height from the header; raises `BadImageError` for what no decoder could use.

    Also looks whether the end of a JPEG or PNG file is there, without decoding.
    """
    quick = fast_image_size(media.path) if isinstance(media, FileMedia) else _quick_size(media)
    if quick is not None and quick[0] * quick[1] <= max_source_pixels:
        return quick
    with _opened(media, max_source_pixels) as (image, file):
        width, height = image.size
        if _orientation(image) in _SWAPS_SIDES:
            width, height = height, width
        kind = image.format
        if kind in _ENDS and not _ENDS[kind](file):
            raise BadImageError("truncated", f"{media}: the end of the {kind} file is missing")
    return width, height


def _quick_size(media: Media) -> tuple[int, int] | None:
    """Width and height of an ordinary picture in an archive; the general reader will say what is wrong with others."""
    try:
        with media.open() as file:
            return fast_image_size_in_stream(file)
    except Exception:  # as many as there are decoders, see `_opened`
        return None


def load_rgb_images(media: Media, sizes: Sequence[tuple[int, int]], max_source_pixels: int) -> list[Image.Image]:
    """Decode an image and resize it to each of some sizes (width, height), the largest first.

    Transparency is laid on white. Raises `BadImageError`.
    """
    with _opened(media, max_source_pixels) as (image, _):
        orientation = _orientation(image)
        wanted = sizes[0][::-1] if orientation in _SWAPS_SIDES else sizes[0]
        image.draft("RGB", (2 * wanted[0], 2 * wanted[1]))  # JPEG only: decode at 1/2, 1/4, 1/8 while it is enough
        rgb = _rgb(image)
    if orientation in _UPRIGHT:
        rgb = rgb.transpose(_UPRIGHT[orientation])
    return [rgb if rgb.size == size else rgb.resize(size, Image.Resampling.BICUBIC) for size in sizes]


def patchify(rgb: Image.Image, settings: ImageSettings, patch: int) -> Float32Array:
    """Normalise a picture and cut it up, its sides being whole patches.

    Returns (rows * cols, 3 * patch * patch), patches row-major, the features of each ordered (channel, y, x) like a
    flattened Conv2d weight.
    """
    rows, cols = rgb.height // patch, rgb.width // patch
    mean, std = (np.array(v, dtype=np.float32) for v in (settings.mean, settings.std))
    pixels = (np.asarray(rgb, dtype=np.float32) / np.float32(255) - mean) / std
    split = pixels.reshape(rows, patch, cols, patch, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(split.reshape(rows * cols, 3 * patch * patch), dtype=np.float32)


@contextmanager
def _opened(media: Media, max_source_pixels: int) -> Iterator[tuple[Image.Image, BinaryIO]]:
    """Open an image and turn whatever goes wrong, here or in the body, into a `BadImageError`."""
    try:
        with media.open() as file, Image.open(file, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > max_source_pixels:
                raise BadImageError(
                    "too_many_pixels",
                    f"{media}: {width} x {height} is above data.image.max_source_pixels = {max_source_pixels}",
                )
            yield image, file
    except FileNotFoundError:
        raise BadImageError("missing_image", f"{media}: no such file") from None
    except UnidentifiedImageError:
        raise BadImageError(
            "not_an_image", f"{media}: not an image of a known format ({', '.join(_FORMATS)})"
        ) from None
    except BadImageError:
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error, ...
        raise BadImageError("undecodable", f"{media}: {type(error).__name__}: {error}") from None


def _orientation(image: Image.Image) -> int:
    """EXIF orientation as the header gives it, before decoding: size and pixels must agree on it."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # asking further would decode the whole picture
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # damaged metadata must not cost the picture
        return 1


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow would cut 16 bits off at 255 instead of scaling them
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB") if image.mode != "RGB" else image.copy()


def _png_ends(file: BinaryIO) -> bool:
    """Whether the closing chunk is there, at the end or (with bytes appended by some tool) found chunk by chunk."""
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


def _jpeg_ends(file: BinaryIO) -> bool:
    """Whether an end-of-image marker follows the start of the scan.

    The marker cannot occur inside scan data; the metadata before it may hold a thumbnail with an end of its own, so it
    is stepped over segment by segment.
    """
    size = file.seek(0, os.SEEK_END)
    scan = _jpeg_scan_start(file)
    if scan is None:
        return False
    file.seek(max(scan, size - 65536))
    if b"\xff\xd9" in file.read():
        return True
    file.seek(scan)  # cameras append films and second pictures
    return b"\xff\xd9" in file.read()


def _jpeg_scan_start(file: BinaryIO) -> int | None:
    file.seek(2)
    while len(head := file.read(4)) == 4:
        if head[0] != 0xFF:
            return None
        if head[1] == 0xFF:  # fill byte before a marker
            file.seek(-3, os.SEEK_CUR)
            continue
        if head[1] == 0xDA:
            return file.tell()
        file.seek(int.from_bytes(head[2:], "big") - 2, os.SEEK_CUR)
    return None


_ENDS = {"JPEG": _jpeg_ends, "MPO": _jpeg_ends, "PNG": _png_ends}
