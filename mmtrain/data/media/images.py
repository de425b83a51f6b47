"""Read the size of an image from its header alone, and turn its pixels into patches when they are needed.

`_has_end` sees without decoding that the end of a file is there; where it does not see one, Pillow must decide.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError, features

from mmtrain.data.media.image_grids import Size, covering_size, fit_picture
from mmtrain.data.media.image_headers import (
    SWAPS_SIDES,
    fast_image_size,
    fast_image_size_in_stream,
    read_orientation,
    turn_upright,
    upright_size,
)
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia, Media
from mmtrain.data.media.media_errors import media_errors
from mmtrain.data.optional_packages import check_package_fits
from mmtrain.errors import RemoteReadError
from mmtrain.recipe.settings.data_settings import ImageSettings
from mmtrain.recipe.settings.source_path import is_url

Float32Array = npt.NDArray[np.float32]
Uint8Array = npt.NDArray[np.uint8]
CellArray = npt.NDArray[np.uint8 | np.float32]  # pixels as bytes, which the device normalizes; or log-mel frames

# `max_source_pixels` is checked from the header before any pixel is decoded; Pillow's own limit would only warn.
Image.MAX_IMAGE_PIXELS = None
# Without formats that Pillow hands to other programs (EPS to Ghostscript).
_ALWAYS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_JPEG_TAIL_BYTES = 1 << 16  # searched for the end marker before the whole scan is
_JPEG_NO_MARKERS = (0x00, 0xFF)  # behind 0xFF: a stray byte, and a fill byte before a marker
_JPEG_BARE_MARKERS = (0x01, *range(0xD0, 0xDA))  # TEM, RST, SOI, EOI: no length follows
_BOXES_OF_PIXELS = (b"meta", b"moov", b"mdat")  # of AVIF and HEIF; what follows them may be anything


class BadImageError(BadMediaError):
    """An image that cannot be used."""

    missing_kind, other_kind, packages = "missing_image", "not_an_image", ("pillow",)


def read_image_size(media: Media, max_source_pixels: int) -> tuple[int, int]:
    """Return the upright width and height from the header.

    Also checks that the end of the file is there, and decodes the image only where it is not seen. Raises
    `BadImageError` for what no decoder could use, and for more than `max_source_pixels` pixels.
    """
    is_file = isinstance(media, FileMedia) and not is_url(media.path)
    size = fast_image_size(media.path) if isinstance(media, FileMedia) and is_file else _fast_size_in_archive(media)
    if size is not None and size[0] * size[1] <= max_source_pixels:
        return size
    with _open_image(media, max_source_pixels) as (image, file):
        width, height = upright_size(image, read_orientation(image, file))
        if not _has_end(image.format, file):
            _check_complete(image, media)
    return width, height


def _check_complete(image: Image.Image, media: Media) -> None:
    """Decode an image without the usual end: Pillow decides whether pixels are missing. Raises `BadImageError`."""
    try:
        image.load()
    except Exception as error:  # of many types, as in `_open_image`
        check_package_fits(error, "pillow")
        what = f"{media}: the end of the {image.format} file is missing ({error})"
        raise BadImageError("truncated", what) from None


def _fast_size_in_archive(media: Media) -> tuple[int, int] | None:
    """Return the size of an ordinary image in an archive; None where the general reader must find out."""
    try:
        with media.open() as file:
            return fast_image_size_in_stream(file)
    except RemoteReadError:
        raise
    except Exception:  # of many types, as in `_open_image`; the general reader reports it
        return None


def load_rgb_images(media: Media, sizes: Sequence[Size], settings: ImageSettings) -> list[Image.Image]:
    """Decode an image and fit it into each of `sizes` (width, height).

    Transparent images are put on a white background. Raises `BadImageError`.
    """
    with _open_image(media, settings.max_source_pixels) as (image, file):
        orientation = read_orientation(image, file)
        if settings.decode == "scaled":
            largest = max(size[0] for size in sizes), max(size[1] for size in sizes)
            _decode_scaled(image, largest, orientation in SWAPS_SIDES, settings)
        rgb = turn_upright(_to_rgb(image), image.format, orientation)
    return [fit_picture(rgb, size, settings) for size in sizes]


def _decode_scaled(image: Image.Image, largest: Size, swaps_sides: bool, settings: ImageSettings) -> None:
    """Let a JPEG be decoded at 1/2, 1/4 or 1/8 of its size as long as this is at least twice the largest size."""
    width, height = largest[::-1] if swaps_sides else largest
    if settings.fit == "crop":
        width, height = covering_size(image.size, (width, height))
    image.draft("RGB", (2 * width, 2 * height))


def patchify(frames: Sequence[Image.Image], patch: int, repeats: int = 1) -> Uint8Array:
    """Cut RGB images of one size into patches, each through all of them.

    repeats: how often each image counts, as a picture does in patches that join frames.

    Pixels beyond the last whole patch of a side are left out. Returns (rows * cols, 3 * frames * repeats * patch *
    patch): patches row-major, the features of each ordered (channel, frame, y, x) like a flattened Conv3d weight. They
    are bytes until they are on the device (`models.pixel_scale`): there are four times fewer to pass on.
    """
    rows = frames[0].height // patch
    cols = frames[0].width // patch
    whole_rows, whole_cols = slice(rows * patch), slice(cols * patch)
    covered = [np.asarray(frame)[whole_rows, whole_cols] for frame in frames]
    stacked = np.repeat(covered, repeats, axis=0)
    split = stacked.reshape(-1, rows, patch, cols, patch, 3).transpose(1, 3, 5, 0, 2, 4)
    return np.ascontiguousarray(split.reshape(rows * cols, -1))


def unpatchify(cells: Uint8Array, rows: int, cols: int, patch: int) -> Uint8Array:
    """Put the patches of `patchify` together again; returns (frames, rows * patch, cols * patch, 3)."""
    split = cells.reshape(rows, cols, 3, -1, patch, patch).transpose(3, 0, 4, 1, 5, 2)
    return np.ascontiguousarray(split.reshape(-1, rows * patch, cols * patch, 3))


def read_image_bytes(media: Media) -> bytes:
    """Return the bytes of an image's file, undecoded. Raises `BadImageError`."""
    with _image_errors(media), media.open() as file:
        return file.read()


