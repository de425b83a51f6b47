"""Write tensors of a run to the safetensors files of a new folder, one parameter in memory at a time."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mmtrain.checkpoint import Checkpoint
from mmtrain.checkpoint.storage import write_durably
from mmtrain.checkpoint.tensorfile import TensorEntry, header_bytes, tensor_bytes
from mmtrain.durable_files import sync_file, sync_folder, take_lock
from mmtrain.errors import UserError, writing
from mmtrain.families import ParameterSource
from mmtrain.families.weight_layouts import Block, sources_by_tensor
from mmtrain.models.shapes.layer_shape import LoraShape
from mmtrain.recipe.settings.source_path import RemotePath
from mmtrain.weights.adapters import adapter_names, memberships_of, merge_adapter, read_parameter
from mmtrain.weights.folder_tensors import FolderTensors

if TYPE_CHECKING:
    import torch

ExportDtype = Literal["bf16", "fp16", "fp32"]
DRAFT_SUFFIX = ".draft"  # of the names of hidden folders that are not complete
_DRAFT_NAME = re.compile(rf"\..+\.(\d+){re.escape(DRAFT_SUFFIX)}")  # with the process that writes it
MAX_FILE_BYTES = 5_000_000_000  # as `save_pretrained` of transformers splits files
TORCH_NAMES: Mapping[ExportDtype, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class ExportedFolder:
    """What was written."""

    folder: Path | RemotePath
    step: int
    num_files: int  # with weights
    num_bytes: int  # of weights
    dtypes: tuple[str, ...]  # torch's names
    notes: tuple[str, ...] = ()  # what its config and processors state otherwise than those of the source folder

    def summary(self) -> str:
        """Say what was written, as an introduction to the commands that use it."""
        files = "1 file" if self.num_files == 1 else f"{self.num_files} files"
        return (
            f"{self.folder}: weights after step {self.step}, {files}, {self.num_bytes / 1e9:,.3g} GB "
            f"({', '.join(self.dtypes)})" + (". Use it with" if isinstance(self.folder, Path) else "")
        )


@dataclass(frozen=True)
class TensorTarget:
    """A tensor to write: parts of our parameters, mostly of one, or one that the family has and we do not compute."""

    entry: TensorEntry
    sources: tuple[ParameterSource, ...] = ()

    @classmethod
    def all_of(
        cls, sources: Iterable[ParameterSource], dtype_of: Callable[[str], str], *, unused: bool = False
    ) -> "Iterator[TensorTarget]":
        """Yield every tensor that parameters are made of, those of one parameter after another.

        dtype_of: torch's name of the dtype of a tensor. unused: nothing here computes the parameters.
        """
        for tensor, (shape, of_tensor) in sources_by_tensor(sources).items():
            yield cls(TensorEntry(tensor, dtype_of(tensor), shape), () if unused else tuple(of_tensor))


def require_new(out: Path) -> None:
    """Raise UserError for a folder that exists."""
    if out.exists():
        raise UserError(f"--out {out}: exists already; name a folder that does not")


@contextmanager
def draft_folder(out: Path, what: str, further_files: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Yield a folder to write into; it becomes `out` at the end, or vanishes if anything fails.

    further_files: texts by the names of their files, which the folder gets besides.

    Raises UserError, which calls the content `what`, if it cannot be written.
    """
    draft = out.with_name(f".{out.name}.{os.getpid()}{DRAFT_SUFFIX}")
    with writing("--out", out, what), ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            remove_dead_drafts(out.parent)
            draft.mkdir()
            stack.enter_context(_held_draft(draft))
            yield draft
            for name, text in (further_files or {}).items():
                (draft / name).write_text(text, encoding="utf-8")
            _sync_all(draft)
            draft.rename(out)
            sync_folder(out.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def remove_dead_drafts(parent: Path) -> None:
    """Remove the hidden drafts in a folder whose processes were killed; each is as large as a model.

    A process holds a lock on its draft as long as it writes. Where a file system has no locks, drafts stay.
    """
    for draft in parent.glob(f".*{DRAFT_SUFFIX}"):
        name = _DRAFT_NAME.fullmatch(draft.name)
        if name is None or draft.is_symlink() or not draft.is_dir():
            continue
        with _held_draft(draft) as is_held:
            if is_held and not _runs_here(int(name[1])):
                shutil.rmtree(draft, ignore_errors=True)


def _runs_here(pid: int) -> bool:
    """Return whether a process of this number runs on this machine: it may be about to lock the draft that it made."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another user, or no number of a process
        return True
    return True


@contextmanager
def _held_draft(draft: Path) -> Iterator[bool]:
    """Hold the lock on a draft; yield whether this process has it."""
    try:
        folder = os.open(draft, os.O_RDONLY)
    except OSError:  # gone meanwhile, or a system whose folders cannot be opened
        yield False
        return
    try:
        yield take_lock(folder, wait=False) is True
    finally:
        os.close(folder)


def _sync_all(folder: Path) -> None:
    """Make the small files of a folder survive a power cut; those of tensors do already."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                sync_file(file.fileno())
    sync_folder(folder)


def split_targets(
    targets: Sequence[TensorTarget], max_file_bytes: int, single_file: str
) -> dict[str, list[TensorTarget]]:
    """Divide the tensors over files, named as `transformers` and `diffusers` do from the name of a single one.

    A larger tensor has a file of its own.
    """
    groups: list[list[TensorTarget]] = [[]]
    num_bytes = 0
    for target in targets:
        if groups[-1] and num_bytes + target.entry.num_bytes > max_file_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(target)
        num_bytes += target.entry.num_bytes
    if len(groups) == 1:
        return {single_file: groups[0]}
    stem, suffix = single_file.rsplit(".", 1)
    return {f"{stem}-{i:05d}-of-{len(groups):05d}.{suffix}": group for i, group in enumerate(groups, start=1)}


class WeightReader:
    """Reads tensors to write; the parameter that several of them are made of is read once."""

    def __init__(
        self,
        stored: FolderTensors | None,
        checkpoint: Checkpoint,
        adapted: Mapping[str, LoraShape],
        state: str = "",
    ) -> None:
        """Read from a checkpoint with these adapters, and from the folder that the run started from.

        state: what follows the names of parameters in the checkpoint, to read state of the optimizer in their place;
            that of parameters without any is zeros.
        """
        self._stored, self._checkpoint, self._adapted, self._state = stored, checkpoint, adapted, state
        self._parameter: tuple[str, torch.Tensor] | None = None

    def read(self, target: TensorTarget) -> "torch.Tensor":
        """Return the values of a tensor, in the dtype in which the checkpoint or the source folder holds them."""
        import torch

        name, shape = target.entry.name, target.entry.shape
        if not target.sources and self._stored is None:
            return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)  # norms without effect
        if not target.sources:
            assert self._stored is not None
            return self._stored.read(name, tuple((0, size) for size in shape))
        whole = self._whole_part(target)
        if whole is not None:
            return whole
        tensor = torch.empty(shape, dtype=self._values_of(target.sources[0]).dtype)
        for source in target.sources:
            values = self._values_of(source)
            for block in source.blocks:
                if block.tensor == name:
                    place = tensor[tuple(slice(lo, hi) for lo, hi in block.tensor_box)]
                    place.copy_(_part_of(values, block).reshape(place.shape))
        return tensor

    def _whole_part(self, target: TensorTarget) -> "torch.Tensor | None":
        """Return a tensor that is one part of one parameter, mostly in the same memory; None for any other."""
        blocks = [
            (source, block) for source in target.sources for block in source.blocks if block.tensor == target.entry.name
        ]
        [(source, block), *others] = blocks
        if others or block.tensor_box != tuple((0, size) for size in target.entry.shape):
            return None
        return _part_of(self._values_of(source), block).reshape(target.entry.shape)

    def _values_of(self, source: ParameterSource) -> "torch.Tensor":
        if self._parameter is None or self._parameter[0] != source.name:
            self._parameter = None  # free the last one before the next is read
            weight = self._read_parameter(source.name)
            source.check_cover(tuple(weight.shape))
            lora = self._adapted.get(source.name)
            if lora is not None:
                a, b = (read_parameter(self._checkpoint, name) for name in adapter_names(source.name))
                of_parts = memberships_of(lora, source.name, tuple(weight.shape[:-1]))
                weight = merge_adapter(weight, a, b, lora, of_parts)
            self._parameter = (source.name, weight)
        return self._parameter[1]

    def _read_parameter(self, name: str) -> "torch.Tensor":
        import torch

        if f"{name}{self._state}" in self._checkpoint.manifest.tensors:
            return read_parameter(self._checkpoint, f"{name}{self._state}")
        return torch.zeros(self._checkpoint.full_shape(name))


