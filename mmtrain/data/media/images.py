"""Read the size of an image from its header alone, and turn its pixels into patches when they are needed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from mmtrain.data.media.fitting import Size, covering_size, fit_picture
from mmtrain.data.media.image_ends import has_end
from mmtrain.data.media.image_formats import describe_unknown_format, supported_formats
from mmtrain.data.media.image_headers import fast_image_size, fast_image_size_in_stream
from mmtrain.data.media.image_orientation import SWAPS_SIDES, read_orientation, turn_upright, upright_size
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
        if not has_end(image.format, file):
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
