"""The safetensors files of a Hugging Face folder: which tensors they hold, and slices of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmtrain.errors import ModelFolderError
from mmtrain.families.stored_tensors import StoredWeight, read_headers

if TYPE_CHECKING:
    import torch

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # in the files, and in torch


class StoredTensors(Protocol):
    """Tensors of a folder by name, of which boxes are read."""

    @property
    def folder(self) -> Path:
        """The folder."""
        ...

    @property
    def tensors(self) -> Mapping[str, StoredWeight]:
        """Types and shapes."""
        ...

    def read(self, name: str, box: tuple[tuple[int, int], ...]) -> "torch.Tensor":
        """Read a box of a tensor into new memory. Raises ModelFolderError."""
        ...

    def close(self) -> None:
        """Close all files."""
        ...


@dataclass(frozen=True)
class FolderTensors:
    """All tensors of a folder by name. Files are opened at the first read and stay open until `close`."""

    folder: Path
    tensors: Mapping[str, StoredWeight]
    _open: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, folder: Path) -> "FolderTensors":
        """Read the headers of the folder's files. Raises ModelFolderError for files that are missing or damaged."""
        return cls(folder, read_headers(folder))

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