def _part_of(values: "torch.Tensor", block: Block) -> "torch.Tensor":
    """Return the part of a parameter that a block names, as the folder has it but for its shape."""
    part = values[tuple(slice(lo, hi) for lo, hi in block.view_box)]
    return part.mT if block.is_transposed else part


def write_file(path: Path, targets: Sequence[TensorTarget], reader: WeightReader) -> None:
    """Write tensors to one file, each in the dtype of its entry."""
    import torch

    def chunks() -> Iterator[bytes | memoryview]:
        yield header_bytes((target.entry for target in targets), metadata={"format": "pt"})
        for target in targets:
            yield tensor_bytes(reader.read(target).to(getattr(torch, target.entry.dtype)))

    write_durably(path, chunks())


def write_index(draft: Path, files: Mapping[str, Sequence[TensorTarget]], index_file: str) -> None:
    """Write the index of several files; a single one needs none."""
    if len(files) == 1:
        return
    total_size = sum(target.entry.num_bytes for targets in files.values() for target in targets)
    num_parameters = sum(math.prod(target.entry.shape) for targets in files.values() for target in targets)
    weight_map = {target.entry.name: name for name, targets in files.items() for target in targets}
    index = {
        "metadata": {"total_parameters": num_parameters, "total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (draft / index_file).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
