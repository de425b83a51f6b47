"""Find the files of a folder that the `datasets` library of Hugging Face has written with `save_to_disk`."""

import json
from pathlib import Path
from typing import Any

from mmtrain.errors import DataError

_STATE_FILE = "state.json"  # of a data set: names its Arrow files
_SPLITS_FILE = "dataset_dict.json"  # of several: names their folders


def saved_dataset_files(folder: Path, split: str | None = None) -> list[Path] | None:
    """Return the Arrow files of a saved data set in its order; None for any other folder.

    split: which of several. Raises `DataError` for a folder of several splits without it, a damaged one, and one whose
    rows were selected or shuffled.
    """
    if (folder / _SPLITS_FILE).is_file():
        splits = [str(name) for name in _read(folder / _SPLITS_FILE).get("splits", [])]
        if split not in splits or split in (None, ".", "..") or "/" in str(split):
            found = "" if split is None else f"found {split}, "
            raise DataError(f"{folder}: several splits: {found}allowed as `split` of the source: {', '.join(splits)}")
        return saved_dataset_files(folder / str(split))
    if not (folder / _STATE_FILE).is_file():
        return None
    state = _read(folder / _STATE_FILE)
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


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{path}: found {type(values).__name__}, expected an object")
    return values
