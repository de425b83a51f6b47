"""The safetensors files of a Hugging Face folder: which tensors they hold, and slices of them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmtrain.errors import ModelFolderError
from mmtrain.families.folder_files import WEIGHT_FILES

if TYPE_CHECKING:
    import torch

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # in the files, and in torch
_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors library


@dataclass(frozen=True)
class StoredWeight:
    """A tensor in a file of the folder. `dtype` is the code of safetensors, such as `BF16`."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FolderTensors:
    """All tensors of a folder by name. Files are opened at the first read and stay open until `close`."""

    folder: Path
    tensors: Mapping[str, StoredWeight]
    _open: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, folder: Path) -> "FolderTensors":
        """Read the headers of the folder's files. Raises ModelFolderError for files that are missing or damaged."""
        tensors: dict[str, StoredWeight] = {}
        for name in _file_names(folder):
            tensors |= _read_header(folder, name)
        return cls(folder, tensors)

    def read(self, name: str, box: tuple[tuple[int, int], ...]) -> "torch.Tensor":
        """Read a box of a tensor into new memory. Raises ModelFolderError."""
        from safetensors import SafetensorError, safe_open

        stored = self.tensors[name]
        path = self.folder / stored.file
        try:
            if stored.file not in self._open:
                self._open[stored.file] = safe_open(path, framework="pt")
            part: torch.Tensor = self._open[stored.file].get_slice(name)[tuple(slice(lo, hi) for lo, hi in box)]
        except (SafetensorError, OSError) as error:
            raise ModelFolderError(f"{path}: cannot read {name}: {error}; fetch the file again") from None
        return part

    def close(self) -> None:
        """Close all files, so that their pages no longer count as memory of this process."""
        self._open.clear()


def _file_names(folder: Path) -> list[str]:
    """Return the folder's files of weights, as its index lists them."""
    indices = [folder / index for index, _ in WEIGHT_FILES if (folder / index).is_file()]
    if not indices:
        for _, single in WEIGHT_FILES:
            if (folder / single).is_file():
                return [single]
        allowed = " or ".join(f"{single}, or {index} with its files" for index, single in WEIGHT_FILES)
        raise ModelFolderError(f"{folder} holds no weights; allowed: {allowed}")
    index = indices[0]
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(
            f"{index}: no index of weights ({type(error).__name__}: {error}); fetch the file again"
        ) from None
    missing = [name for name in names if not (folder / str(name)).is_file()]
    if missing:
        raise ModelFolderError(f"{index} names files that are missing: {', '.join(map(str, missing))}; fetch them")
    foreign = [name for name in names if Path(name).name != name]
    if foreign:
        raise ModelFolderError(f"{index} names files outside the folder: {', '.join(foreign)}")
    return names


def _read_header(folder: Path, name: str) -> dict[str, StoredWeight]:
    """Read the names, types and shapes in one file, and check that the file is as long as they say."""
    path = folder / name
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError("its header is cut off")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {
            tensor: StoredWeight(name, entry["dtype"], tuple(entry["shape"])) for tensor, entry in header.items()
        }
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size != 8 + length + end:
            raise ValueError(f"it has {size} bytes, but its header says {8 + length + end}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(f"{path}: no complete safetensors file: {error}; fetch the file again") from None
    return tensors
