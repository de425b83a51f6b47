"""Every mode and format of Pillow becomes the RGB that processors make of it, or is refused."""

import inspect
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from mmtrain.data.media.images import BadImageError, load_rgb_images, read_image_size, supported_formats
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.recipe.settings.data_settings import ImageSettings

Image.init()
WIDTH, HEIGHT = 17, 13
SETTINGS = ImageSettings(decode="full")
# Modes as which Pillow opens what it saved, by format.
OPENED = {
    "AVIF": {"L", "RGB", "RGBA"},
    "BMP": {"1", "L", "P", "RGB"},
    "GIF": {"L", "P"},
    "JPEG": {"L", "RGB", "CMYK"},
    "MPO": {"L", "RGB"},
    "PNG": {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"},
    "PPM": {"1", "L", "RGB", "I", "F"},
    "TIFF": {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I", "I;16", "F"},
    "WEBP": {"RGB", "RGBA"},
}
ANIMATED = {"AVIF", "GIF", "MPO", "PNG", "TIFF", "WEBP"}  # or of several pages: the first one counts
DEEP = {"I", "I;16", "I;16B", "I;16L", "F"}
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", *sorted(DEEP))


def _picture(mode: str) -> Image.Image:
    """Return noise; where the mode has transparency, some of it is."""
    rng = np.random.default_rng(len(mode))
    if mode == "I":
        return Image.fromarray(rng.integers(0, 70_000, (HEIGHT, WIDTH)).astype(np.int32))
    if mode == "F":
        return Image.fromarray(rng.random((HEIGHT, WIDTH)).astype(np.float32))
    if mode.startswith("I;16"):
        return Image.fromarray(rng.integers(0, 1 << 16, (HEIGHT, WIDTH)).astype(np.uint16))
    if mode == "LAB":
        return Image.frombytes(mode, (WIDTH, HEIGHT), rng.bytes(WIDTH * HEIGHT * 3))
    colours = Image.fromarray(rng.integers(0, 256, (HEIGHT, WIDTH, 4), dtype=np.uint8), "RGBA")
    through = {"PA": "P", "La": "LA"}.get(mode)
    return (colours if through is None else colours.convert(through)).convert(mode)


def _expected(path: Path) -> np.ndarray:
    """Return what processors make of a file that Pillow opens."""
    transforms = pytest.importorskip("transformers.image_transforms")
    image = Image.open(io.BytesIO(path.read_bytes()))
    if "return_numpy" in inspect.signature(transforms.convert_to_rgb).parameters:
        return np.asarray(transforms.convert_to_rgb(image, return_numpy=True))
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return np.asarray(transforms.convert_to_rgb(image))
    rgba = np.asarray(image.convert("RGBA"), dtype=float)  # versions before left the colours of transparent pixels
    alpha = rgba[..., 3:] / 255
    return np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)


def _cases(form: str) -> list[tuple[str, dict[str, Any]]]:
    """Return modes, and the options with which Pillow saves a picture of each."""
    modes = ("L", "RGB") if form == "MPO" else MODES
    alone: list[tuple[str, dict[str, Any]]] = [] if form == "MPO" else [(mode, {}) for mode in modes]
    followed = {mode: {"save_all": True, "append_images": [_picture(mode).rotate(180)]} for mode in modes}
    keyed: list[tuple[str, dict[str, Any]]] = [(mode, {"transparency": 7}) for mode in ("1", "L", "P", "I;16")]
    keyed.append(("RGB", {"transparency": _picture("RGB").getpixel((3, 3))}))
    return alone + (list(followed.items()) if form in ANIMATED else []) + (keyed if form in ("PNG", "GIF") else [])


@pytest.mark.parametrize("form", OPENED)
@pytest.mark.filterwarnings("ignore:.*transparency:UserWarning")
def test_pictures_of_every_mode_are_what_processors_make_of_them_or_refused(tmp_path: Path, form: str) -> None:
    if form == "AVIF" and not (form in supported_formats() and features.check("avif")):
        pytest.skip("this Pillow has no AVIF")
    seen = set()
    path = tmp_path / "a"
    for mode, options in _cases(form):
        buffer = io.BytesIO()
        try:
            _picture(mode).save(buffer, form, **options)
        except (OSError, ValueError, TypeError, AttributeError):  # Pillow cannot write it
            continue
        path.write_bytes(buffer.getvalue())
        with Image.open(path) as opened:
            assert opened.format == form
        seen.add(opened.mode)
        media = FileMedia(str(path))
        if opened.mode in DEEP:
            for use in (lambda: read_image_size(media, 1000), lambda: load_rgb_images(media, [(8, 8)], SETTINGS)):  # noqa: B023
                with pytest.raises(BadImageError, match="grey values of more than 8 bits") as refused:
                    use()
                assert refused.value.kind == "too_many_bits"
            continue
        assert read_image_size(media, 1000) == (WIDTH, HEIGHT)
        [rgb] = load_rgb_images(media, [(WIDTH, HEIGHT)], SETTINGS)
        difference = np.abs(np.asarray(rgb).astype(int) - _expected(path))
        assert difference.max() <= 1 if opened.mode in ("LA", "PA", "P", "RGBA") else not difference.any(), (
            mode,
            options,
        )
    assert OPENED[form] <= seen


@pytest.mark.parametrize("depth", [1, 1000, 65535])
def test_a_grey_map_of_more_than_8_bits_is_refused_whatever_its_values(tmp_path: Path, depth: int) -> None:
    values = np.full(WIDTH * HEIGHT, 1, dtype=">u2" if depth > 255 else np.uint8).tobytes()
    path = tmp_path / "a.pgm"
    path.write_bytes(f"P5 {WIDTH} {HEIGHT} {depth}\n".encode() + values)
    if depth > 255:
        with pytest.raises(BadImageError, match="mode I of Pillow"):
            read_image_size(FileMedia(str(path)), 1000)
    else:
        [rgb] = load_rgb_images(FileMedia(str(path)), [(WIDTH, HEIGHT)], SETTINGS)
        assert rgb.getextrema() == ((255, 255),) * 3


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_colours_of_16_bits_keep_their_upper_ones(tmp_path: Path, form: str) -> None:
    """Pillow itself reads them so; none of them becomes white."""
    path = tmp_path / "a"
    colours = np.random.default_rng(0).integers(0, 1 << 16, (HEIGHT, WIDTH, 3))
    path.write_bytes(_colours_of_16_bits(form, colours))
    media = FileMedia(str(path))
    assert read_image_size(media, 1000) == (WIDTH, HEIGHT)
    [rgb] = load_rgb_images(media, [(WIDTH, HEIGHT)], SETTINGS)
    assert np.array_equal(np.asarray(rgb), _expected(path))
    assert np.abs(np.asarray(rgb) - colours / 257).max() <= 1


def _colours_of_16_bits(form: str, colours: np.ndarray) -> bytes:
    """Return a file that Pillow cannot write, without compression."""
    import struct
    import zlib

    if form == "PPM":
        return f"P6 {WIDTH} {HEIGHT} 65535\n".encode() + colours.astype(">u2").tobytes()
    if form == "PNG":
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colours)
        chunks = (
            (b"IHDR", struct.pack(">IIBBBBB", WIDTH, HEIGHT, 16, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(rows)),
            (b"IEND", b""),
        )
        parts = [
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in chunks
        ]
        return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
    pixels = colours.astype("<u2").tobytes()
    bits_at = 8 + 2 + 12 * 9 + 4
    tags = [
        (256, 3, 1, WIDTH), (257, 3, 1, HEIGHT), (258, 3, 3, bits_at), (259, 3, 1, 1), (262, 3, 1, 2),
        (273, 4, 1, bits_at + 6), (277, 3, 1, 3), (278, 3, 1, HEIGHT), (279, 4, 1, len(pixels)),
    ]  # fmt: skip
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + b"\0\0\0\0"
    return b"II*\0\x08\0\0\0" + directory + struct.pack("<HHH", 16, 16, 16) + pixels


@pytest.mark.parametrize("form", sorted(set(Image.SAVE) - set(OPENED) - set(supported_formats())))
def test_other_formats_are_refused_by_name(tmp_path: Path, form: str) -> None:
    path = tmp_path / "a"
    try:
        _picture("RGB").resize((32, 32)).save(path, form)
    except Exception as error:  # Pillow registers formats that other packages write
        pytest.skip(f"Pillow cannot write it: {error}")
    with pytest.raises(BadImageError, match=r"not an image of a known format \(JPEG, PNG") as refused:
        read_image_size(FileMedia(str(path)), 10_000)
    assert refused.value.kind == "not_an_image"
