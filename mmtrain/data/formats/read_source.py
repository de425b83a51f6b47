"""Reading a source, whatever its format: `read_samples` yields its samples in order, and what had to be set aside."""

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
from mmtrain.recipe.schema import LimitSettings, SourceSettings

_SUFFIXES = {".json": "json", **dict.fromkeys(JSON_LINES_SUFFIXES, "json"), ".tar": "webdataset"}
_SUFFIXES |= {".parquet": "parquet", ".pq": "parquet"}
_PACKED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip")
_WILD = frozenset("*?[{")
_MOST_SHARDS = 1_000_000


def read_samples(source: SourceSettings, limits: LimitSettings) -> Iterator[Sample | Quarantined]:
    """Read every sample of a source, shard by shard.

    Raises `DataError` if nothing is there, or if it is in no format that is read.
    """
    if source.states_lengths:
        raise DataError(f"{source.path}: states lengths (format `lengths`), to plan with; there are no samples to read")
    files = list_shards(source.path)
    container = _container(source, files)
    if source.path.is_dir():
        files = [file for file in files if _SUFFIXES[file.suffix] == container]
    if container == "webdataset":
        if source.image_root is not None:
            raise DataError(
                f"{source.path}: image_root is {source.image_root}, but the media of a tar shard lie in the shard: "
                "remove image_root"
            )
        return chain.from_iterable(read_shard(file, limits) for file in files)
    if container == "parquet":
        require_package("pyarrow.parquet", "parquet", f"{files[0]}: reading Parquet")
        from mmtrain.data.formats.parquet import read_parquet

        return chain.from_iterable(
            read_parquet(file, AllowedFolder(source.image_root or file.parent), limits) for file in files
        )
    layout = CONVERSATION_KEYS_BY_FORMAT.get(source.format or "", CONVERSATION_KEYS)
    return chain.from_iterable(
        read_json(file, AllowedFolder(source.image_root or file.parent).file, layout) for file in files
    )


def list_shards(path: Path) -> list[Path]:
    """The files that a path names: itself, those in a folder, or those that match `{000..123}`, `{a,b}`, `*` and `?`.

    Raises `DataError` if there are none.
    """
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        if not found:
            raise DataError(f"{path}: no data files in this folder; looked for {', '.join(sorted(_SUFFIXES))}")
        return found
    if path.exists() or not _WILD & set(str(path)):
        return [path]
    named = _braces(str(path))
    found = [file for name in named for file in _matching(Path(name))]
    if not found:
        raise DataError(f"{path}: no file matches")
    return found


def _matching(pattern: Path) -> list[Path]:
    if not set("*?[") & set(str(pattern)):
        return [pattern]
    anchor = Path(pattern.anchor)
    return sorted(anchor.glob(str(pattern.relative_to(anchor))))


def _braces(text: str) -> list[str]:
    """Every text that `{a,b}` and `{000..123}` stand for, as in a shell.

    >>> _braces("x-{08..10}.{tar,txt}")[:3]
    ['x-08.tar', 'x-08.txt', 'x-09.tar']
    """
    found = re.search(r"\{([^{}]*)\}", text)
    if found is None:
        return [text]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    if span is None:
        choices = found[1].split(",")
    else:
        low, high = int(span[1]), int(span[2])
        if high - low >= _MOST_SHARDS:
            raise DataError(f"{text}: names more than {_MOST_SHARDS} shards")
        choices = [str(number).zfill(len(span[1])) for number in range(low, high + 1)]
    rest = _braces(text[found.end() :])
    return [f"{text[: found.start()]}{choice}{tail}" for choice in choices for tail in rest]


def _container(source: SourceSettings, files: list[Path]) -> str:
    """What holds the samples: `json`, `webdataset` or `parquet`."""
    if source.format is not None:
        return "json" if source.format in CONVERSATION_KEYS_BY_FORMAT else source.format
    kinds = {_SUFFIXES.get(file.suffix) for file in files}
    if len(kinds) == 1 and (kind := kinds.pop()) is not None:
        return kind
    packed = next((file for file in files if file.suffix in _PACKED), None)
    if packed is not None:
        raise DataError(f"{packed}: compressed data cannot be opened in the middle; unpack it")
    found = ", ".join(sorted({file.suffix or "no ending" for file in files}))
    known = ", ".join(sorted(_SUFFIXES))
    raise DataError(
        f"{source.path}: its format cannot be guessed: found {found}, expected files of one kind among {known}; or set "
        "the source's format"
    )
