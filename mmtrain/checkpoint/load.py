"""Open the newest checkpoint whose files are all intact, and read any piece of any tensor from it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmtrain.checkpoint import folders as layout
from mmtrain.checkpoint import tensorfile
from mmtrain.checkpoint.manifest import Manifest, Piece
from mmtrain.checkpoint.rank_agreement import Ranks
from mmtrain.checkpoint.readers import Hold, hold
from mmtrain.checkpoint.storage import ProgressCallback, ignore_progress
from mmtrain.checkpoint.tensor_pieces import Region, ShardSpec, overlap
from mmtrain.checkpoint.verify_files import best_step_of, complete, read_manifest, verify_together
from mmtrain.errors import CheckpointError
from mmtrain.written_by import OTHER_FORMAT

if TYPE_CHECKING:
    import torch

ChosenCheckpoint = Literal["newest", "best"] | int  # a number is a step
NEWEST: Literal["newest"] = "newest"
BEST: Literal["best"] = "best"
_MAX_LISTINGS = 5  # of a run that removes checkpoints faster than they can be opened


def open_newest_good(
    root: Path,
    on_bad: Callable[[str], None],
    ranks: Ranks | None = None,
    progress: ProgressCallback = ignore_progress,
    required_state: Sequence[str] = (),
) -> "Checkpoint":
    """Open the newest checkpoint in `root` whose files are all as they were saved, with the keys `required_state`.

    All ranks of a job open the same checkpoint and share the hashing. For each newer one that is damaged, rank 0 calls
    `on_bad` with a line that names the folder, its files and what is wrong. `progress` hears of what this rank reads,
    here and from the checkpoint. Raises CheckpointError on all ranks if no checkpoint is good, or if one that is newer
    than the first good one is of another format: to go on from an older one would lose steps without a word.
    """
    ranks = ranks or Ranks.alone()
    folders: list[Path] = []
    for _ in range(_MAX_LISTINGS):
        folders = _list_together(root, ranks)
        good = _first_good(folders, on_bad, ranks, progress, required_state)
        if good is not None:
            return good
        # A run removes checkpoints while it saves others.
        if not ranks.from_zero(f"listing the checkpoints in {root}", partial(_any_gone, folders)):
            break
    if folders:
        raise CheckpointError(f"none of the {len(folders)} checkpoints in {root} is undamaged")
    raise CheckpointError(f"no checkpoint in {root}")


def open_chosen(
    root: Path,
    chosen: ChosenCheckpoint,
    on_bad: Callable[[str], None],
    ranks: Ranks | None = None,
    progress: ProgressCallback = ignore_progress,
) -> "Checkpoint":
    """Open the newest good checkpoint, the best one, or that of a step; see `open_newest_good`.

    The newest checkpoint says which one is the best. Raises CheckpointError, which says what there is, if there is no
    such checkpoint, and as `open_newest_good`.
    """
    ranks = ranks or Ranks.alone()
    if chosen == NEWEST:
        return open_newest_good(root, on_bad, ranks, progress)
    if chosen != BEST:
        return _open_step(root, chosen, on_bad, ranks, progress)
    step = ranks.from_zero(f"listing the checkpoints in {root}", lambda: _find_best_step(root))
    if step is None:
        raise CheckpointError(
            f"no checkpoint in {root} says which one is the best: train.best.metric in the recipe, such as val_loss, "
            "lets a run remember it. Name a step, or take the newest one"
        )
    return _open_step(root, step, on_bad, ranks, progress)


def _find_best_step(root: Path) -> int | None:
    """Return the step that the newest checkpoint calls the best so far; only manifests are read."""
    return next((best_step_of(folder) for folder in layout.find(root) if complete(folder)), None)


def _open_step(
    root: Path, step: int, on_bad: Callable[[str], None], ranks: Ranks, progress: ProgressCallback
) -> "Checkpoint":
    """Open the newest good checkpoint of one step."""
    folders = _list_together(root, ranks)
    good = _first_good([folder for folder in folders if layout.step_of(folder) == step], on_bad, ranks, progress)
    if good is not None:
        return good
    steps = sorted({str(layout.step_of(folder)) for folder in folders}, key=int)
    there_are = f"there are checkpoints of steps {', '.join(steps)}" if steps else "there is none at all"
    raise CheckpointError(f"no good checkpoint of step {step} in {root}; {there_are}")


def _list_together(root: Path, ranks: Ranks) -> list[Path]:
    """Return the checkpoints in `root`, newest first, as rank 0 sees them.

    Ranks that opened different steps would train on without an error.
    """

    def list_all() -> list[str]:
        return [str(path) for path in layout.find(root)]

    return [Path(text) for text in ranks.from_zero(f"listing the checkpoints in {root}", list_all)]


def _first_good(
    folders: Sequence[Path],
    on_bad: Callable[[str], None],
    ranks: Ranks,
    progress: ProgressCallback = ignore_progress,
    required_state: Sequence[str] = (),
) -> "Checkpoint | None":
    """Open the first of these checkpoints that is good, with all ranks; None if none is. See `open_newest_good`."""
    for folder in folders:
        held = hold(folder)
        problems = verify_together(folder, ranks, progress)
        if not problems:
            manifest = read_manifest(folder)
            problems = [f"{layout.MANIFEST}: its state lacks {k!r}" for k in required_state if k not in manifest.state]
        if not problems:
            return Checkpoint(folder, manifest, progress, _held=[] if held is None else [held])
        _require_known_format(folder, problems)
        if ranks.rank == 0 and not _is_gone(folder):
            on_bad(f"checkpoint {folder} is damaged and not used: {'; '.join(problems)}")
    return None


def _any_gone(folders: Sequence[Path]) -> bool:
    return any(map(_is_gone, folders))


def _is_gone(folder: Path) -> bool:
    """Return whether a run has removed a checkpoint since it was listed."""
    return not folder.exists()


def _require_known_format(folder: Path, problems: Sequence[str]) -> None:
    """Raise CheckpointError if a checkpoint is not damaged, but of another format; every rank has the same problems."""
    start = f"{layout.MANIFEST}: {OTHER_FORMAT} "
    for problem in problems:
        if problem.startswith(start):
            what = problem.removeprefix(f"{layout.MANIFEST}: ")
            raise CheckpointError(
                f"checkpoint {folder} {what}; go on with the version that wrote it, or move the folder away to start "
                "from an older checkpoint"
            )


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, from which pieces of tensors are read on demand.

    Files are memory-mapped and stay open as long as the object lives, so a read costs only its own bytes. Nor does a
    run remove the checkpoint before.
    """

    folder: Path
    manifest: Manifest
    _progress: ProgressCallback = field(default=ignore_progress, repr=False, compare=False)
    _held: list[Hold] = field(default_factory=list, repr=False, compare=False)  # so that no run removes it
    _open: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)  # rank -> safetensors handle

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.manifest.step

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return self.manifest.world_size

    @property
    def state(self) -> dict[str, Any]:
        """The state common to all ranks, as it was passed to `save`."""
        return dict(self.manifest.state)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Return the state of one rank. Raises CheckpointError for a rank that did not save."""
        if not 0 <= rank < self.world_size:
            raise CheckpointError(f"{self.folder} was saved by {self.world_size} ranks; there is no rank {rank}")
        state: dict[str, Any] = json.loads((self.folder / layout.state_file(rank)).read_bytes())
        return state

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self.manifest.tensors)

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor. Raises CheckpointError for an unknown name."""
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{name}: not in checkpoint {self.folder}")
        return self.manifest.tensors[name].shape

    def read(self, name: str, spec: ShardSpec) -> "torch.Tensor":
        """Read the piece `spec` of a tensor into new CPU memory, in the dtype in which it was saved.

        A piece that was not saved as such is assembled from all saved pieces that overlap with it. Raises
        CheckpointError, naming the tensor, if it is unknown, has another full shape, or was not saved in full.
        """
        if self.full_shape(name) != spec.full_shape:
            raise CheckpointError(
                f"{name}: has shape {list(self.full_shape(name))} in checkpoint {self.folder}, "
                f"but {list(spec.full_shape)} in this model"
            )
        tensor = self._read(name, spec)
        self._progress(self.folder, tensor.numel() * tensor.element_size())
        return tensor

    def close(self) -> None:
        """Close the files, and let a run remove them; the next read opens them again."""
        self._open.clear()
        self._held.clear()

    def _read(self, name: str, spec: ShardSpec) -> "torch.Tensor":
        for piece in self.manifest.tensors[name].pieces:
            if piece.spec == spec:  # the same sharding: one copy
                stored: torch.Tensor = self._file(piece.rank).get_tensor(tensorfile.key(name, spec))
                return stored.clone()
        return self._assemble(name, spec)

    def _assemble(self, name: str, spec: ShardSpec) -> "torch.Tensor":
        """Copy all overlaps of stored regions with the regions of `spec`. Raises CheckpointError if one is missing."""
        import torch

        stored = self.manifest.tensors[name]
        result = torch.empty(spec.size, dtype=getattr(torch, stored.dtype))
        is_copied = torch.zeros(spec.size, dtype=torch.bool)
        targets = spec.regions()
        for piece in stored.pieces:
            for source in piece.spec.regions():
                for target in targets:
                    common = overlap(source.box, target.box)
                    if common is None:
                        continue
                    place = slice(target.offset, target.offset + target.size)
                    index = target.within(common)
                    result[place].view(target.shape)[index] = self._region(name, piece, source)[source.within(common)]
                    is_copied[place].view(target.shape)[index] = True
        if not bool(is_copied.all()):
            raise CheckpointError(
                f"{name}: checkpoint {self.folder} holds only {int(is_copied.sum())} of the {spec.size} elements "
                f"of piece {spec.to_text()}"
            )
        return result.view(spec.shape)

    def _region(self, name: str, piece: Piece, region: Region) -> Any:
        """Return a stored region as an object to index; nothing is read before that."""
        file = self._file(piece.rank)
        key = tensorfile.key(name, piece.spec)
        if piece.spec.flat is not None:
            return file.get_slice(key)[region.offset : region.offset + region.size].view(region.shape)
        # An unflattened piece is one region. The library cannot slice a tensor without dimensions.
        return file.get_slice(key) if region.shape else file.get_tensor(key)

    def _file(self, rank: int) -> Any:
        if rank not in self._open:
            from safetensors import safe_open

            self._open[rank] = safe_open(self.folder / layout.tensor_file(rank), framework="pt")
        return self._open[rank]
