"""The fast reader of image sizes agrees with the general reader, or returns nothing."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from mmtrain.data.media import image_headers as headers
from mmtrain.data.media import images
from mmtrain.data.media.image_headers import fast_image_size, fast_image_size_in_stream
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia

PIXELS = np.random.default_rng(0).integers(0, 256, (9, 14, 3), dtype=np.uint8)


def encode(folder: Path, suffix: str, mode: str = "RGB", **options: Any) -> bytes:
    path = folder / f"made{suffix}"
    Image.fromarray(PIXELS).convert(mode).save(path, **options)
    return path.read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers")


@pytest.fixture(scope="module")
def files(folder: Path) -> list[bytes]:
    return [
        encode(folder, ".png"),
        encode(folder, ".png", "P"),
        encode(folder, ".jpg"),
        encode(folder, ".jpg", "CMYK", progressive=True, comment=b"hello"),
    ]


def general_size(path: Path) -> tuple[int, int] | None:
    """Return the size from the general reader alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "fast_image_size", lambda _: None)
        try:
            return images.read_image_size(FileMedia(str(path)), 10**9)
        except BadMediaError:
            return None


@pytest.mark.parametrize(
    ("suffix", "mode", "options"),
    [
        *((".png", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        (".png", "RGB", {"dpi": (72, 72)}),
        *((".jpg", mode, {"progressive": p, "dpi": (96, 96)}) for mode in ("L", "RGB", "CMYK") for p in (False, True)),
    ],
)
def test_ordinary_files_have_a_fast_size(folder: Path, suffix: str, mode: str, options: dict[str, Any]) -> None:
    path = folder / f"plain{suffix}"
    path.write_bytes(encode(folder, suffix, mode, **options))
    assert fast_image_size(str(path)) == (14, 9) == general_size(path)


def test_the_end_of_a_file_longer_than_the_first_read_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in (".png", ".jpg"):
        path = folder / f"long{suffix}"
        path.write_bytes(encode(folder, suffix))
        monkeypatch.setattr(headers, "_FIRST_READ_BYTES", path.stat().st_size - 30)
        assert fast_image_size(str(path)) == fast_image_size_in_stream(io.BytesIO(path.read_bytes())) == (14, 9)
        os.truncate(path, path.stat().st_size - 1)
        assert fast_image_size(str(path)) is fast_image_size_in_stream(io.BytesIO(path.read_bytes())) is None


def test_unusual_files_are_left_to_the_general_reader(folder: Path) -> None:
    rotated = Image.Exif()
    info = PngImagePlugin.PngInfo()
    rotated[0x0112] = 6
    info.add_text("key", "value")
    unusual = {
        "turned.jpg": encode(folder, ".jpg", exif=rotated),
        "turned.png": encode(folder, ".png", exif=rotated),
        "text.png": encode(folder, ".png", pnginfo=info),
        "longer.jpg": encode(folder, ".jpg") + b"film",
        "a.gif": encode(folder, ".gif"),
        "empty.png": b"",
    }
    for name, content in unusual.items():
        (folder / name).write_bytes(content)
        assert fast_image_size(str(folder / name)) is None
    os.mkfifo(folder / "pipe")
    assert fast_image_size(str(folder / "pipe")) is None
    assert fast_image_size(str(folder)) is None
    assert fast_image_size(str(folder / "gone")) is None
    assert fast_image_size("a\0b") is None


def test_a_scan_header_of_a_wrong_length_is_left_to_the_general_reader(folder: Path) -> None:
    content = bytearray(encode(folder, ".jpg"))
    content[content.index(b"\xff\xda") + 2] = 1  # the length of the scan header becomes 256 bytes more
    path = folder / "scan.jpg"
    path.write_bytes(content)
    assert fast_image_size(str(path)) is None
    assert general_size(path) is None


@given(st.integers(0, 3), st.integers(0, 700), st.integers(0, 255))
def test_a_changed_byte_never_gives_another_size_than_the_general_reader(
    folder: Path, files: list[bytes], which: int, position: int, value: int
) -> None:
    content = bytearray(files[which])
    content[position % len(content)] = value
    path = folder / "changed"
    path.write_bytes(content)
    quick = fast_image_size(str(path))
    assert fast_image_size_in_stream(io.BytesIO(content)) == quick
    assert quick is None or quick == general_size(path)


@given(st.integers(0, 3), st.integers(0, 1000))
def test_a_cut_file_is_never_accepted(folder: Path, files: list[bytes], which: int, length: int) -> None:
    path = folder / "cut"
    path.write_bytes(files[which][: length % len(files[which])])
    assert fast_image_size(str(path)) is None
