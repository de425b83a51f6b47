"""Fill the parameters of a rank from a folder, slice by slice.

Tokens that a model did not have before start from the mean of the rows of its own tokens.
So a new token's logit is the mean of all logits, and its probability at most the mean of theirs: n old and k new tokens
raise the loss of any text by at most log(1 + k / n). Random rows may take all of the probability of a text that the
model knew (Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021). The mean is also the same
on every rank, whatever the plan. New tokens whose rows are equal part with the first step, which has other gradients
for each.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmtrain.errors import ModelFolderError
from mmtrain.families import Block, ModelFolder, ParameterSource, read_model_folder
from mmtrain.families.hub_models import fetch_weights
from mmtrain.families.stored_tensors import StoredWeight
from mmtrain.families.weight_layouts import Box
from mmtrain.models.shapes.layer_shape import is_adapter
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.recipe import Recipe
from mmtrain.weights.folder_tensors import DTYPES, FolderTensors, StoredTensors
from mmtrain.weights.guest_weights import with_guest_weights
from mmtrain.weights.match_tensors import match_tensors

if TYPE_CHECKING:
    import torch
from collections.abc import Iterable
from pathlib import Path

from mmtrain.recipe.settings.modalities import unit_path

_SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}
MAX_ELEMENTS_PER_READ = 16 << 20  # 64 MB in fp32: what a rank holds beside its parameters


@dataclass(frozen=True)
class StartFolder:
    """A folder that a setting of the recipe names."""

    keys: tuple[str, ...]  # of the setting
    path: Path
    unit: str | None = None  # of the recipe, which alone starts from it; None: all units that the folder holds
    unit_in_folder: str | None = None  # of several that the folder may hold
    is_guest: bool = False  # `transformers` builds its modules

    @property
    def setting(self) -> str:
        """Return the dotted name of the setting."""
        return ".".join(self.keys)

    def read(self) -> ModelFolder:
        """Read the config of the folder. Raises ModelFolderError."""
        return read_model_folder(self.path, as_guest=self.is_guest)


def start_folders(recipe: Recipe) -> tuple[StartFolder, ...]:
    """Return the folders of `model.hf` and of the `hf` of every unit."""
    model = recipe.model
    folders = [] if model.hf is None else [StartFolder(("model", "hf"), model.hf, is_guest=model.guest)]
    for name, encoder in recipe.model.all_encoders.items():
        if encoder.hf is not None:
            folders.append(StartFolder(("model", *unit_path(name), "hf"), encoder.hf, name, encoder.modality))
    if recipe.model.llm.hf is not None:
        folders.append(StartFolder(("model", "llm", "hf"), recipe.model.llm.hf, "llm", "llm"))
    generator = recipe.model.generator
    if generator is not None and generator.hf is not None:
        folders.append(StartFolder(("model", "generator", "hf"), generator.hf, "generator"))
    return tuple(folders)


@dataclass(frozen=True)
class OpenFolder:
    """A folder whose tensors have been matched."""

    tensors: StoredTensors
    sources: Mapping[str, ParameterSource]  # by the name of our parameter
    units: tuple[str, ...]  # of the recipe, that start from it
    fresh_modules: tuple[str, ...]  # of these units, that have no weights in it


class PretrainedWeights:
    """The weights that a recipe starts from, of which every rank reads what it keeps."""

    def __init__(self, folders: Sequence[OpenFolder], num_tokens: int) -> None:
        """Read from folders that hold different units, for a model with a vocabulary of `num_tokens`."""
        self._folders = {unit: folder for folder in folders for unit in folder.units}
        self._num_tokens = num_tokens
        self._mean_rows: dict[str, torch.Tensor] = {}  # by parameter

    @property
    def units(self) -> tuple[str, ...]:
        """Return the units that the folders hold."""
        return tuple(self._folders)

    def tensors_of(self, spec: ParamSpec) -> Mapping[str, StoredWeight]:
        """Return the tensors of the folder that a parameter's unit starts from."""
        return self._folders[_unit_of(spec)].tensors.tensors

    @property
    def fresh_modules(self) -> tuple[str, ...]:
        """Return the modules of these units that have no weights in a folder."""
        return tuple(dict.fromkeys(module for folder in self._folders.values() for module in folder.fresh_modules))

    @property
    def num_new_tokens(self) -> int:
        """Return the number of tokens that the model has and the folder of its LLM does not."""
        sources = self._folders["llm"].sources.values() if "llm" in self._folders else ()
        known = [source.blocks[0].view_box[0][1] for source in sources if source.has_token_rows]
        return self._num_tokens - min(known, default=self._num_tokens)

    def fill(self, param: "torch.Tensor", spec: ParamSpec, tp_rank: int, tp: int) -> bool:
        """Fill a parameter of this rank; return whether the folder holds it.

        Values are converted to the parameter's dtype. Rows of tokens that the folder lacks become the mean of its rows,
        and rows that pad the vocabulary become zeros.
        """
        source = self._source_of(spec)
        if source is None:
            return False
        self._read_box(spec, source, param.view(spec.local_shape(tp)), _shard_box(spec, tp_rank, tp))
        return True

    def fill_range(self, values: "torch.Tensor", spec: ParamSpec, tp_rank: int, tp: int, first: int) -> bool:
        """Fill elements of this rank's flattened shard of a parameter, from `first` on, as `fill` does.

        Beside `values`, at most `MAX_ELEMENTS_PER_READ` elements are in memory.
        """
        import torch

        source = self._source_of(spec)
        if source is None:
            return False
        last = first + values.numel()
        for box, start in _slabs(_shard_box(spec, tp_rank, tp)):
            end = start + _num_elements(box)
            if end <= first or start >= last:
                continue
            slab = torch.empty([hi - lo for lo, hi in box], dtype=values.dtype)
            self._read_box(spec, source, slab, box)
            lo, hi = max(first, start), min(last, end)
            values[lo - first : hi - first].copy_(slab.view(-1)[lo - start : hi - start])
        return True

    def fill_master(
        self, master: "torch.Tensor", spec: ParamSpec, tp_rank: int, tp: int, first: int, dtype: "torch.dtype"
    ) -> bool:
        """Fill master weights: elements of this rank's flattened shard of a parameter, from `first` on.

        Return whether the folder holds the parameter, at a higher precision than `dtype`.
        """
        source = self._source_of(spec)
        if source is None or not self._has_more_bits(spec, source, str(dtype).removeprefix("torch.")):
            return False
        return self.fill_range(master, spec, tp_rank, tp, first)

    def _source_of(self, spec: ParamSpec) -> ParameterSource | None:
        """Return what a parameter is made of; None if no folder holds it."""
        folder = None if is_adapter(spec.name) else self._folders.get(_unit_of(spec))
        source = None if folder is None else folder.sources.get(spec.name)
        if source is not None:
            source.check_cover(spec.full_shape)
        return source

    def _has_more_bits(self, spec: ParamSpec, source: ParameterSource, dtype: str) -> bool:
        tensors = self._folders[_unit_of(spec)].tensors.tensors
        stored = {DTYPES[tensors[tensor].dtype] for tensor in source.tensor_shapes()}
        return max(map(_SIGNIFICANT_BITS.__getitem__, stored)) > _SIGNIFICANT_BITS[dtype]

    def _read_box(self, spec: ParamSpec, source: ParameterSource, target: "torch.Tensor", box: Box) -> None:
        """Fill `target` with a box of a parameter's full view."""
        tensors = self._folders[_unit_of(spec)].tensors
        if source.may_be_padded:
            target.zero_()
        for block in source.blocks:
            inside = _cut(block, box)
            for piece in _pieces(inside) if inside is not None else ():
                place = tuple(
                    slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(piece.view_box, box, strict=True)
                )
                region = target[place]
                part = tensors.read(piece.tensor, piece.tensor_box)
                region.copy_((part.mT if piece.is_transposed else part).reshape(region.shape))
        if source.has_token_rows:
            self._fill_new_tokens(source, tensors, target, box)

    def _fill_new_tokens(
        self, source: ParameterSource, tensors: StoredTensors, target: "torch.Tensor", box: Box
    ) -> None:
        """Fill the rows of tokens that the folder lacks, of a box of the parameter."""
        (block,) = source.blocks
        (first, stop), columns = box
        new = slice(max(first, block.view_box[0][1]) - first, min(stop, self._num_tokens) - first)
        if new.start >= new.stop:
            return
        if source.name not in self._mean_rows:
            pieces = (tensors.read(piece.tensor, piece.tensor_box) for piece in _pieces(block))
            self._mean_rows[source.name] = mean_row(pieces)
        target[new].copy_(self._mean_rows[source.name][slice(*columns)])

    def close(self) -> None:
        """Close the files of all folders."""
        for folder in self._folders.values():
            folder.tensors.close()


