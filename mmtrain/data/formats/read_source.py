"""Read a source of any format: `read_samples` yields its samples in order, quarantined ones included.

A folder that the `datasets` library of Hugging Face has written with `save_to_disk` names its files itself.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mmtrain.data.formats.allowed_folder import AllowedFolder, MediaFolder, RemoteFolder
from mmtrain.data.formats.column_paths import ColumnPaths
from mmtrain.data.formats.energon import expand_braces, read_energon_folder
from mmtrain.data.formats.hub_split import hub_split_files
from mmtrain.data.formats.json_files import JSON_LINES_SUFFIXES, read_json
from mmtrain.data.formats.layout_table import CONVERSATION_KEYS, CONVERSATION_KEYS_BY_FORMAT, EntryFormat
from mmtrain.data.formats.plugin_files import read_with_plugin
from mmtrain.data.formats.sample import Quarantined, Sample, turned_to_draw, turned_to_show, with_marks_in_front
from mmtrain.data.formats.sample_split import SampleFilter
from mmtrain.data.formats.webdataset import read_shard
from mmtrain.data.optional_packages import require_package
from mmtrain.data.remote.locations import matching_urls
from mmtrain.errors import DataError
from mmtrain.plugins import find_plugin
from mmtrain.recipe.settings.data_settings import FORMATS, LimitSettings, SourceSettings
from mmtrain.recipe.settings.source_path import RemotePath, SourcePath

_CONTAINER_BY_SUFFIX = {
    ".json": "json",
    **dict.fromkeys(JSON_LINES_SUFFIXES, "json"),
    ".tar": "webdataset",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "parquet",  # the same columns
}
_COMPRESSED_SUFFIXES = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip")
_PATTERN_CHARACTERS = frozenset("*?[{")
_STATE_FILE = "state.json"  # of a data set: names its Arrow files
_SPLITS_FILE = "dataset_dict.json"  # of several: names their folders


def read_samples(
    source: SourceSettings, limits: LimitSettings, split: SampleFilter | None = None
) -> Iterator[Sample | Quarantined]:
    """Read the samples of a source, shard by shard; with `split`, only those that it selects.

    Raises `DataError` if there is no file, or if its format is not supported.
    """
    keys = CONVERSATION_KEYS_BY_FORMAT.get(source.format or "", CONVERSATION_KEYS)
    entry_format = EntryFormat(keys, ColumnPaths(source.columns))
    samples: Iterator[Sample | Quarantined]
    samples = islice(_read_shards(source, limits, entry_format), source.max_samples)
    samples = _with_columns_checked(source, entry_format.columns, samples)
    if split is not None:  # before anything is made of them: a sample that is named twice is in one part
        samples = split.select(source, samples)
    if source.unmarked_media == "front":
        samples = (with_marks_in_front(sample) if isinstance(sample, Sample) else sample for sample in samples)
    if source.captions == "draw":
        samples = (turned_to_draw(sample) if isinstance(sample, Sample) else sample for sample in samples)
    if source.documents == "show":
        samples = (turned_to_show(sample) if isinstance(sample, Sample) else sample for sample in samples)
    return samples


def _with_columns_checked(
    source: SourceSettings, columns: ColumnPaths, samples: Iterable[Sample | Quarantined]
) -> Iterator[Sample | Quarantined]:
    """Yield the samples. Raise `DataError` behind the last one if `columns` names what none of them has."""
    yield from samples
    columns.check_seen(str(source.path))


def _read_shards(
    source: SourceSettings, limits: LimitSettings, entry_format: EntryFormat
) -> Iterator[Sample | Quarantined]:
    if source.states_lengths:
        raise DataError(
            f"{source.path}: states lengths (format `lengths`), which serve for planning; there are no samples to read"
        )
    files = list_shards(source.path, source.split)
    folder = next((file for file in files if _is_folder(file)), None)
    if folder is not None:
        raise DataError(f"{folder}: a folder, where {source.path} must name files; name the files in it: {folder}/*")
    if source.format is not None and source.format not in FORMATS:
        plugin = find_plugin("formats", source.format, "data.sources.format")
        return chain.from_iterable(
            read_with_plugin(plugin, file, _media_folder(source, file).file, entry_format) for file in files
        )
    container = _container(source, files)
    if _is_folder(source.path):
        files = [file for file in files if _CONTAINER_BY_SUFFIX[file.suffix] == container]
    if container == "webdataset":
        if source.image_root is not None:
            raise DataError(
                f"{source.path}: image_root is {source.image_root}, but the media of a tar shard are inside the shard: "
                "remove image_root"
            )
        energon = None if isinstance(source.path, RemotePath) else read_energon_folder(source.path, source.split)
        if energon is not None and energon.fields and source.columns:
            raise DataError(
                f"{source.path}: columns is set, but dataset.yaml of this Energon folder says it: remove it"
            )
        return chain.from_iterable(read_shard(file, limits, energon, entry_format) for file in files)
    if container == "parquet":
        require_package("pyarrow.parquet", "parquet", f"{files[0]}: reading Parquet")
        from mmtrain.data.formats.parquet import read_parquet

        return chain.from_iterable(
            read_parquet(file, _media_folder(source, file), limits, entry_format) for file in files
        )
    return chain.from_iterable(read_json(file, _media_folder(source, file).file, entry_format) for file in files)


def list_shards(path: SourcePath, split: str | None = None) -> Sequence[SourcePath]:
    """Return the files that a path names: itself, those of a folder, or those that match a pattern.

    Patterns hold `{000..123}`, `{a,b}`, `*` and `?`. Of folders of Energon and of the `datasets` library, the files are
    those that they name; `split` chooses among them. A URL that ends with `/` names a folder; `?` has no meaning in
    URLs. Raises `DataError` if there are no files.
    """
    if isinstance(path, RemotePath):
        return _list_remote(path, split)
    if path.is_dir():
        energon = read_energon_folder(path, split)
        if energon is not None:
            return list(energon.shards)
        saved = saved_dataset_files(path, split)
        if saved is not None:
            return saved
    if split is not None:
        raise DataError(
            f"{path}: has split {split}, but is no folder of Energon (.nv-meta) or of the datasets library; remove it"
        )
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if _is_data_file(file))
        if not files:
            known = ", ".join(sorted(_CONTAINER_BY_SUFFIX))
            raise DataError(f"{path}: no data files in this folder; looked for {known}")
        return files
    if path.exists() or not _PATTERN_CHARACTERS & set(str(path)):
        return [path]
    patterns = expand_braces(str(path))
    files = [file for pattern in patterns for file in _matching_files(Path(pattern))]
    if not files:
        raise DataError(f"{path}: no file matches")
    return files


def _list_remote(path: RemotePath, split: str | None) -> list[RemotePath]:
    """Return the files that a URL names. Only folders and patterns are looked up."""
    if split is not None:
        raise DataError(
            f"{path}: has split {split}, but that is for folders of this machine; remove it. Of a data set of the hub, "
            "the path names the split: hf://datasets/org/name?split=train"
        )
    if path.hub_split is not None:
        return hub_split_files(path.hub_split, _is_data_file)
    if _is_folder(path):
        try:
            files = [RemotePath(url) for url in matching_urls(f"{path}*")]
        except FileNotFoundError:
            raise DataError(f"{path}: no such folder, or one that the server does not list; name its files") from None
        files = [file for file in files if _is_data_file(file)]
        if not files:
            known = ", ".join(sorted(_CONTAINER_BY_SUFFIX))
            raise DataError(f"{path}: no data files in this folder; looked for {known}")
        return files
    urls: list[str] = []
    for pattern in expand_braces(str(path)):
        if not _PATTERN_CHARACTERS & set(pattern):
            urls.append(pattern)
            continue
        if _PATTERN_CHARACTERS & set(pattern.rpartition("/")[0]):
            raise DataError(f"{path}: `*` or `[` in a folder; allowed in URLs: in the last name only")
        try:
            urls += matching_urls(pattern)
        except FileNotFoundError:
            raise DataError(f"{path}: no such folder, or one that the server does not list; use {{000..123}}") from None
    if not urls:
        raise DataError(f"{path}: no file matches")
    return [RemotePath(url) for url in urls]


def _is_data_file(file: SourcePath) -> bool:
    """Return whether a file of a folder holds samples; hidden ones, such as `._a.tar` of macOS, do not."""
    return file.suffix in _CONTAINER_BY_SUFFIX and not file.name.startswith(".")


def _is_folder(path: SourcePath) -> bool:
    return path.url.endswith("/") if isinstance(path, RemotePath) else path.is_dir()


def _media_folder(source: SourceSettings, file: SourcePath) -> MediaFolder:
    root = source.image_root or file.parent
    if isinstance(root, RemotePath):
        if root.hub_split is not None:
            raise DataError(
                f"{source.path}: image_root is {root}; allowed: a folder, as {root.hub_split.data_set}/images"
            )
        return RemoteFolder(root)
    if source.image_root is not None and not root.is_dir():
        found = "a file" if root.is_file() else "where there is no folder"
        raise DataError(f"{source.path}: image_root is {root}, {found}; expected the folder of its media")
    return AllowedFolder(root)


def _matching_files(pattern: Path) -> list[Path]:
    if not set("*?[") & set(str(pattern)):
        return [pattern]
    anchor = Path(pattern.anchor)
    files = anchor.glob(str(pattern.relative_to(anchor)))
    return sorted(file for file in files if pattern.name.startswith(".") or not file.name.startswith("."))


def _container(source: SourceSettings, files: Sequence[SourcePath]) -> str:
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
    if not any(isinstance(file, RemotePath) or file.exists() for file in files):
        raise DataError(f"{source.path}: no such file or folder")
    suffixes = ", ".join(sorted({file.suffix or "no suffix" for file in files}))
    known = ", ".join(sorted(_CONTAINER_BY_SUFFIX))
    raise DataError(
        f"{source.path}: its format cannot be guessed: found {suffixes}, expected files of one kind among {known}; or "
        "set the source's format"
    )


def saved_dataset_files(folder: Path, split: str | None = None) -> list[Path] | None:
    """Return the Arrow files of a saved data set in its order; None for any other folder.

    split: which of several. Raises `DataError` for a folder of several splits without it, a damaged one, and one whose
    rows were selected or shuffled.
    """
    if (folder / _SPLITS_FILE).is_file():
        splits = [str(name) for name in _read_object(folder / _SPLITS_FILE).get("splits", [])]
        if split not in splits or split in (None, ".", "..") or "/" in str(split):
            found = "" if split is None else f"found {split}, "
            raise DataError(f"{folder}: several splits: {found}allowed as `split` of the source: {', '.join(splits)}")
        return saved_dataset_files(folder / str(split))
    if not (folder / _STATE_FILE).is_file():
        return None
    state = _read_object(folder / _STATE_FILE)
    if "_data_files" not in state:
        return None
    names = _file_names(state["_data_files"])
    if not names:
        raise DataError(f"{folder / _STATE_FILE}: `_data_files` must be a list of files in this folder; save it again")
    if state.get("_indices_data_files"):
        raise DataError(f"{folder}: its rows are a selection; save what `flatten_indices()` returns")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder}: {missing[0]} is missing, which {_STATE_FILE} names; copy the folder again")
    return [folder / name for name in names]


def _file_names(entries: object) -> list[str]:
    """Return the names in a list of `{"filename": name}`; none if one of them is no plain name in the folder."""
    if not isinstance(entries, list):
        return []
    names = [str(entry.get("filename")) if isinstance(entry, dict) else "" for entry in entries]
    return names if all(name and Path(name).name == name for name in names) else []


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{path}: found {type(values).__name__}, expected an object")
    return values
