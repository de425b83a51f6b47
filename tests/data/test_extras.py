"""Errors where a package that only some data needs is not installed."""

import json
import sys
from pathlib import Path

import pytest

from mmtrain.data.index.data_check import check_sources
from mmtrain.errors import DataError
from mmtrain.recipe.settings.data_settings import SourceSettings
from tests.data.archives import movie, parquet, wav
from tests.data.rows import row


@pytest.mark.parametrize(
    ("package", "name", "needs", "extra"),
    [
        ("av", "film.json", "reading videos", "video"),
        ("soundfile", "sound.json", "reading audio", "audio"),
        ("pyarrow", "x.parquet", "reading Parquet", "parquet"),
    ],
)
def test_the_error_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str, needs: str, extra: str
) -> None:
    (tmp_path / "a.mp4").write_bytes(movie(["red"]))
    (tmp_path / "a.wav").write_bytes(wav())
    (tmp_path / "film.json").write_text(json.dumps([row("<video>", "a") | {"video": "a.mp4"}]))
    (tmp_path / "sound.json").write_text(json.dumps([row("<audio>", "a") | {"audio": "a.wav"}]))
    parquet(tmp_path / "x.parquet", {"caption": ["a"]})
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"{needs} needs the `{package}` package.*pip install 'mmtrain\[{extra}\]'"):
        check_sources([SourceSettings(path=tmp_path / name)])
