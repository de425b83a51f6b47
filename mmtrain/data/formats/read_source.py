"""Read a source of any format: `read_samples` yields its samples in order, quarantined ones included."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from mmtrain.data.formats.allowed_folder import AllowedFolder
from mmtrain.data.formats.conversation import CONVERSATION_KEYS, CONVERSATION_KEYS_BY_FORMAT
from mmtrain.data.formats.json_files import JSON_LINES_SUFFIXES, read_json
from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.data.formats.webdataset import read_shard
from mmtrain.data.optional_packages import require_package
from mmtrain.errors import DataError
from mmtrain.recipe.data_settings import LimitSettings, SourceSettings

_CONTAINER_BY_SUFFIX = {
    ".json": "json",
    **dict.fromkeys(JSON_LINES_SUFFIXES, "json"),
    ".tar": "webdataset",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_COMPRESSED_SUFFIXES = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip")
_PATTERN_CHARACTERS = frozenset("*?[{")
_MAX_SHARDS_IN_RANGE = 1_000_000  # `{0..999999999999}` is a slip of the user's, and would fill the memory


def read_samples(source: SourceSettings, limits: LimitSettings) -> Iterator[Sample | Quarantined]:
    """Read every sample of a source, shard by shard.

    Raises `DataError` if there is no file, or if its format is not supported.
    """
    if source.states_lengths:
        raise DataError(
            f"{source.path}: states lengths (format `lengths`), which serve for planning; there are no samples to read"
        )
    files = list_shards(source.path)
    container = _container(source, files)
    if source.path.is_dir():
        files = [file for file in files if _CONTAINER_BY_SUFFIX[file.suffix] == container]
    if container == "webdataset":
        if source.image_root is not None:
            raise DataError(
                f"{source.path}: image_root is {source.image_root}, but the media of a tar shard are inside the shard: "
                "remove image_root"
            )
        return chain.from_iterable(read_shard(file, limits) for file in files)
    if container == "parquet":
        require_package("pyarrow.parquet", "parquet", f"{files[0]}: reading Parquet")
        from mmtrain.data.formats.parquet import read_parquet

        return chain.from_iterable(read_parquet(file, _media_folder(source, file), limits) for file in files)
    keys = CONVERSATION_KEYS_BY_FORMAT.get(source.format or "", CONVERSATION_KEYS)
    return chain.from_iterable(read_json(file, _media_folder(source, file).file, keys) for file in files)


def list_shards(path: Path) -> list[Path]:
    """Return the files that a path names: itself, those of a folder, or those that match a pattern.

    Patterns hold `{000..123}`, `{a,b}`, `*` and `?`. Raises `DataError` if there are no files.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _CONTAINER_BY_SUFFIX)
        if not files:
            known = ", ".join(sorted(_CONTAINER_BY_SUFFIX))
            raise DataError(f"{path}: no data files in this folder; looked for {known}")
        return files
    if path.exists() or not _PATTERN_CHARACTERS & set(str(path)):
        return [path]
    patterns = _expand_braces(str(path))
    files = [file for pattern in patterns for file in _matching_files(Path(pattern))]
    if not files:
        raise DataError(f"{path}: no file matches")
    return files


def _media_folder(source: SourceSettings, file: Path) -> AllowedFolder:
    return AllowedFolder(source.image_root or file.parent)


def _matching_files(pattern: Path) -> list[Path]:
    if not set("*?[") & set(str(pattern)):
        return [pattern]
    anchor = Path(pattern.anchor)
    return sorted(anchor.glob(str(pattern.relative_to(anchor))))


def _expand_braces(text: str) -> list[str]:
    """Return every text that `{a,b}` and `{000..123}` stand for, as in a shell.

    >>> _expand_braces("x-{08..10}.{tar,txt}")[:3]
    ['x-08.tar', 'x-08.txt', 'x-09.tar']
    """
    braces = re.search(r"\{([^{}]*)\}", text)
    if braces is None:
        return [text]
    number_range = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
    if number_range is None:
        choices = braces[1].split(",")
    else:
        low = int(number_range[1])
        high = int(number_range[2])
        if high - low >= _MAX_SHARDS_IN_RANGE:
            raise DataError(f"{text}: names more than {_MAX_SHARDS_IN_RANGE} shards")
        num_digits = len(number_range[1])
        choices = [str(number).zfill(num_digits) for number in range(low, high + 1)]
    tails = _expand_braces(text[braces.end() :])
    return [f"{text[: braces.start()]}{choice}{tail}" for choice in choices for tail in tails]


def _container(source: SourceSettings, files: list[Path]) -> str:
    """Return what holds the samples: `json`, `webdataset` or `parquet`."""
    if source.format is not None:
        return "json" if source.format in CONVERSATION_KEYS_BY_FORMAT else source.format
    containers = {_CONTAINER_BY_SUFFIX.get(file.suffix) for file in files}
    if len(containers) == 1:
        container = containers.pop()
        if container is not None:
            return container
    compressed = next((file for file in files if file.suffix in _COMPRESSED_SUFFIXES), None)
    if compressed is not None:
        raise DataError(f"{compressed}: compressed data cannot be read at random positions; unpack it")
    suffixes = ", ".join(sorted({file.suffix or "no suffix" for file in files}))
    known = ", ".join(sorted(_CONTAINER_BY_SUFFIX))
    raise DataError(
        f"{source.path}: its format cannot be guessed: found {suffixes}, expected files of one kind among {known}; or "
        "set the source's format"
    )
