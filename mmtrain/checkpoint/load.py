"""Opening: newest first, nothing is used before every sum is right, and any piece can be read from any cut."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmtrain.checkpoint import folders as layout
from mmtrain.checkpoint import tensorfile
from mmtrain.checkpoint.manifest import Manifest, Piece
from mmtrain.checkpoint.rank_agreement import Ranks
from mmtrain.checkpoint.tensor_pieces import Region, ShardSpec, overlap
from mmtrain.checkpoint.verify_files import read_manifest, verify_together
from mmtrain.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def open_newest_good(root: Path, on_bad: Callable[[str], None], ranks: Ranks | None = None) -> "Checkpoint":
    """Open the newest checkpoint under `root` whose every file is as it was saved.

    All ranks of a job open the same one and share the hashing. Each damaged one on the way is reported on rank 0:
    `on_bad` gets a line that names the folder, its files and what is wrong with them. Raises CheckpointError on
    all ranks when none is good.
    """
    ranks = ranks or Ranks.alone()
    # Rank 0 lists for all: ranks that opened different steps would train on in silence.
    folders = [
        Path(text)
        for text in ranks.from_zero(
            f"listing the checkpoints in {root}", lambda: [str(path) for path in layout.find(root)]
        )
    ]
    for folder in folders:
        problems = verify_together(folder, ranks)
        if not problems:
            return Checkpoint(folder, read_manifest(folder))
        if ranks.rank == 0:
            on_bad(f"checkpoint {folder} is damaged and not used: {'; '.join(problems)}")
    if folders:
        raise CheckpointError(f"none of the {len(folders)} checkpoints in {root} is undamaged")
    raise CheckpointError(f"no checkpoint in {root}")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, from which pieces of tensors are read as they are asked for.

    Files stay open until the object goes; they are mapped, not loaded, so a read costs its own bytes.
    """

    folder: Path
    manifest: Manifest
    _open: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)  # rank -> safetensors handle

    @property
    def step(self) -> int:
        """The step it was saved after."""
        return self.manifest.step

    @property
    def world_size(self) -> int:
        """Number of ranks that saved it."""
        return self.manifest.world_size

    @property
    def state(self) -> dict[str, Any]:
        """The state common to all ranks, as it was given to `save`."""
        return dict(self.manifest.state)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What `rank` saved as its own. Raises CheckpointError for a rank that was not there."""
        if not 0 <= rank < self.world_size:
            raise CheckpointError(f"{self.folder} was saved by {self.world_size} ranks; there is no rank {rank}")
        own: dict[str, Any] = json.loads((self.folder / layout.state_file(rank)).read_bytes())
        return own

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self.manifest.tensors)

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor. Raises CheckpointError for an unknown name."""
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{name}: not in checkpoint {self.folder}")
        return self.manifest.tensors[name].shape

    def read(self, name: str, spec: ShardSpec) -> "torch.Tensor":
        """The piece `spec` of a tensor, in the dtype it was saved in, on the CPU, in memory of its own.

        Pieces that were saved in another cut are put together from all that overlap. Raises CheckpointError, naming
        the tensor, when it is unknown, has another full shape, or was not saved in full.
        """
        if self.full_shape(name) != spec.full_shape:
            raise CheckpointError(
                f"{name}: has shape {list(self.full_shape(name))} in checkpoint {self.folder}, "
                f"but {list(spec.full_shape)} in this model"
            )
        for piece in self.manifest.tensors[name].pieces:
            if piece.spec == spec:  # the same plan: one straight copy
                whole: torch.Tensor = self._file(piece.rank).get_tensor(tensorfile.key(name, spec))
                return whole.clone()
        return self._assemble(name, spec)

    def _assemble(self, name: str, spec: ShardSpec) -> "torch.Tensor":
        """Copy the overlaps of every stored region with every wanted one, and see that nothing is left out."""
        import torch

        stored = self.manifest.tensors[name]
        result = torch.empty(spec.size, dtype=getattr(torch, stored.dtype))
        seen = torch.zeros(spec.size, dtype=torch.bool)
        wanted = spec.regions()
        for piece in stored.pieces:
            for source in piece.spec.regions():
                for target in wanted:
                    common = overlap(source.box, target.box)
                    if common is None:
                        continue
                    place = slice(target.offset, target.offset + target.size)
                    index = target.within(common)
                    result[place].view(target.shape)[index] = self._region(name, piece, source)[source.within(common)]
                    seen[place].view(target.shape)[index] = True
        if not bool(seen.all()):
            raise CheckpointError(
                f"{name}: checkpoint {self.folder} holds only {int(seen.sum())} of the {spec.size} elements "
                f"of piece {spec.to_text()}"
            )
        return result.view(spec.shape)

    def _region(self, name: str, piece: Piece, region: Region) -> Any:
        """A stored region as something to index; read only when it is."""
        file, key = self._file(piece.rank), tensorfile.key(name, piece.spec)
        if piece.spec.flat is not None:
            return file.get_slice(key)[region.offset : region.offset + region.size].view(region.shape)
        # An unflattened piece is one region. The library cannot slice a tensor without dimensions.
        return file.get_slice(key) if region.shape else file.get_tensor(key)

    def _file(self, rank: int) -> Any:
        if rank not in self._open:
            from safetensors import safe_open

            self._open[rank] = safe_open(self.folder / layout.tensor_file(rank), framework="pt")
        return self._open[rank]
