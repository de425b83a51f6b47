"""The files of a split of a data set on the Hugging Face hub (`hf://datasets/org/name?split=train`).

As in the `datasets` library, the data set's card (README.md) names them by patterns in `configs`. Without these they
are the files whose paths have the split's name as a word. If no path has a split's name, all files are `train`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mmtrain.data.optional_packages import require_package
from mmtrain.data.remote.locations import files_below, open_location
from mmtrain.errors import DataError
from mmtrain.foreign_yaml import parse_yaml
from mmtrain.recipe.settings.source_path import HubSplit, RemotePath

_CARD = "README.md"
_CARD_DATA = re.compile(r"^\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_ANY_NAME = "train"  # of a data set that names no splits
_WORDS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def hub_split_files(wanted: HubSplit, is_data_file: Callable[[RemotePath], bool]) -> list[RemotePath]:
    """Return the files of a split, in the order of their names.

    Args:
        wanted: data set and split.
        is_data_file: whether a file can hold samples.

    Raises:
        DataError: there is no such data set or split, its card cannot be read, or names several configurations.
        RemoteReadError: the hub cannot be reached, or denies access.
    """
    try:
        urls = files_below(wanted.data_set)
    except FileNotFoundError:
        urls = []
    if not urls:
        raise DataError(
            f"{wanted.data_set}: the hub has no such data set with files, or shows it only to those with access; check "
            "the name, and set HF_TOKEN in the environment for a private or gated one"
        )
    names = [url.removeprefix(f"{wanted.data_set}/") for url in urls]
    stated = _stated_splits(wanted.data_set) if _CARD in names else {}
    data_files = [name for name in names if is_data_file(RemotePath(f"{wanted.data_set}/{name}"))]
    splits = _matched(stated, data_files) if stated else _named_splits(data_files, wanted.split)
    files = splits.get(wanted.split)
    if not files:
        has = ", ".join(sorted(name for name, of_split in splits.items() if of_split)) or "none that mmtrain reads"
        raise DataError(
            f"{wanted}: found split {wanted.split}, allowed: {has} (by {_CARD} or the names of files); or name its "
            f"files, as {wanted.data_set}/data/*.parquet"
        )
    return [RemotePath(f"{wanted.data_set}/{name}") for name in files]


def _named_splits(names: Sequence[str], wanted: str) -> dict[str, list[str]]:
    """Return the files of each split by their names; `wanted` may be a name that is none of the usual ones."""
    words = {**_WORDS, **({} if wanted in _WORDS else {wanted: (wanted,)})}
    splits: dict[str, list[str]] = {}
    for split, of_split in words.items():
        word = re.compile(rf"(?:^|[/._ 0-9-])(?:{'|'.join(map(re.escape, of_split))})(?:[/._ 0-9-]|$)", re.IGNORECASE)
        files = [name for name in names if word.search(name)]
        if files:
            splits[split] = files
    return splits or {_ANY_NAME: list(names)}


def _matched(stated: Mapping[str, Sequence[str]], names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files that the patterns of each split match."""
    translate = require_package("fsspec.utils", "remote", "reading data sets of the hub").glob_translate
    splits = {}
    for split, patterns in stated.items():
        matches = [re.compile(translate(pattern)) for pattern in patterns]
        splits[split] = [name for name in names if any(match.match(name) for match in matches)]
    return splits


def _stated_splits(data_set: str) -> dict[str, list[str]]:
    """Return the patterns of each split in the data set's card; empty if it states none."""
    with open_location(f"{data_set}/{_CARD}") as file:
        block = _CARD_DATA.match(file.read().decode("utf-8", "replace"))
    try:
        card = parse_yaml(block[1]) if block else None
    except ValueError as error:
        raise DataError(f"{data_set}/{_CARD}: its metadata is no YAML: {error}; name the files instead") from None
    configs = card.get("configs") if isinstance(card, dict) else None
    with_files = [config for config in configs or () if isinstance(config, dict) and config.get("data_files")]
    if not with_files:
        return {}
    splits: dict[str, list[str]] = {}
    for split, pattern in _patterns(_default_config(with_files, data_set)["data_files"]):
        splits.setdefault(split, []).append(pattern.removeprefix("./"))
    return splits


def _default_config(configs: Sequence[dict[str, Any]], data_set: str) -> dict[str, Any]:
    """Return the configuration that is meant if none is named. Raises `DataError` if there is none among several."""
    if len(configs) == 1:
        return configs[0]
    default = [config for config in configs if config.get("default") or config.get("config_name") == "default"]
    if not default:
        names = ", ".join(str(config.get("config_name")) for config in configs)
        raise DataError(
            f"{data_set}: its card has the configurations {names}, and none is the default; name the files of one of "
            f"them instead of a split, as {data_set}/{configs[0].get('config_name')}/*.parquet"
        )
    return default[0]


def _patterns(stated: object) -> Iterator[tuple[str, str]]:
    """Yield (split, pattern) of `data_files`: a pattern, patterns, or for each split its patterns."""
    for entry in stated if isinstance(stated, list) else [stated]:
        if isinstance(entry, dict):
            paths = entry.get("path")
            for path in paths if isinstance(paths, list) else [paths]:
                yield str(entry.get("split", _ANY_NAME)), str(path)
        else:
            yield _ANY_NAME, str(entry)
