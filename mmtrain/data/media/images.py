"""Read the size of an image from its header alone, and turn its pixels into patches when they are needed."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from mmtrain.data.media.fitting import Size, covering_size, fit_picture
from mmtrain.data.media.image_headers import fast_image_size, fast_image_size_in_stream
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia, Media
from mmtrain.recipe.data_settings import ImageSettings

Float32Array = npt.NDArray[np.float32]

# Formats that Pillow decodes in this process (it would hand EPS to Ghostscript).
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# `max_source_pixels` is checked from the header before any pixel is decoded; Pillow's own limit would only warn.
Image.MAX_IMAGE_PIXELS = None

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
_SWAPS_SIDES = (5, 6, 7, 8)
_JPEG_TAIL_BYTES = 1 << 16  # searched for the end marker before the whole scan is


class BadImageError(BadMediaError):
    """An image that cannot be used."""


def read_image_size(media: Media, max_source_pixels: int) -> tuple[int, int]:
    """Return the upright width and height from the header.

    Also checks, without decoding, that the end of a JPEG or PNG file is there. Raises `BadImageError` for what no
    decoder could use, and for more than `max_source_pixels` pixels.
    """
    size = fast_image_size(media.path) if isinstance(media, FileMedia) else _fast_size_in_archive(media)
    if size is not None and size[0] * size[1] <= max_source_pixels:
        return size
    with _open_image(media, max_source_pixels) as (image, file):
        width, height = image.size
        if _orientation(image) in _SWAPS_SIDES:
            width, height = height, width
        kind = image.format
        if kind in _HAS_END and not _HAS_END[kind](file):
            raise BadImageError("truncated", f"{media}: the end of the {kind} file is missing")
    return width, height


def _fast_size_in_archive(media: Media) -> tuple[int, int] | None:
    """Return the size of an ordinary image in an archive; None where the general reader must find out."""
    try:
        with media.open() as file:
            return fast_image_size_in_stream(file)
    except Exception:  # of many types, as in `_open_image`; the general reader reports it
        return None


def load_rgb_images(media: Media, sizes: Sequence[Size], settings: ImageSettings) -> list[Image.Image]:
    """Decode an image and fit it into each of `sizes` (width, height).

    Transparent images are put on a white background. Raises `BadImageError`.
    """
    with _open_image(media, settings.max_source_pixels) as (image, _):
        orientation = _orientation(image)
        if settings.decode == "scaled":
            largest = max(size[0] for size in sizes), max(size[1] for size in sizes)
            _decode_scaled(image, largest, orientation in _SWAPS_SIDES, settings)
        rgb = _to_rgb(image)
    if orientation in _TO_UPRIGHT:
        rgb = rgb.transpose(_TO_UPRIGHT[orientation])
    return [fit_picture(rgb, size, settings) for size in sizes]


def _decode_scaled(image: Image.Image, largest: Size, swaps_sides: bool, settings: ImageSettings) -> None:
    """Let a JPEG be decoded at 1/2, 1/4 or 1/8 of its size as long as this is at least twice the largest size."""
    width, height = largest[::-1] if swaps_sides else largest
    if settings.fit == "crop":
        width, height = covering_size(image.size, (width, height))
    image.draft("RGB", (2 * width, 2 * height))


def patchify(frames: Sequence[Image.Image], settings: ImageSettings, patch: int, repeats: int = 1) -> Float32Array:
    """Normalize images of one size and cut them into patches, each through all of them.

    repeats: how often each image counts, as a picture does in patches that join frames.

    Pixels beyond the last whole patch of a side are left out. Returns (rows * cols, 3 * frames * repeats * patch *
    patch): patches row-major, the features of each ordered (channel, frame, y, x) like a flattened Conv3d weight.
    """
    rows = frames[0].height // patch
    cols = frames[0].width // patch
    mean = np.array(settings.mean, dtype=np.float32)
    std = np.array(settings.std, dtype=np.float32)
    whole_rows, whole_cols = slice(rows * patch), slice(cols * patch)
    covered = [np.asarray(frame, dtype=np.float32)[whole_rows, whole_cols] for frame in frames]
    pixels = [(picture / np.float32(255) - mean) / std for picture in covered]
    stacked = np.repeat(pixels, repeats, axis=0)
    split = stacked.reshape(-1, rows, patch, cols, patch, 3).transpose(1, 3, 5, 0, 2, 4)
    return np.ascontiguousarray(split.reshape(rows * cols, -1), dtype=np.float32)


@contextmanager
def _open_image(media: Media, max_source_pixels: int) -> Iterator[tuple[Image.Image, BinaryIO]]:
    """Open an image; every error, here or in the body of the `with`, becomes a `BadImageError`."""
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
    """Return the EXIF orientation that the header states before decoding: size and pixels must agree on it."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # Pillow would decode all pixels to look for a later chunk
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # damaged metadata must not cost the image
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow would clip 16 bits at 255 instead of scaling them
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB") if image.mode != "RGB" else image.copy()


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


_HAS_END = {"JPEG": _jpeg_has_end, "MPO": _jpeg_has_end, "PNG": _png_has_end}
