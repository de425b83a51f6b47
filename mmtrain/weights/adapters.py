"""The adapters of a run, and its parameters as a checkpoint holds them, whole."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mmtrain.checkpoint import Checkpoint, ShardSpec
from mmtrain.families import ParameterSource
from mmtrain.models.shapes.layer_shape import LoraShape, adapter_parameters
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


def merge_adapter(weight: "torch.Tensor", a: "torch.Tensor", b: "torch.Tensor", scale: float) -> "torch.Tensor":
    """Return W + scale * B A in fp32, of matrices in any dtype; B may have its rows in groups, as the weight has."""
    return weight.float() + scale * (b.float() @ a.float())


def row_places(source: ParameterSource, tensor: str) -> Iterator[tuple[slice, tuple[slice, ...]]]:
    """Yield rows of a folder's tensor, and where the full view of our parameter has them: B of an adapter, too."""
    for block in source.blocks:
        if block.tensor == tensor:
            yield slice(*block.tensor_box[0]), tuple(slice(*sides) for sides in block.view_box[:-1])


def read_parameter(checkpoint: Checkpoint, name: str) -> "torch.Tensor":
    """Read a parameter in its full view, in the dtype in which it is saved."""
    return checkpoint.read(name, ShardSpec(checkpoint.full_shape(name)))
