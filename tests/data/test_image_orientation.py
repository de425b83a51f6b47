"""The size from the header, the decoded pixels and Pillow's `exif_transpose` agree on every format and orientation."""

import io
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from mmtrain.data.media.image_headers import fast_image_size
from mmtrain.data.media.images import BadImageError, load_rgb_images, read_image_size, supported_formats
from mmtrain.data.media.media_bytes import FileMedia, TarMember
from mmtrain.recipe.settings.data_settings import ImageSettings

MAX_PIXELS = 10_000
WIDTH, HEIGHT = 30, 20
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8))


def _exif(tag: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = tag
    return exif


def _xmp(tag: int) -> bytes:
    return b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>' % tag


def _encode(form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    PICTURE.save(buffer, form, **options)
    return buffer.getvalue()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")


def _png_behind(*chunks: bytes) -> bytes:
    """Return a PNG file with these chunks behind its pixels."""
    plain = _encode("PNG")
    return plain[:-12] + b"".join(chunks) + plain[-12:]


def _exif_chunk(tag: int) -> bytes:
    return _chunk(b"eXIf", _exif(tag).tobytes().removeprefix(b"Exif\0\0"))


def _raw_profile(tag: int) -> bytes:
    content = _exif(tag).tobytes()
    return f"\nexif\n{len(content):8}\n{content.hex()}\n".encode()


def _png_with_xmp(tag: int) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", _xmp(tag).decode())
    return _encode("PNG", pnginfo=info)


def _xmp_behind(tag: int) -> bytes:
    return _png_behind(_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + _xmp(tag)))


def _animated_png(tag: int) -> bytes:
    return _encode("PNG", save_all=True, append_images=[PICTURE.rotate(180)], exif=_exif(tag))


WRITERS: dict[str, Callable[[int], bytes]] = {
    **{form: (lambda tag, form=form: _encode(form, exif=_exif(tag))) for form in ("JPEG", "PNG", "WEBP", "TIFF")},  # type: ignore[misc]
    **{form: (lambda _, form=form: _encode(form)) for form in ("GIF", "BMP", "PPM")},  # type: ignore[misc]
    "AVIF": lambda tag: _encode("AVIF", exif=_exif(tag)),
    "HEIF": lambda tag: _encode("HEIF", exif=_exif(tag)),
    "TIFF, compressed": lambda tag: _encode("TIFF", exif=_exif(tag), compression="tiff_lzw"),
    "TIFF, several": lambda tag: _encode("TIFF", exif=_exif(tag), save_all=True, append_images=[PICTURE]),
    "WEBP, xmp": lambda tag: _encode("WEBP", xmp=_xmp(tag)),
    "TIFF, xmp": lambda tag: _encode("TIFF", tiffinfo={700: _xmp(tag)}),
    "PNG, xmp": _png_with_xmp,
    "PNG, xmp behind the pixels": _xmp_behind,
    "PNG, exif behind the pixels": lambda tag: _png_behind(_exif_chunk(tag)),
    "PNG, exif after a text": lambda tag: _png_behind(_chunk(b"tEXt", b"date\0today"), _exif_chunk(tag)),
    "PNG, profile": lambda tag: _png_behind(_chunk(b"tEXt", b"Raw profile type exif\0" + _raw_profile(tag))),
    "PNG, animated": _animated_png,
}


@pytest.mark.parametrize("tag", range(1, 9))
@pytest.mark.parametrize("name", WRITERS)
def test_header_decoder_and_exif_transpose_agree(tmp_path: Path, name: str, tag: int) -> None:
    if name.partition(",")[0] not in supported_formats():
        pytest.skip(f"{name} cannot be read here")
    content = WRITERS[name](tag)
    path = tmp_path / "picture"
    path.write_bytes(b"before" + content + b"after")
    member = TarMember(str(path), "picture", len(b"before"), len(content))
    path = tmp_path / "alone"
    path.write_bytes(content)
    with Image.open(path) as image:
        expected = ImageOps.exif_transpose(image).convert("RGB")
    for media in (FileMedia(str(path)), member):
        size = read_image_size(media, MAX_PIXELS)
        (decoded,) = load_rgb_images(media, [size], ImageSettings())
        assert size == decoded.size == expected.size
        np.testing.assert_array_equal(np.asarray(decoded), np.asarray(expected))


def test_every_format_that_can_be_read_is_compared() -> None:
    assert {name.partition(",")[0] for name in WRITERS} >= set(supported_formats())


@pytest.mark.parametrize("tag", [0, 9, 65_535])
def test_an_orientation_that_does_not_exist_changes_nothing(tmp_path: Path, tag: int) -> None:
    (tmp_path / "a").write_bytes(_encode("JPEG", exif=_exif(tag)))
    media = FileMedia(str(tmp_path / "a"))
    assert read_image_size(media, MAX_PIXELS) == (WIDTH, HEIGHT)
    assert load_rgb_images(media, [(WIDTH, HEIGHT)], ImageSettings())[0].size == (WIDTH, HEIGHT)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
def test_the_tag_of_the_comparison_turns_the_picture(tmp_path: Path, form: str) -> None:
    (tmp_path / "a").write_bytes(WRITERS[form](6))
    assert read_image_size(FileMedia(str(tmp_path / "a")), MAX_PIXELS) == (HEIGHT, WIDTH)


def test_texts_behind_the_pixels_are_read_fast_and_orientations_are_not(tmp_path: Path) -> None:
    harmless = _png_behind(_chunk(b"tEXt", b"date:create\0today"), _chunk(b"tIME", bytes(7)))
    for content, size in ((harmless, (WIDTH, HEIGHT)), (_png_behind(_exif_chunk(6)), None), (_xmp_behind(6), None)):
        (tmp_path / "a.png").write_bytes(content)
        assert fast_image_size(str(tmp_path / "a.png")) == size


def test_the_last_pixels_of_a_large_png_are_found_from_its_end(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    plain = buffer.getvalue()
    assert plain.count(b"IDAT") > 1
    for behind, size in ((b"", (300, 200)), (_exif_chunk(6), None)):
        (tmp_path / "a.png").write_bytes(plain[:-12] + behind + plain[-12:])
        assert fast_image_size(str(tmp_path / "a.png")) == size
    assert read_image_size(FileMedia(str(tmp_path / "a.png")), 100_000) == (200, 300)


@pytest.mark.parametrize("content", [b"", b"Exif\0\0", b"\xff" * 40, b"MM\0*" + b"\xff" * 20])
def test_damaged_metadata_do_not_cost_the_image(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.png").write_bytes(_png_behind(_chunk(b"eXIf", content)))
    media = FileMedia(str(tmp_path / "a.png"))
    assert read_image_size(media, MAX_PIXELS) == (WIDTH, HEIGHT)
    assert load_rgb_images(media, [(WIDTH, HEIGHT)], ImageSettings())[0].size == (WIDTH, HEIGHT)


@pytest.mark.parametrize("form", ["AVIF", "HEIF"])
def test_a_cut_file_is_rejected_from_its_header(tmp_path: Path, form: str) -> None:
    if form not in supported_formats():
        pytest.skip(f"{form} cannot be read here")
    content = _encode(form)
    (tmp_path / "a").write_bytes(content[:-1])
    with pytest.raises(BadImageError) as bad:
        read_image_size(FileMedia(str(tmp_path / "a")), MAX_PIXELS)
    assert bad.value.kind == "truncated"