@contextmanager
def _open_image(media: Media, max_source_pixels: int) -> Iterator[tuple[Image.Image, BinaryIO]]:
    """Open an image; every error, here or in the body of the `with`, becomes a `BadImageError`."""
    with _image_errors(media), media.open() as file, Image.open(file, formats=supported_formats()) as image:
        width, height = image.size
        if width * height > max_source_pixels:
            raise BadImageError(
                "too_many_pixels",
                f"{media}: {width} x {height} is above data.image.max_source_pixels = {max_source_pixels}",
            )
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            raise BadImageError(
                "too_many_bits",
                f"{media}: grey values of more than 8 bits ({image.format}, mode {image.mode} of Pillow); allowed: 8. "
                "Processors of published models clip them at 255, so that most pictures become white or black: "
                "save it with 8 bits, scaled as its values demand",
            )
        yield image, file


@contextmanager
def _image_errors(media: Media) -> Iterator[None]:
    """Turn every error in the body of the `with` into a `BadImageError`, but those of a remote source."""
    with media_errors(media, BadImageError, "undecodable"):
        try:
            yield
        except UnidentifiedImageError:
            raise BadImageError("not_an_image", f"{media}: {describe_unknown_format()}") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return an image as RGB, transparent pixels on white, as `convert_to_rgb` of `transformers` and vLLM do."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB") if image.mode != "RGB" else image.copy()


@cache
def supported_formats() -> tuple[str, ...]:
    """Return the names of the formats that can be read, as `Image.open` takes them.

    AVIF comes with Pillow from version 11.3 on; HEIF, the format of telephones, needs the package `pillow-heif`.
    """
    formats = list(_ALWAYS)
    if "avif" in features.modules and features.check("avif"):
        formats.append("AVIF")
    with suppress(ImportError, OSError):  # OSError: it is installed, and a library that it loads is not
        import pillow_heif

        pillow_heif.register_heif_opener()
        formats.append("HEIF")
    return tuple(formats)


def describe_unknown_format() -> str:
    """Say that something is no image of a known format, and what would read other formats."""
    missing = "" if "HEIF" in supported_formats() else "; for HEIC and HEIF: pip install 'mmtrain[heif]'"
    return f"not an image of a known format ({', '.join(supported_formats())}{missing})"


def _has_end(image_format: str | None, file: BinaryIO) -> bool:
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
