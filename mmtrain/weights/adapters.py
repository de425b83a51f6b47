"""The adapters of a run, and its parameters as a checkpoint holds them, whole."""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from mmtrain.checkpoint import Checkpoint, ShardSpec
from mmtrain.families import ParameterSource
from mmtrain.models.shapes.layer_shape import LinearParts, LoraShape, adapter_parameters
from mmtrain.models.shapes.model_shape import ModelShape

if TYPE_CHECKING:
    import torch


def adapted_weights(shape: ModelShape) -> dict[str, LoraShape]:
    """Return the adapter of each weight that has one, by the weight's plan-independent name."""
    return {
        f"{unit.name}.layers.{index}.{linear}.weight": layer.lora
        for unit in shape.units
        for index, layer in enumerate(unit.layers)
        if layer.lora is not None
        for linear in layer.lora.linears
    }


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the plan-independent names of the two matrices of the adapter on a weight."""
    return adapter_parameters(weight.removesuffix(".weight"))


def weight_of_adapter(parameter: str) -> str:
    """Return the plan-independent name of the weight that a matrix of an adapter belongs to."""
    return f"{parameter.rpartition('.lora.')[0]}.weight"


def merge_adapter(
    weight: "torch.Tensor", a: "torch.Tensor", b: "torch.Tensor", lora: LoraShape, of_parts: "torch.Tensor | None"
) -> "torch.Tensor":
    """Return W + scale * B A in fp32, of matrices in any dtype; B may have its rows in groups, as the weight has.

    of_parts: what `memberships_of` returns, cut as the weight is.
    """
    second = b.float()
    if of_parts is not None:
        second = (of_parts.unsqueeze(-1) * second.unsqueeze(-2)).flatten(start_dim=-2)
    return (second @ a.float()).mul_(lora.scale).add_(weight)  # one matrix in fp32 in memory, and not three


def parts_of_weight(lora: LoraShape, weight: str) -> LinearParts | None:
    """Return the parts of the linear whose weight this is, by its plan-independent name, as `LoraShape.parts_of`."""
    linear = weight.split(".layers.", 1)[1].partition(".")[2].removesuffix(".weight")
    return lora.parts_of(linear)


def part_of_tensor(source: ParameterSource, tensor: str, parts: LinearParts) -> str | None:
    """Return the part of a joint linear that a folder's tensor is; None if it has rows of several.

    source: what the linear's weight is made of.
    """
    outputs = source.view_shape()[:-1]
    part_of_rows = parts.part_of_rows(math.prod(outputs))
    found: set[str] = set()
    for _, place in row_places(source, tensor):
        (*leading, rows), width = place, outputs[-1]
        for index in product(*(range(axis.start, axis.stop) for axis in leading)):
            first = sum(i * math.prod(outputs[axis + 1 :]) for axis, i in enumerate(index))
            assert first % width == 0, "rows lie in the last of the outputs' dimensions"
            found.update(part_of_rows[first + rows.start : first + rows.stop])
    return found.pop() if len(found) == 1 else None


def memberships_of(lora: LoraShape, weight: str, outputs: Sequence[int]) -> "torch.Tensor | None":
    """Return (*outputs, adapted parts): 1 where an output of the full view belongs to a part, else 0.

    None for a weight whose adapter is on all of it.
    """
    import torch

    parts = parts_of_weight(lora, weight)
    if parts is None:
        return None
    return torch.tensor(parts.memberships(math.prod(outputs))).view(*outputs, -1)


def row_places(source: ParameterSource, tensor: str) -> Iterator[tuple[slice, tuple[slice, ...]]]:
    """Yield rows of a folder's tensor, and where the full view of our parameter has them: B of an adapter, too."""
    for block in source.blocks:
        if block.tensor == tensor:
            yield slice(*block.tensor_box[0]), tuple(slice(*sides) for sides in block.view_box[:-1])


def read_parameter(checkpoint: Checkpoint, name: str) -> "torch.Tensor":
    """Read a parameter in its full view, in the dtype in which it is saved."""
    return checkpoint.read(name, ShardSpec(checkpoint.full_shape(name)))
