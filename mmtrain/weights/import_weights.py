"""Fill the parameters of a rank from a folder, slice by slice."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mmtrain.errors import ModelFolderError
from mmtrain.families import Block, ModelFolder, ParameterSource, read_model_folder
from mmtrain.families.hub_models import fetch_weights
from mmtrain.families.weight_layouts import Box
from mmtrain.models.layer_shape import is_adapter
from mmtrain.models.parameter_specs import ParamSpec
from mmtrain.recipe import Recipe
from mmtrain.weights.folder_tensors import DTYPES, FolderTensors
from mmtrain.weights.match_tensors import MatchedFolder, match_tensors

if TYPE_CHECKING:
    import torch

MAX_ELEMENTS_PER_READ = 16 << 20  # 64 MB in fp32: what a rank holds beside its parameters
_SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}


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
        source = self._source_of(spec)
        if source is None:
            return False
        self._read_box(source, param.view(spec.local_shape(tp)), _shard_box(spec, tp_rank, tp))
        return True

    def fill_master(
        self, master: "torch.Tensor", spec: ParamSpec, tp_rank: int, tp: int, first: int, dtype: "torch.dtype"
    ) -> bool:
        """Fill master weights: elements of this rank's flattened shard of a parameter, from `first` on.

        Return whether the folder holds the parameter, at a higher precision than `dtype`. Beside `master`, at most
        `MAX_ELEMENTS_PER_READ` elements are in memory.
        """
        import torch

        source = self._source_of(spec)
        if source is None or not self._has_more_bits(source, str(dtype).removeprefix("torch.")):
            return False
        last = first + master.numel()
        for box, start in _slabs(_shard_box(spec, tp_rank, tp)):
            end = start + _num_elements(box)
            if end <= first or start >= last:
                continue
            slab = torch.empty([hi - lo for lo, hi in box], dtype=master.dtype)
            self._read_box(source, slab, box)
            lo, hi = max(first, start), min(last, end)
            master[lo - first : hi - first].copy_(slab.view(-1)[lo - start : hi - start])
        return True

    def _source_of(self, spec: ParamSpec) -> ParameterSource | None:
        """Return what a parameter is made of; None if the folder does not hold it."""
        is_in_unit = spec.name.split(".", 1)[0] in self.units
        if not is_in_unit or is_adapter(spec.name) or spec.name in self._matched.fresh:
            return None
        source = self._matched.sources[spec.name]
        source.check_cover(spec.full_shape)
        return source

    def _has_more_bits(self, source: ParameterSource, dtype: str) -> bool:
        stored = {DTYPES[self._tensors.tensors[tensor].dtype] for tensor in source.tensor_shapes()}
        return max(map(_SIGNIFICANT_BITS.__getitem__, stored)) > _SIGNIFICANT_BITS[dtype]

    def _read_box(self, source: ParameterSource, target: "torch.Tensor", box: Box) -> None:
        """Fill `target` with a box of a parameter's full view."""
        if source.may_be_padded:
            target.zero_()
        for block in source.blocks:
            inside = _cut(block, box)
            for piece in _pieces(inside) if inside is not None else ():
                place = tuple(
                    slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(piece.view_box, box, strict=True)
                )
                region = target[place]
                region.copy_(self._tensors.read(piece.tensor, piece.tensor_box).reshape(region.shape))

    def close(self) -> None:
        """Close the files of the folder."""
        self._tensors.close()


def open_pretrained(recipe: Recipe) -> PretrainedWeights | None:
    """Open the weights that the recipe starts from; None if it starts from random ones.

    Fetches weights of the hub that are not here yet, and reads the headers of all files. Raises ModelFolderError for
    files or tensors that do not fit.
    """
    if recipe.model.hf is None:
        return None
    try:
        folder = read_model_folder(recipe.model.hf)
        fetch_weights(folder.path)
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


def _shard_box(spec: ParamSpec, tp_rank: int, tp: int) -> Box:
    """Return the box of the full view that a tensor-parallel rank holds."""
    box = [(0, size) for size in spec.full_shape]
    if spec.dim is not None:
        rows = spec.full_shape[spec.dim] // tp
        box[spec.dim] = (tp_rank * rows, (tp_rank + 1) * rows)
    return tuple(box)


def _cut(block: Block, box: Box) -> Block | None:
    """Return the part of a block inside a box; None if there is none."""
    inside: Block | None = block
    for dim, (lo, hi) in enumerate(box):
        inside = None if inside is None else inside.cut(dim, lo, hi)
    return inside


def _slabs(box: Box, dim: int = 0, start: int = 0) -> Iterator[tuple[Box, int]]:
    """Cut a box into boxes of at most `MAX_ELEMENTS_PER_READ`, which follow each other in row-major order.

    Yield each with the place of its first element in that order, counted from `start`.
    """
    if _num_elements(box) <= MAX_ELEMENTS_PER_READ or dim == len(box):
        yield box, start
        return
    lo, hi = box[dim]
    row_size = _num_elements(box) // (hi - lo)
    num_rows = max(1, MAX_ELEMENTS_PER_READ // row_size)
    for row in range(lo, hi, num_rows):
        part = (*box[:dim], (row, min(row + num_rows, hi)), *box[dim + 1 :])
        yield from _slabs(part, dim + 1, start + (row - lo) * row_size)


def _num_elements(box: Box) -> int:
    return math.prod(hi - lo for lo, hi in box)
