"""Folders of torch.distributed.checkpoint (DCP): which tensors they hold, boxes of them, and writing one as a stream.

folder/.metadata        a pickle: names, shapes, types, and where the chunks of each tensor lie
folder/__0_7.distcp     what `torch.save` writes of a tensor; torch writes several to a file, one behind the other
"""

import io
import math
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmtrain.checkpoint.tensor_pieces import overlap
from mmtrain.checkpoint.tensorfile import TensorEntry
from mmtrain.errors import ModelFolderError
from mmtrain.families.stored_tensors import StoredWeight
from mmtrain.weights.folder_tensors import DTYPES

if TYPE_CHECKING:
    import torch

METADATA_FILE = ".metadata"
MAX_OPEN_CHUNKS = 16  # those of query, key, value and gate from four ranks; a chunk in a file of its own is mapped
_CODES = {name: code for code, name in DTYPES.items()}
_DCP = "torch.distributed.checkpoint."
# What the pickle of a folder may name. Others would be called while it is read.
_ALLOWED_NAMES = frozenset(
    (module, name)
    for module, names in {
        f"{_DCP}metadata": (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        ),
        f"{_DCP}filesystem": ("_StorageInfo", "_StoragePrefix"),
        "torch": (
            "Size", "bfloat16", "bool", "float16", "float32", "float64", "int16", "int32", "int64", "int8", "uint8",
            "float8_e4m3fn", "float8_e5m2",
        ),
        "torch.serialization": ("_get_layout",),
        "collections": ("OrderedDict",),
        "pathlib": ("Path", "PosixPath", "PurePosixPath"),
        "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
    }.items()
    for name in names
)  # fmt: skip


def is_dcp_folder(path: Path) -> bool:
    """Return whether a folder holds a checkpoint of torch.distributed.checkpoint."""
    return (path / METADATA_FILE).is_file()


@dataclass(frozen=True)
class _Chunk:
    """A stored box of a tensor, and the bytes of the file that hold it."""

    box: tuple[tuple[int, int], ...]
    file: str
    offset: int
    length: int