def open_pretrained(recipe: Recipe) -> PretrainedWeights | None:
    """Open the weights that the recipe starts from; None if it starts from random ones.

    Fetches weights of the hub that are not here yet, and reads the headers of all files. Raises ModelFolderError for
    files or tensors that do not fit.
    """
    folders = [_open(start, recipe) for start in start_folders(recipe)]
    return PretrainedWeights(folders, recipe.model.llm.vocab) if folders else None


def _open(start: StartFolder, recipe: Recipe) -> OpenFolder:
    try:
        fetch_weights(start.read().path)
        folder = with_guest_weights(start.read())  # now with what the weights say of tied embeddings
    except ModelFolderError as error:
        raise ModelFolderError(f"{start.setting}: {error}") from None
    if start.unit in (None, "llm") and folder.has_own_head and recipe.model.llm.tie_embeddings:
        raise ModelFolderError(
            f"{start.setting}: {folder.path} holds an output matrix of its own, although its config.json ties it to "
            "the embeddings, and the recipe was read before these weights were here; start again"
        )
    tensors = FolderTensors.of(folder.path)
    matched = match_tensors(folder, tensors, start.setting, start.unit_in_folder)
    if start.unit is None:
        fresh_modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in matched.fresh))
        return OpenFolder(tensors, matched.sources, tuple(folder.settings.model), fresh_modules)
    sources = {f"{start.unit}.{name.partition('.')[2]}": source for name, source in matched.sources.items()}
    projectors = {"llm": (), "generator": ("the projector of the generator's context",)}
    fresh_modules = projectors.get(start.unit, (f"the projector of {start.unit}",))
    return OpenFolder(tensors, sources, (start.unit,), fresh_modules)


def _unit_of(spec: ParamSpec) -> str:
    return spec.name.partition(".")[0]


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


def mean_row(pieces: Iterable["torch.Tensor"]) -> "torch.Tensor":
    """Return the mean over the rows of a matrix that comes in pieces (rows, width): (width,), in fp64.

    Sums in fp64 differ too little between plans to be seen after rounding.
    """
    import torch

    total: torch.Tensor | None = None
    num_rows = 0
    for piece in pieces:
        piece_sum = piece.sum(0, dtype=torch.float64)
        total = piece_sum if total is None else total + piece_sum
        num_rows += len(piece)
    assert total is not None, "a vocabulary has tokens"
    return total / num_rows
