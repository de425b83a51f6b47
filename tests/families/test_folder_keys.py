"""Keys of a config or a processor that are missing or null: as `transformers` takes them, or refused by name."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mmtrain.errors import ModelFolderError
from mmtrain.families import FAMILIES, FolderSettings, read_model_folder
from mmtrain.families.family import Settings

KeyPath = tuple[str, ...]
Change = Callable[[dict[str, Any], str], object]
CHANGES: dict[str, Change] = {
    "null": lambda section, key: section.update({key: None}),
    "missing": lambda section, key: section.pop(key),
    "a text": lambda section, key: section.update({key: "x"}),
    "below zero": lambda section, key: section.update({key: -1}),
    "empty": lambda section, key: section.update({key: {}}),
    "a list": lambda section, key: section.update({key: [3, "x"]}),
}
AS_THEIRS = ("null", "missing")
IMAGED = [
    name
    for name, family in FAMILIES.items()
    if "image_processor_type" in family.tiny.get("preprocessor_config.json", {})
]


def _paths(config: Mapping[str, Any], above: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from _paths(value, (*above, key))


def _changed(config: Mapping[str, Any], path: KeyPath, change: Change) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(config))
    section = copy
    for key in path[:-1]:
        section = section[key]
    change(section, path[-1])
    return copy


def _write(folder: Path, name: str, config: Mapping[str, Any]) -> None:
    (folder / name).write_text(json.dumps(config), encoding="utf-8")


def _settings(folder: Path) -> FolderSettings | None:
    """Return what a folder says; None if it is refused."""
    try:
        return read_model_folder(folder).settings
    except ModelFolderError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_configs(family: str, tmp_path: Path) -> None:
    import transformers

    tiny = dict(FAMILIES[family].tiny["config.json"])
    their_class = getattr(transformers, tiny["architectures"][0]).config_class
    num_compared, differences = 0, []
    for path in _paths(tiny):
        for name, change in CHANGES.items():
            config = _changed(tiny, path, change)
            _write(tmp_path, "config.json", config)
            ours = _settings(tmp_path)
            if ours is None or name not in AS_THEIRS or path == ("architectures",):
                continue
            try:
                theirs = their_class.from_pretrained(tmp_path).to_dict()
            except Exception:  # whatever they raise: ours may then assume a default
                continue
            _write(tmp_path, "config.json", {**theirs, "architectures": tiny["architectures"]})
            if _settings(tmp_path) != ours:
                differences.append((name, path))
            num_compared += 1
    assert not differences
    assert num_compared > 10


def _data(folder: Path, section: str) -> Settings | None:
    try:
        return read_model_folder(folder).data_settings(section)
    except ModelFolderError:
        return None


def _sweep(
    folder: Path, file: str, section: str, full: dict[str, Any], their_dict: Callable[[], dict[str, Any]]
) -> int:
    """Change each key of a processor's file; return how often ours and theirs were compared, and were equal."""
    num_compared, differences = 0, []
    for path in _paths(full):
        for name, change in CHANGES.items():
            _write(folder, file, _changed(full, path, change))
            ours = _data(folder, section)
            if ours is None or name not in AS_THEIRS:
                continue
            try:
                theirs = their_dict()
            except Exception:  # whatever they raise: ours may then assume a default
                continue
            _write(folder, file, theirs)
            if _data(folder, section) != ours:
                differences.append((name, path))
            num_compared += 1
    assert not differences
    return num_compared


@pytest.mark.slow
@pytest.mark.parametrize("family", IMAGED)
def test_keys_of_image_processors(family: str, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    for name, content in FAMILIES[family].tiny.items():
        _write(tmp_path, name, content)
    full = AutoImageProcessor.from_pretrained(tmp_path).to_dict()
    has_limits = {"shortest_edge", "longest_edge"} <= (full.get("size") or {}).keys()
    older = {"min_pixels": 1024, "max_pixels": 4096} if has_limits else {}

    def their_dict() -> dict[str, Any]:
        return AutoImageProcessor.from_pretrained(tmp_path).to_dict()

    assert _sweep(tmp_path, "preprocessor_config.json", "image", {**full, **older}, their_dict) > 10