class DcpFolder:
    """All tensors of a folder by name. Chunks are loaded when they are read, and the last ones stay until `close`."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata. Raises ModelFolderError for a folder that is damaged, or that is not read."""
        self.folder = folder
        metadata = _read_metadata(folder)
        self.tensors: dict[str, StoredWeight] = {}
        self._chunks: dict[str, list[_Chunk]] = {}
        self._loaded: OrderedDict[_Chunk, torch.Tensor] = OrderedDict()
        for name, stored in metadata.state_dict_metadata.items():
            if not hasattr(stored, "chunks"):  # no tensor, such as the state of a data loader
                continue
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            self.tensors[name] = StoredWeight(METADATA_FILE, _CODES.get(dtype, dtype), tuple(stored.size), (0, 0))
            self._chunks[name] = [_chunk_of(folder, name, chunk, metadata.storage_data) for chunk in stored.chunks]

    def read(self, name: str, box: tuple[tuple[int, int], ...]) -> "torch.Tensor":
        """Read a box of a tensor. Raises ModelFolderError if the chunks do not hold all of it, or cannot be read."""
        import torch

        result: torch.Tensor | None = None
        num_read = 0
        for chunk in self._chunks[name]:
            common = overlap(chunk.box, box)
            if common is None:
                continue
            part = self._load(chunk)[_index(common, chunk.box)]
            if common == box:
                return part.clone()
            if result is None:
                result = torch.empty([hi - lo for lo, hi in box], dtype=part.dtype)
            result[_index(common, box)] = part
            num_read += part.numel()
        if result is None or num_read != result.numel():
            raise ModelFolderError(f"{self.folder}: the chunks of {name} do not hold all of it")
        return result

    def close(self) -> None:
        """Close all files."""
        self._loaded.clear()

    def _load(self, chunk: _Chunk) -> "torch.Tensor":
        if chunk in self._loaded:
            self._loaded.move_to_end(chunk)
            return self._loaded[chunk]
        import torch

        path = self.folder / chunk.file
        try:
            if (chunk.offset, chunk.length) == (0, path.stat().st_size):
                tensor: torch.Tensor = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            else:
                with path.open("rb") as file:
                    file.seek(chunk.offset)
                    content = io.BytesIO(file.read(chunk.length))
                tensor = torch.load(content, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            first_line = (str(error).splitlines() or [""])[0]
            raise ModelFolderError(f"{path}: cannot read a tensor: {first_line}; copy the folder again") from None
        self._loaded[chunk] = tensor
        while len(self._loaded) > MAX_OPEN_CHUNKS:
            self._loaded.popitem(last=False)
        return tensor


def _chunk_of(folder: Path, name: str, chunk: Any, storage: Any) -> _Chunk:
    """Return where a chunk lies. Raises ModelFolderError for one that is missing, or that is compressed."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    info = storage.get(MetadataIndex(name, chunk.offsets))
    if info is None:
        raise ModelFolderError(f"{folder / METADATA_FILE}: says nowhere where {name} is; copy the folder again")
    if getattr(info, "transform_descriptors", None):
        raise ModelFolderError(f"{folder}: {name} is compressed ({info.transform_descriptors}), which is not read")
    if Path(info.relative_path).name != info.relative_path:
        raise ModelFolderError(f"{folder / METADATA_FILE}: names a file outside the folder: {info.relative_path}")
    box = tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return _Chunk(box, info.relative_path, info.offset, info.length)


class _MetadataReader(pickle.Unpickler):
    """Reads the metadata of a folder, and nothing that would run code of others."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what the pickle names. Raises UnpicklingError for all but the parts of metadata."""
        if (module, name) not in _ALLOWED_NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of metadata")
        return super().find_class(module, name)


def _read_metadata(folder: Path) -> Any:
    path = folder / METADATA_FILE
    try:
        with path.open("rb") as file:
            metadata = _MetadataReader(file).load()
        if not isinstance(metadata.state_dict_metadata, dict) or not isinstance(metadata.storage_data, dict):
            raise ValueError("it lacks the tables of tensors and files")
    except Exception as error:  # a pickle may raise anything
        raise ModelFolderError(f"{path}: no metadata of torch.distributed.checkpoint: {error}") from None
    return metadata


def _index(inner: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(lo - base, hi - base) for (lo, hi), (base, _) in zip(inner, outer, strict=True))


@dataclass(frozen=True)
class DcpEntry:
    """A tensor to write, and the keys under which a state dict holds it, from the outermost."""

    tensor: TensorEntry  # its name is the keys, joined by points
    keys: tuple[str, ...]
    read: "Callable[[], torch.Tensor]"  # the values, in any type


def write_dcp(draft: Path, entries: Iterable[DcpEntry]) -> None:
    """Write tensors into an empty folder, one file for each; one of them is in memory at a time. Raises OSError."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # Of a file with several tensors torch holds all in memory until it is written. `draft_folder` syncs them.
    writer = FileSystemWriter(draft, single_file_per_rank=False, sync_files=False, per_thread_copy_ahead=0)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "torch.distributed is disabled"
            )  # it says so even where that is asked for
            save({}, storage_writer=writer, planner=_streaming_planner(list(entries)), no_dist=True)
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        raise causes[0] from None if causes else error


def _streaming_planner(entries: Sequence[DcpEntry]) -> Any:
    """Return a planner that reads each tensor when it is written; a class of its own would import torch."""
    import torch
    from torch.distributed.checkpoint.metadata import (
        STORAGE_TYPES,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

    by_name = {entry.tensor.name: entry for entry in entries}

    def chunk(entry: DcpEntry) -> ChunkStorageMetadata:
        shape = torch.Size(entry.tensor.shape)
        return ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)

    def properties(entry: DcpEntry) -> TensorProperties:
        return TensorProperties(getattr(torch, entry.tensor.dtype))

    class StreamingPlanner(SavePlanner):
        def set_up_planner(  # torch warns of other names
            self, state_dict: object, storage_meta: object = None, is_coordinator: bool = False
        ) -> None:
            pass

        def create_local_plan(self) -> SavePlan:
            return SavePlan(
                [
                    WriteItem(
                        MetadataIndex(name, chunk(entry).offsets),
                        WriteItemType.TENSOR,
                        tensor_data=TensorWriteData(chunk(entry), properties(entry), chunk(entry).sizes),
                    )
                    for name, entry in by_name.items()
                ]
            )

        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            stored: dict[str, STORAGE_TYPES] = {
                name: TensorStorageMetadata(properties(entry), chunk(entry).sizes, [chunk(entry)])
                for name, entry in by_name.items()
            }
            return all_plans, Metadata(stored, {name: entry.keys for name, entry in by_name.items()})

        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            return new_plan

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            entry = by_name[write_item.index.fqn]
            values = entry.read().to(getattr(torch, entry.tensor.dtype)).contiguous()
            assert math.prod(entry.tensor.shape) == values.numel(), f"{entry.tensor.name}: another shape"
            return values

    return StreamingPlanner()
