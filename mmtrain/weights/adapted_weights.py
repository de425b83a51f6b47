"""Start the parameters of a rank from a pretrained model with an adapter on it, in the form of `peft`."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mmtrain.errors import ModelFolderError
from mmtrain.families import ParameterSource
from mmtrain.models.shapes.layer_shape import LinearParts, is_adapter
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.recipe import Recipe
from mmtrain.weights.adapters import (
    adapted_weights,
    part_of_tensor,
    parts_of_weight,
    row_places,
    weight_of_adapter,
)
from mmtrain.weights.export_weights import source_folder
from mmtrain.weights.import_weights import PretrainedWeights, open_pretrained
from mmtrain.weights.peft_adapter import AdapterPart, PeftAdapter, open_adapter

if TYPE_CHECKING:
    import torch


class AdaptedWeights:
    """The weights of a model and an adapter on it, of which every rank reads what it keeps.

    An adapter that the run has too, with the same rank and scale, goes on. Our linears may be several of `transformers`
    (query, key and value; gate and up), whose adapters have an A each. They go on if the run has adapters on the same
    parts, or if it has one on all of the linear and the A are equal. Others are merged into their weights, in fp32, and
    adapters of the run without one in the folder start as new ones.
    """

    def __init__(self, base: PretrainedWeights, adapter: PeftAdapter, recipe: Recipe, sources: "_Sources") -> None:
        """Prepare to start a run of `recipe`; `sources` are what the model's weights are made of, by our names."""
        self.base, self._adapter, self._sources = base, adapter, sources
        self._own = adapted_weights(build_model_shape(recipe))
        self._continued = {name for name in adapter.parts if name in self._own and self._goes_on(name)}
        self._merged = adapter.parts.keys() - self._continued

    @property
    def num_continued(self) -> int:
        """Return the number of our weights whose adapter goes on."""
        return len(self._continued)

    @property
    def num_merged(self) -> int:
        """Return the number of our weights that the adapter is merged into."""
        return len(self._merged)

    @property
    def num_new_tokens(self) -> int:
        """Return the number of tokens that the model has and the folder of its LLM does not."""
        return self.base.num_new_tokens

    def fill(self, param: "torch.Tensor", spec: ParamSpec, tp_rank: int, tp: int) -> bool:
        """Fill this rank's shard of a parameter; return False for a new adapter, and for what no folder holds."""
        return self.fill_range(param.view(-1), spec, tp_rank, tp, 0)

    def fill_range(self, values: "torch.Tensor", spec: ParamSpec, tp_rank: int, tp: int, first: int) -> bool:
        """Fill elements of this rank's flattened shard of a parameter, from `first` on, as `fill` does."""
        if not self._concerns(spec):
            return self.base.fill_range(values, spec, tp_rank, tp, first)
        values.copy_(self._values(spec, tp_rank, tp, first, values.numel()))
        return True

    def fill_master(
        self, master: "torch.Tensor", spec: ParamSpec, tp_rank: int, tp: int, first: int, dtype: "torch.dtype"
    ) -> bool:
        """Fill master weights: elements of this rank's flattened shard of a parameter, from `first` on.

        Return whether the folders hold the parameter, or its sum with an adapter, at a higher precision than `dtype`.
        """
        if not self._concerns(spec):
            return self.base.fill_master(master, spec, tp_rank, tp, first, dtype)
        values = self._values(spec, tp_rank, tp, first, master.numel())
        if values.dtype == dtype:
            return False
        master.copy_(values)
        return True

    def close(self) -> None:
        """Close the files of all folders."""
        self._adapter.stored.close()
        self.base.close()

    def _concerns(self, spec: ParamSpec) -> bool:
        """Return whether the adapter decides the values of a parameter."""
        return weight_of_adapter(spec.name) in self._continued if is_adapter(spec.name) else spec.name in self._merged

    def _values(self, spec: ParamSpec, tp_rank: int, tp: int, first: int, number: int) -> "torch.Tensor":
        """Return elements of this rank's flattened shard of half an adapter, or of a weight with one merged."""
        import torch

        if spec.name.endswith(".lora.a"):
            a = self._first_halves(weight_of_adapter(spec.name))
            return _shard(a, spec, tp_rank, tp)[first : first + number]
        if is_adapter(spec.name):
            full = self._joined(spec, weight_of_adapter(spec.name), products=False)
            return _shard(full, spec, tp_rank, tp)[first : first + number]
        values = torch.empty(number)
        was_filled = self.base.fill_range(values, spec, tp_rank, tp, first)
        assert was_filled, f"{spec.name}: an adapter fits a weight that its folder lacks"
        full = self._joined(spec, spec.name, products=True)
        return values + self._adapter.scale * _shard(full, spec, tp_rank, tp)[first : first + number]

    def _joined(self, spec: ParamSpec, weight: str, *, products: bool) -> "torch.Tensor":
        """Return the full view of B of an adapter on our weight, or of the products B A of its parts."""
        import torch

        full = torch.zeros(spec.full_shape)
        for part in self._adapter.parts[weight]:
            a, b = self._adapter.read(part)
            _place(full, b.float() @ a.float() if products else b, part, self._sources[weight])
        return full

    def _goes_on(self, name: str) -> bool:
        """Return whether the adapter on a weight of ours is one that the run can go on with."""
        adapter, own = self._adapter, self._own[name]
        if own.rank != adapter.rank or not math.isclose(own.scale, adapter.scale):
            return False
        parts = parts_of_weight(own, name)
        if parts is not None:
            return self._by_part(name, parts).keys() == set(parts.adapted)
        first, *others = (adapter.read(part)[0] for part in adapter.parts[name])
        return all(first.equal(other) for other in others)

    def _first_halves(self, weight: str) -> "torch.Tensor":
        """Return A of the adapter on our weight; those of parts with adapters of their own lie below one another."""
        import torch

        parts = parts_of_weight(self._own[weight], weight)
        if parts is None:
            return self._adapter.read(self._adapter.parts[weight][0])[0]
        by_part = self._by_part(weight, parts)
        return torch.cat([self._adapter.read(by_part[name])[0] for name in parts.adapted])

    def _by_part(self, weight: str, parts: LinearParts) -> dict[str | None, AdapterPart]:
        """Return the folder's adapters on parts of our weight; the key is None for one that is on several."""
        source = self._sources[weight]
        return {
            None if part.tensor is None else part_of_tensor(source, part.tensor, parts): part
            for part in self._adapter.parts[weight]
        }


