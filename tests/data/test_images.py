import io
import os
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from mmtrain.data.media.images import BadImageError, Float32Array, load_rgb_images, patchify, read_image_size
from mmtrain.data.media.media_bytes import FileMedia, Media
from mmtrain.recipe.settings.data_settings import ImageSettings
from tests.pixels import normalized

LIMIT = 10_000_000


def _patches(media: Media, rows: int, cols: int, settings: ImageSettings, patch: int) -> Float32Array:
    """Return the patches of an image."""
    return normalized(patchify(load_rgb_images(media, [(cols * patch, rows * patch)], settings), patch), settings)


def test_patches_have_the_layout_of_a_convolution_kernel(tmp_path: Path) -> None:
    rows, cols, patch = 3, 2, 4
    pixels = np.random.default_rng(0).integers(0, 256, (rows * patch, cols * patch, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    image = ImageSettings(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))

    patches = _patches(FileMedia(str(tmp_path / "a.png")), rows, cols, image, patch)

    assert patches.shape == (rows * cols, 3 * patch * patch)
    assert patches.dtype == np.float32
    x = torch.from_numpy(pixels).permute(2, 0, 1)[None].double() / 255
    mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (image.mean, image.std))
    conv = torch.nn.Conv2d(3, 5, patch, stride=patch, bias=False, dtype=torch.float64)
    expected = conv((x - mean) / std).flatten(2)[0].T  # (rows * cols, 5)
    got = torch.from_numpy(patches).double() @ conv.weight.flatten(1).T
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def _jpeg_with_orientation(path: Path, orientation: int) -> np.ndarray:
    """Save an image that is upright red top-left, green top-right and blue bottom-left (24 wide, 16 high)."""
    upright = Image.new("RGB", (24, 16), "white")
    upright.paste((255, 0, 0), (0, 0, 12, 8))
    upright.paste((0, 255, 0), (12, 0, 24, 8))
    upright.paste((0, 0, 255), (0, 8, 12, 16))
    back = {  # the inverse of the transposition of each EXIF orientation
        1: (),
        2: (Image.Transpose.FLIP_LEFT_RIGHT,),
        3: (Image.Transpose.ROTATE_180,),
        4: (Image.Transpose.FLIP_TOP_BOTTOM,),
        5: (Image.Transpose.ROTATE_90, Image.Transpose.FLIP_TOP_BOTTOM),
        6: (Image.Transpose.ROTATE_90,),
        7: (Image.Transpose.ROTATE_90, Image.Transpose.FLIP_LEFT_RIGHT),
        8: (Image.Transpose.ROTATE_270,),
    }[orientation]
    stored = upright
    for step in back:
        stored = stored.transpose(step)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(path, quality=95, subsampling=0, exif=exif)
    return np.asarray(upright, dtype=np.float32)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_exif_orientation_applies_to_size_and_pixels(tmp_path: Path, orientation: int, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    upright = _jpeg_with_orientation(path, orientation)
    assert read_image_size(FileMedia(str(path)), LIMIT) == (24, 16)
    patches = _patches(FileMedia(str(path)), 2, 3, ImageSettings(mean=(0, 0, 0), std=(1, 1, 1)), 8)
    expected = upright.reshape(2, 8, 3, 8, 3).transpose(0, 2, 4, 1, 3).reshape(6, -1) / 255
    assert np.abs(patches - expected).mean() < 0.05


def test_large_jpegs_keep_their_content_when_scaled_down(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 2048, dtype=np.uint8)
    Image.fromarray(np.broadcast_to(ramp[None, :, None], (1024, 2048, 3)).copy()).save(tmp_path / "a.jpg")
    patches = _patches(FileMedia(str(tmp_path / "a.jpg")), 2, 4, ImageSettings(mean=(0, 0, 0), std=(1, 1, 1)), 8)
    columns = patches.reshape(2, 4, 3, 8, 8).mean(axis=(0, 2, 3)).ravel()
    assert np.allclose(columns, (np.arange(32) + 0.5) / 32, atol=0.02)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("RGBA", (8, 8), (255, 0, 0, 0)), (1, 1, 1)),  # transparent: the background is white
        (Image.new("RGBA", (8, 8), (255, 0, 0, 255)), (1, 0, 0)),
        (Image.new("LA", (8, 8), (0, 0)), (1, 1, 1)),
        (Image.new("L", (8, 8), 51), (0.2, 0.2, 0.2)),
        (Image.new("1", (8, 8), 1), (1, 1, 1)),
        (Image.new("RGB", (8, 8), "blue").quantize(), (0, 0, 1)),
    ],
)
def test_every_colour_mode_becomes_rgb_on_white(
    tmp_path: Path, image: Image.Image, expected: tuple[float, float, float]
) -> None:
    image.save(tmp_path / "a.png")
    patches = _patches(FileMedia(str(tmp_path / "a.png")), 1, 1, ImageSettings(mean=(0, 0, 0), std=(1, 1, 1)), 8)
    assert np.allclose(patches.reshape(3, 64).mean(axis=1), expected, atol=0.01)


