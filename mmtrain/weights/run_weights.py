"""Start the parameters of a rank from the checkpoint of another run, whatever plan and adapters that run had."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mmtrain.checkpoint import Checkpoint, ShardSpec
from mmtrain.models.shapes.freezing import all_parameter_names
from mmtrain.models.shapes.layer_shape import LoraShape, is_adapter
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.recipe import Recipe
from mmtrain.weights.adapters import (
    adapted_weights,
    adapter_names,
    memberships_of,
    merge_adapter,
    parts_of_weight,
    weight_of_adapter,
)
from mmtrain.weights.import_weights import MAX_ELEMENTS_PER_READ, mean_row

if TYPE_CHECKING:
    import torch

_OPTIMIZER_MARK = "#"  # between the name of a parameter and that of its optimizer state


class RunWeights:
    """The weights of a checkpoint, of which every rank reads what it keeps.

    An adapter that both runs have, with the same rank and scale, goes on. Others of the source are merged into their
    weights, and others of the new run start as new ones. The new run may have more tokens: their weights start as the
    mean of the others.
    """

    def __init__(self, checkpoint: Checkpoint, source: Recipe, recipe: Recipe) -> None:
        """Prepare to start a run of `recipe` from a checkpoint of a run of `source`."""
        self.checkpoint = checkpoint
        shape = build_model_shape(recipe)
        saved, own = adapted_weights(build_model_shape(source)), adapted_weights(shape)
        self._continued = {
            weight
            for weight, lora in own.items()
            if weight in saved and _form(lora, weight) == _form(saved[weight], weight)
        }
        self._merged = {weight: lora for weight, lora in saved.items() if weight not in self._continued}
        self._expected = {name for name in all_parameter_names(shape.units, recipe) if not is_adapter(name)}
        self._known = {name for name in checkpoint.names() if _OPTIMIZER_MARK not in name and not is_adapter(name)}
        self._misshaped: list[str] = []
        self._token_matrices = shape.token_matrices.keys()
        self._num_known_tokens, self._num_tokens = source.model.llm.vocab, recipe.model.llm.vocab
        self._mean_rows: dict[str, torch.Tensor] = {}  # by parameter

    @property
    def num_merged(self) -> int:
        """Return the number of adapters of the source that are merged into their weights."""
        return len(self._merged)

    @property
    def num_new_tokens(self) -> int:
        """Return the number of tokens that the new run has and the source does not."""
        return self._num_tokens - self._num_known_tokens

    @property
    def differing_names(self) -> list[str]:
        """Return a line for each parameter that only one of the two runs has."""
        missing = [f"{name}: missing there" for name in sorted(self._expected - self._known)]
        return missing + [f"{name}: not a parameter of this model" for name in sorted(self._known - self._expected)]

    @property
    def misshaped(self) -> list[str]:
        """Return a line for each parameter of this rank that has another shape there; they were not filled."""
        return self._misshaped

    def fill(self, param: "torch.Tensor", spec: ParamSpec, tp_rank: int, tp: int) -> bool:
        """Fill this rank's shard of a parameter; return False for a new adapter, and for what does not fit."""
        return self.fill_range(param.view(-1), spec, tp_rank, tp, 0)

    def fill_range(self, values: "torch.Tensor", spec: ParamSpec, tp_rank: int, tp: int, first: int) -> bool:
        """Fill elements of this rank's flattened shard of a parameter, from `first` on, as `fill` does."""
        if not self._holds(spec.name):
            return False
        misfit = self._misfit(spec)
        if misfit is not None:
            self._misshaped.append(f"{spec.name}: {misfit}")
            return False
        values.copy_(self._values(spec, tp_rank, tp).reshape(-1)[first : first + values.numel()])
        return True

    def fill_master(
        self, master: "torch.Tensor", spec: ParamSpec, tp_rank: int, tp: int, first: int, dtype: "torch.dtype"
    ) -> bool:
        """Fill master weights: elements of this rank's flattened shard of a parameter, from `first` on.

        Return whether the checkpoint holds the parameter in another type than `dtype`, which is less precise.
        """
        if not self._holds(spec.name) or self._misfit(spec) is not None:
            return False
        values = self._values(spec, tp_rank, tp)
        if values.dtype == dtype:
            return False
        master.copy_(values.reshape(-1)[first : first + master.numel()])
        return True

    def _holds(self, name: str) -> bool:
        """Return whether this run takes a parameter from the checkpoint."""
        return weight_of_adapter(name) in self._continued if is_adapter(name) else name in self._known

    def _misfit(self, spec: ParamSpec) -> str | None:
        """Say how the shape of a parameter differs in the checkpoint; None if it fits, or its rows can be added to."""
        saved_shape, own_shape = self.checkpoint.full_shape(spec.name), spec.full_shape
        if spec.name in self._token_matrices and saved_shape[1:] == own_shape[1:]:
            if self.num_new_tokens >= 0:
                return None
            return f"has rows for {self._num_known_tokens} tokens there, for {self._num_tokens} here"
        if saved_shape == own_shape:
            return None
        return f"has the shape {list(saved_shape)} there, {list(own_shape)} here"

    def _values(self, spec: ParamSpec, tp_rank: int, tp: int) -> "torch.Tensor":
        """Return the values of a rank's shard of the full view, with an adapter merged if it does not go on."""
        values = self._read(spec, tp_rank, tp)
        if spec.name not in self._merged:
            return values
        lora = self._merged[spec.name]
        a, b = (self._read(half, tp_rank, tp) for half in _halves(spec, lora))
        of_parts = memberships_of(lora, spec.name, spec.full_shape[:-1])
        if of_parts is not None and spec.dim is not None:
            of_parts = of_parts.chunk(tp, spec.dim)[tp_rank]  # only outputs of joint linears are split
        return merge_adapter(values, a, b, lora, of_parts)

    def close(self) -> None:
        """Close the files of the checkpoint."""
        self.checkpoint.close()

    def _read(self, spec: ParamSpec, tp_rank: int, tp: int) -> "torch.Tensor":
        """Read the shard of the full view that a rank holds."""
        if spec.name in self._token_matrices and self.num_new_tokens:
            rows = spec.full_shape[0] // (1 if spec.dim is None else tp)
            first = 0 if spec.dim is None else tp_rank * rows
            return self._read_token_rows(spec.name, first, first + rows)
        if spec.dim is None:
            return self.checkpoint.read(spec.name, ShardSpec(spec.full_shape))
        rows = spec.full_shape[spec.dim] // tp
        shard = ShardSpec(spec.full_shape, spec.dim, tp_rank * rows, (tp_rank + 1) * rows)
        return self.checkpoint.read(spec.name, shard)

    def _read_token_rows(self, name: str, first: int, stop: int) -> "torch.Tensor":
        """Read rows of a matrix that has fewer in the checkpoint: then come those of new tokens, then padding."""
        import torch

        known_stop = min(stop, self._num_known_tokens)
        pieces = [self._read_known_rows(name, first, known_stop)] if first < known_stop else []
        if name not in self._mean_rows:
            self._mean_rows[name] = mean_row(self._all_known_rows(name))
        mean = self._mean_rows[name]
        num_new = max(0, min(stop, self._num_tokens) - max(first, self._num_known_tokens))
        num_padding = max(0, stop - max(first, self._num_tokens))
        dtype = self._read_known_rows(name, 0, 1).dtype
        pieces += [mean.to(dtype).expand(num_new, -1), mean.new_zeros((num_padding, len(mean)), dtype=dtype)]
        return torch.cat(pieces)

    def _all_known_rows(self, name: str) -> Iterator["torch.Tensor"]:
        step = max(1, MAX_ELEMENTS_PER_READ // self.checkpoint.full_shape(name)[1])
        for first in range(0, self._num_known_tokens, step):
            yield self._read_known_rows(name, first, min(first + step, self._num_known_tokens))

    def _read_known_rows(self, name: str, first: int, stop: int) -> "torch.Tensor":
        return self.checkpoint.read(name, ShardSpec(self.checkpoint.full_shape(name), 0, first, stop))


def _form(lora: LoraShape, weight: str) -> tuple[object, ...]:
    """Return what two runs must share for an adapter on a weight to go on."""
    return lora.rank, lora.scale, parts_of_weight(lora, weight)


def _halves(weight: ParamSpec, lora: LoraShape) -> tuple[ParamSpec, ParamSpec]:
    """Describe both matrices of the adapter on a weight, split as the weight is: A on inputs, or B on outputs."""
    *outputs, inputs = weight.full_shape
    splits_inputs = weight.dim == len(outputs)
    a, b = adapter_names(weight.name)
    parts = parts_of_weight(lora, weight.name)
    width = lora.rank * (1 if parts is None else len(parts.adapted))
    return (
        ParamSpec(a, (width, inputs), 1 if splits_inputs else None),
        ParamSpec(b, (*outputs, lora.rank), None if splits_inputs else weight.dim),
    )
