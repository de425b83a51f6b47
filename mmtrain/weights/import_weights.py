"""Fill the parameters of a rank from a folder, slice by slice."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mmtrain.errors import ModelFolderError
from mmtrain.families import Block, ModelFolder, read_model_folder
from mmtrain.models.parameter_specs import ParamSpec
from mmtrain.recipe import Recipe
from mmtrain.weights.folder_tensors import FolderTensors
from mmtrain.weights.match_tensors import MatchedFolder, match_tensors

if TYPE_CHECKING:
    import torch

MAX_ELEMENTS_PER_READ = 16 << 20  # 64 MB in fp32: what a rank holds beside its parameters


class PretrainedWeights:
    """The weights of `model.hf`, of which every rank reads what it keeps."""

    def __init__(self, folder: ModelFolder, tensors: FolderTensors, matched: MatchedFolder) -> None:
        """Read from a folder whose tensors have been matched."""
        self._folder, self._tensors, self._matched = folder, tensors, matched

    @property
    def units(self) -> tuple[str, ...]:
        """Return the units that the folder holds."""
        return tuple(self._folder.settings.model)

    @property
    def fresh_modules(self) -> tuple[str, ...]:
        """Return the modules of these units that have no weights in the folder."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self._matched.fresh))

    def fill(self, param: "torch.Tensor", spec: ParamSpec, tp_rank: int, tp: int) -> bool:
        """Fill a parameter of this rank; return whether the folder holds it.

        Values are converted to the parameter's dtype. Rows that pad the vocabulary become zeros.
        """
        if spec.name.split(".", 1)[0] not in self.units or spec.name in self._matched.fresh:
            return False
        source = self._matched.sources[spec.name]
        source.check_cover(spec.full_shape)
        target = param.view(spec.local_shape(tp))
        shard_start = 0
        blocks: list[Block] = list(source.blocks)
        if spec.dim is not None:
            rows = spec.full_shape[spec.dim] // tp
            shard_start = tp_rank * rows
            cut = (block.cut(spec.dim, shard_start, shard_start + rows) for block in blocks)
            blocks = [block for block in cut if block is not None]
        if source.may_be_padded:
            target.zero_()
        for block in blocks:
            for piece in _pieces(block):
                offsets = [shard_start if axis == spec.dim else 0 for axis in range(len(spec.full_shape))]
                place = tuple(slice(lo - o, hi - o) for (lo, hi), o in zip(piece.view_box, offsets, strict=True))
                region = target[place]
                region.copy_(self._tensors.read(piece.tensor, piece.tensor_box).reshape(region.shape))
        return True

    def close(self) -> None:
        """Close the files of the folder."""
        self._tensors.close()


def open_pretrained(recipe: Recipe) -> PretrainedWeights | None:
    """Open the weights that the recipe starts from; None if it starts from random ones.

    Reads the headers of all files. Raises ModelFolderError for files or tensors that do not fit.
    """
    if recipe.model.hf is None:
        return None
    try:
        folder = read_model_folder(recipe.model.hf)
    except ModelFolderError as error:
        raise ModelFolderError(f"model.hf: {error}") from None
    tensors = FolderTensors.of(folder.path)
    return PretrainedWeights(folder, tensors, match_tensors(folder, tensors))


def _pieces(block: Block) -> Iterator[Block]:
    """Cut a block into pieces of at most `MAX_ELEMENTS_PER_READ`, along the tensor's first dimension."""
    axis = block.num_stacked
    lo, hi = block.view_box[axis]
    row = math.prod(stop - start for start, stop in block.view_box[axis + 1 :])
    step = max(1, MAX_ELEMENTS_PER_READ // max(1, row))
    for start in range(lo, hi, step):
        piece = block.cut(axis, start, min(start + step, hi))
        assert piece is not None
        yield piece