def _bytes(suffix: str) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, suffix)
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", ["png", "jpeg"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_truncated_file_is_found_without_decoding(tmp_path: Path, suffix: str, share: float) -> None:
    content = _bytes(suffix)
    header = 700 if suffix == "jpeg" else 40
    path = tmp_path / "a"
    path.write_bytes(content[: max(int(len(content) * share), header)])
    with pytest.raises(BadImageError, match="end of the") as bad:
        read_image_size(FileMedia(str(path)), LIMIT)
    assert bad.value.kind == "truncated"


def _is_complete(content: bytes) -> bool:
    """Return whether Pillow decodes a picture to its end."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
    except Exception:
        return False
    return True


def _segment_starts(jpeg: bytes) -> list[int]:
    starts = [2]
    while jpeg[starts[-1] + 1] != 0xDA:
        starts.append(starts[-1] + 2 + int.from_bytes(jpeg[starts[-1] + 2 : starts[-1] + 4], "big"))
    return starts


def _with_thumbnail() -> bytes:
    """Return a JPEG whose EXIF data hold another one."""
    exif = Image.Exif()
    exif[0x927C] = _bytes("jpeg")  # a maker's note
    buffer = io.BytesIO()
    Image.open(io.BytesIO(_bytes("jpeg"))).save(buffer, "jpeg", exif=exif)
    return buffer.getvalue()


def _saved(suffix: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(_bytes("png"))).save(buffer, suffix, **options)
    return buffer.getvalue()


ODD_PICTURES: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: _saved("jpeg"),
    "progressive": lambda: _saved("jpeg", progressive=True),
    "restarts": lambda: _saved("jpeg", restart_marker_blocks=3),
    "grey": lambda: _saved("jpeg", subsampling=0, quality=30),
    "thumbnail": _with_thumbnail,
    "mpo": lambda: _saved("mpo", save_all=True, append_images=[Image.new("RGB", (64, 64))]),
    **{suffix: lambda suffix=suffix: _saved(suffix) for suffix in ("png", "webp", "gif", "bmp", "tiff", "ppm")},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", ODD_PICTURES)
def test_pictures_are_good_exactly_where_pillow_decodes_all_of_them(tmp_path: Path, name: str) -> None:
    """Stray bytes between segments, bytes in front of and behind the end, an end that is missing, and cut files."""
    content = ODD_PICTURES[name]()
    variants = [content, content + b"\0" * 7, content + b"\xff\xd9\xff", content[:-2] + b"\0\0\0" + content[-2:]]
    variants += [content[:-cut] for cut in (1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 40)]
    variants += [content[: len(content) * tenths // 10] for tenths in range(2, 10)]
    if content.startswith(b"\xff\xd8"):
        for stray in (
            b"\0",
            b"xyz",
            b"\xff",
            b"\xff\xff\xff",
            b"\xff\0",
            b"\x01\xff",
            b"\xff\xd3",
            b"\xff\x01",
            b"\0" * 900,
        ):
            variants += [content[:start] + stray + content[start:] for start in _segment_starts(content)]
    path = tmp_path / "a"
    settings = ImageSettings(decode="full")
    for number, variant in enumerate(variants):
        path.write_bytes(variant)
        try:
            size = read_image_size(FileMedia(str(path)), LIMIT)
            load_rgb_images(FileMedia(str(path)), [size], settings)
            is_good = True
        except BadImageError:
            is_good = False
        assert is_good == _is_complete(variant), number


@pytest.mark.parametrize("cut", [False, True])
def test_stray_bytes_between_segments_are_skipped_without_decoding(
    tmp_path: Path, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = _bytes("jpeg")
    start = _segment_starts(content)[1]
    content = content[:start] + b"stray" + content[start:]
    (tmp_path / "a.jpg").write_bytes(content[: len(content) * 9 // 10] if cut else content)
    decoded: list[Image.Image] = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: decoded.append(image))
    assert read_image_size(FileMedia(str(tmp_path / "a.jpg")), LIMIT) == (64, 64)
    assert bool(decoded) == cut


@pytest.mark.parametrize("suffix", ["png", "jpeg"])
@pytest.mark.parametrize("extra", [1, 100_000])
def test_bytes_appended_by_cameras_do_not_matter(tmp_path: Path, suffix: str, extra: int) -> None:
    (tmp_path / "a").write_bytes(_bytes(suffix) + b"\0" * extra)
    assert read_image_size(FileMedia(str(tmp_path / "a")), LIMIT) == (64, 64)


def test_the_end_of_a_thumbnail_is_not_the_end_of_the_picture(tmp_path: Path) -> None:
    content = _bytes("jpeg")
    thumbnail = b"\xff\xe1" + struct.pack(">H", 2 + 6 + 2) + b"Thumb\0\xff\xd9"
    (tmp_path / "a.jpg").write_bytes((content[:2] + thumbnail + content[2:])[: len(content) // 2])
    with pytest.raises(BadImageError, match="end of the"):
        read_image_size(FileMedia(str(tmp_path / "a.jpg")), LIMIT)


def test_files_that_are_not_images_are_rejected_with_their_kind(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "page.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    (tmp_path / "empty.png").write_bytes(b"")
    for name, kind in (("none.png", "missing_image"), ("text.png", "not_an_image"), ("page.png", "not_an_image")):
        with pytest.raises(BadImageError, match=name) as bad:
            read_image_size(FileMedia(str(tmp_path / name)), LIMIT)
        assert bad.value.kind == kind
    with pytest.raises(BadImageError):
        read_image_size(FileMedia(str(tmp_path / "empty.png")), LIMIT)
    os.mkfifo(tmp_path / "pipe.png")
    for name in ("", "pipe.png"):  # opening them must not block
        with pytest.raises(BadImageError, match=r": a (folder|pipe or a device), not a file") as bad:
            read_image_size(FileMedia(str(tmp_path / name)), LIMIT)
        assert bad.value.kind == "not_an_image"


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_a_decompression_bomb_is_rejected_from_its_header(tmp_path: Path) -> None:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0))
    path = tmp_path / "bomb.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + _chunk(b"IDAT", zlib.compress(b"\0" * 100)) + _chunk(b"IEND", b""))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BadImageError, match=r"100000 x 100000 is above data\.image\.max_source_pixels") as bad:
            read_image_size(FileMedia(str(path)), 100_000_000)
    assert bad.value.kind == "too_many_pixels"
    with pytest.raises(BadImageError, match="max_source_pixels"):
        _patches(FileMedia(str(path)), 1, 1, ImageSettings(), 8)


def test_a_good_header_over_broken_data_is_undecodable(tmp_path: Path) -> None:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0))
    path = tmp_path / "a.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + _chunk(b"IDAT", b"rubbish") + _chunk(b"IEND", b""))
    assert read_image_size(FileMedia(str(path)), LIMIT) == (16, 16)
    with pytest.raises(BadImageError, match=r"a\.png") as bad:
        _patches(FileMedia(str(path)), 2, 2, ImageSettings(), 8)
    assert bad.value.kind == "undecodable"
