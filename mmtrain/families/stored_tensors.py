"""The headers of the safetensors files of a Hugging Face folder: which tensors they hold, and where."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmtrain.errors import ModelFolderError
from mmtrain.families.folder_files import WEIGHT_FILES

_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors library
_BYTES_PER_READ = 8 << 20


@dataclass(frozen=True)
class StoredWeight:
    """A tensor in a file of the folder. `dtype` is the code of safetensors, such as `BF16`."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    span: tuple[int, int]  # bytes of the file that hold it


def read_headers(folder: Path) -> dict[str, StoredWeight]:
    """Read the headers of the folder's files. Raises ModelFolderError for files that are missing or damaged."""
    tensors: dict[str, StoredWeight] = {}
    for name in weight_file_names(folder):
        tensors |= read_header(folder, name)
    return tensors


def are_equal(folder: Path, first: StoredWeight, second: StoredWeight) -> bool:
    """Return whether two tensors have the same type, shape and bytes; read them up to the first difference."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    pairs = zip(_read_bytes(folder, first), _read_bytes(folder, second), strict=True)
    return all(ours == theirs for ours, theirs in pairs)


def _read_bytes(folder: Path, weight: StoredWeight) -> Iterator[bytes]:
    start, stop = weight.span
    with (folder / weight.file).open("rb") as file:
        file.seek(start)
        for position in range(start, stop, _BYTES_PER_READ):
            yield file.read(min(_BYTES_PER_READ, stop - position))


def weight_file_names(folder: Path) -> list[str]:
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


def read_header(folder: Path, name: str) -> dict[str, StoredWeight]:
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
            tensor: StoredWeight(name, entry["dtype"], tuple(entry["shape"]), _span(entry["data_offsets"], 8 + length))
            for tensor, entry in header.items()
        }
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size != 8 + length + end:
            raise ValueError(f"it has {size} bytes, but its header says {8 + length + end}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(f"{path}: no complete safetensors file: {error}; fetch the file again") from None
    return tensors


def _span(offsets: list[int], header_bytes: int) -> tuple[int, int]:
    return header_bytes + offsets[0], header_bytes + offsets[1]
