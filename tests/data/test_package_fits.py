"""An installed package that mmtrain cannot call is an error of the run, where a damaged file costs one sample."""

import ast
import io
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import soundfile
from PIL import Image

import mmtrain
from mmtrain.data.media.audio import read_num_frames
from mmtrain.data.media.image_headers import read_orientation
from mmtrain.data.media.images import load_rgb_images, read_image_size
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia
from mmtrain.data.media.parquet_cells import read_cell
from mmtrain.data.media.sound_files import decode_sound
from mmtrain.data.media.video import read_video_header
from mmtrain.data.optional_packages import check_package_fits
from mmtrain.errors import DataError
from mmtrain.recipe.settings.data_settings import AudioDataSettings, ImageSettings
from tests.data.archives import movie

PACKAGE = Path(mmtrain.__file__).parent
MAX_PIXELS = 1 << 20
MISUSES: list[tuple[Callable[[], Any], str]] = [
    (lambda: sorted([], no_such=1), "keyword"),  # of C
    (lambda: open(no_such=1), "open"),  # type: ignore[call-overload]  # noqa: SIM115
    (lambda: (lambda a: a)(), "missing 1 required"),  # type: ignore[call-arg,misc]
    (lambda: (lambda: 0)(1), "takes 0 positional"),  # type: ignore[call-arg]
    (lambda: len([], []), "takes exactly one argument"),  # type: ignore[call-arg]
    (lambda: getattr(1), "expected at least 2 arguments"),  # type: ignore[call-overload]
    (lambda: av.open(io.BytesIO(), no_such=1), "unexpected keyword"),  # type: ignore[call-overload]  # of Cython
    (lambda: av.no_such, "no attribute"),  # type: ignore[attr-defined]
    (lambda: __import__("no_such_package"), "no_such_package"),
    (lambda: no_such_name, "no_such_name"),  # type: ignore[name-defined]  # noqa: F821
]
OF_DATA: list[Callable[[], Any]] = [
    lambda: int(None),  # type: ignore[call-overload]
    lambda: None + 1,  # type: ignore[operator]
    lambda: None.no_such,  # type: ignore[attr-defined]
    lambda: b"".no_such,  # type: ignore[attr-defined]  # raised here, as if inside of a decoder
    lambda: b"".decode(3),  # type: ignore[arg-type]
    lambda: int("x"),
    lambda: [][1],
    lambda: 1 / 0,
]


def _error_of(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


@pytest.mark.parametrize(("call", "says"), MISUSES, ids=[says for _, says in MISUSES])
def test_errors_of_names_and_arguments_are_misuse(call: Callable[[], Any], says: str) -> None:
    error = _error_of(call)
    with pytest.raises(DataError, match=rf"numpy {np.__version__} cannot be called as mmtrain calls it .*{says}"):
        check_package_fits(error, "numpy")


@pytest.mark.parametrize("call", OF_DATA)
def test_errors_of_values_are_of_data(call: Callable[[], Any]) -> None:
    check_package_fits(_error_of(call), "numpy")


def _files(folder: Path) -> dict[str, FileMedia]:
    Image.new("RGB", (8, 8)).save(folder / "image.gif")
    soundfile.write(folder / "clip.wav", np.zeros(16_000), 16_000)
    (folder / "video.mp4").write_bytes(movie(["red"]))
    return {file.stem: FileMedia(str(file)) for file in folder.iterdir()}


def _other_interface(*_: object, **__: object) -> None:
    """Stand in for a function that another version of its library gave other parameters."""
    raise TypeError("open() got an unexpected keyword argument 'options'")


@pytest.mark.parametrize(
    ("package", "module", "function", "read"),
    [
        ("av", av, "open", lambda files: read_video_header(files["video"], MAX_PIXELS)),
        (
            "soundfile",
            soundfile.SoundFile,
            "__init__",
            lambda files: read_num_frames(files["clip"], AudioDataSettings(), 1),
        ),
        ("pillow", Image, "open", lambda files: read_image_size(files["image"], MAX_PIXELS)),
        ("pillow", Image, "open", lambda files: load_rgb_images(files["image"], [(4, 4)], ImageSettings())),
        # What is checked inside of what opens a file is not blamed on the file outside.
        ("soundfile", soundfile.SoundFile, "read", lambda files: list(decode_sound(files["clip"]))),
        ("pillow", Image.Image, "getexif", lambda files: load_rgb_images(files["image"], [(4, 4)], ImageSettings())),
    ],
    ids=["video", "sound", "size of an image", "image", "samples of sound", "orientation"],
)
def test_media_are_not_blamed_for_a_package_of_another_interface(
    package: str,
    module: ModuleType | type,
    function: str,
    read: Callable[[dict[str, FileMedia]], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = _files(tmp_path)
    assert read(files)
    monkeypatch.setattr(module, function, _other_interface)
    with pytest.raises(DataError, match=rf"^{package} \S+ (or av \S+ )?cannot be called"):
        read(files)


def test_an_orientation_is_not_dropped_for_a_package_of_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.new("RGB", (8, 8))
    monkeypatch.setattr(image, "getexif", lambda: _other_interface())
    with pytest.raises(DataError, match="pillow"):
        read_orientation(image, io.BytesIO())


def test_cells_of_parquet_are_not_blamed_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cells.parquet"
    pyarrow.parquet.write_table(pa.table({"image": [b"x"]}), file)
    content = read_cell(str(file), 0, "image", 0, None)
    assert content is not None
    monkeypatch.delattr(pa, "StructScalar")
    with pytest.raises(DataError, match="pyarrow"):
        read_cell(str(file), 0, "image", 0, None)


@pytest.mark.parametrize("name", ["image", "clip", "video"])
def test_a_damaged_file_costs_its_sample_alone(name: str, tmp_path: Path) -> None:
    files = _files(tmp_path)
    path = Path(files[name].path)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(BadMediaError):
        read_video_header(files[name], MAX_PIXELS)
    with pytest.raises(BadMediaError):
        read_num_frames(files[name], AudioDataSettings(), 1)
    with pytest.raises(BadMediaError):
        read_image_size(files[name], MAX_PIXELS)


# Handlers that catch errors of any type and blame no sample: what they do instead.
_OTHER_HANDLERS = {
    "data/media/images.py": 1,  # the fast reader of sizes, after which the general one reports
}


def test_whoever_takes_any_error_for_bad_data_excludes_misuse_first() -> None:
    unchecked: dict[str, int] = {}
    for folder in ("media", "formats", "remote"):
        for path in sorted((PACKAGE / "data" / folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ExceptHandler) and _catches_any(node) and not _calls_the_check(node):
                    name = str(path.relative_to(PACKAGE))
                    unchecked[name] = unchecked.get(name, 0) + 1
    assert unchecked == _OTHER_HANDLERS


def _catches_any(handler: ast.ExceptHandler) -> bool:
    names = {node.id for node in ast.walk(handler.type or ast.Name("Exception")) if isinstance(node, ast.Name)}
    return bool(names & {"Exception", "AttributeError", "NameError", "ImportError"}) and not _only_imports(handler)


def _only_imports(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.type, ast.Name) and handler.type.id == "ImportError"


def _calls_the_check(handler: ast.ExceptHandler) -> bool:
    calls = [node.func for node in ast.walk(handler) if isinstance(node, ast.Call)]
    return any(isinstance(call, ast.Name) and call.id == "check_package_fits" for call in calls)