_Sources = Mapping[str, ParameterSource]


def open_adapted(recipe: Recipe) -> AdaptedWeights:
    """Open the model of `model.hf` with the adapter in the folder of `train.init_from`. Raises ModelFolderError."""
    assert recipe.train.init_from is not None
    base, folder = open_pretrained(recipe), source_folder(recipe)
    if base is None or folder is None:
        raise ModelFolderError(
            f"train.init_from: {recipe.train.init_from} holds an adapter, but model.hf names no folder of the model "
            "that all units start from and the adapter is for; name it"
        )
    sources = {source.name: source for source in folder.family.weights(folder.settings)}
    try:
        adapter = open_adapter(recipe.train.init_from, sources.values())
    except ModelFolderError as error:
        raise ModelFolderError(f"train.init_from: {error}") from None
    return AdaptedWeights(base, adapter, recipe, sources)


def _place(full: "torch.Tensor", matrix: "torch.Tensor", part: AdapterPart, source: ParameterSource) -> None:
    """Copy the rows of a matrix of the folder's model to where our parameter's full view has them."""
    if part.tensor is None:
        full.copy_(matrix.reshape(full.shape))
        return
    for rows, place in row_places(source, part.tensor):
        full[place] = matrix[rows].reshape(full[place].shape)


def _shard(full: "torch.Tensor", spec: ParamSpec, tp_rank: int, tp: int) -> "torch.Tensor":
    """Return the flattened shard that a rank holds of a tensor in the full view."""
    shard = full if spec.dim is None else full.chunk(tp, spec.dim)[tp_rank]
    return shard.reshape(-1)
