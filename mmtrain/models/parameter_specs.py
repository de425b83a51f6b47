"""How each parameter of a stage relates to the whole model: its name, its full shape, its share on this rank.

Tensor parallelism splits a parameter along one dimension of its *full view*, into one contiguous slice a rank. For
most parameters the full view is the full tensor. A gated MLP's first linear keeps [gate shard; up shard] on each
rank, so its view is (2, ffn, hidden), split along dimension 1.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mmtrain.models.build_stage import StageModule

_OUTPUT_PROJECTIONS = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
_CONVOLUTIONS = ("conv1", "conv2")


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the whole model knows it."""

    name: str  # plan-independent, e.g. `vision.layers.3.self_attention.linear_qkv.weight`
    full_shape: tuple[int, ...]  # of the full view
    dim: int | None  # dimension of the full view that tensor parallelism splits; None: whole on every rank

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of one rank's slice of the full view; same elements in the same order as the rank's parameter."""
        return tuple(n // tp if i == self.dim else n for i, n in enumerate(self.full_shape))


def stage_param_specs(stage_module: "StageModule", unit: str, tp: int) -> dict[str, ParamSpec]:
    """Describe every parameter of the stage, by its name in the module."""
    return {
        name: ParamSpec(f"{unit}.{name}", *_full_view(param, tp)) for name, param in stage_module.named_parameters()
    }


def _full_view(param: Tensor, tp: int) -> tuple[tuple[int, ...], int | None]:
    """Return the shape of the full view and the dimension that is split."""
    shape = tuple(param.shape)
    if not getattr(param, "tensor_model_parallel", False):
        return shape, None
    dim: int = param.partition_dim  # type: ignore[attr-defined]
    stride: int = param.partition_stride  # type: ignore[attr-defined]
    if stride > 1:
        shape = (*shape[:dim], stride, shape[dim] // stride, *shape[dim + 1 :])
        dim += 1
    return tuple(n * tp if i == dim else n for i, n in enumerate(shape)), dim


def tp_shard(full: Tensor, spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
    """Return rank `tp_rank`'s slice (a view) of a tensor in the full view."""
    assert tuple(full.shape) == spec.full_shape, f"{spec.name}: got {tuple(full.shape)}, need {spec.full_shape}"
    return full if spec.dim is None else full.chunk(tp, dim=spec.dim)[tp_rank]


def join_tp_shards(shards: Sequence[Tensor], spec: ParamSpec) -> Tensor:
    """Join what all tensor-parallel ranks hold (in rank order, each in its local shape) to the full view."""
    if spec.dim is None:
        return shards[0].reshape(spec.full_shape)
    return torch.cat([s.reshape(spec.local_shape(len(shards))) for s in shards], dim=spec.dim)


def initialize_parameters(
    stage_module: "StageModule", specs: Mapping[str, ParamSpec], seed: int, tp_rank: int, tp: int
) -> None:
    """Give every parameter its initial values, the same for any mesh and any split into stages.

    Each is a slice of a full tensor drawn under the seed and the parameter's own name: weights normal with standard
    deviation 1 / sqrt(fan-in) (LeCun; for tables of vectors, 1 / sqrt(width)), divided by sqrt(2 * blocks) for
    projections into the residual stream (GPT-2), norms 1, biases 0. At a width of 2,500 that is GPT-2's 0.02; a fixed
    0.02 would silence narrow models.
    """
    num_blocks = sum(layer.heads > 0 for layer in stage_module.shape.layers)
    with torch.no_grad():
        for name, param in stage_module.named_parameters():
            spec = specs[name]
            full = _initial(spec, seed, num_blocks)
            param.copy_(tp_shard(full, spec, tp_rank, tp).reshape(param.shape))


def _initial(spec: ParamSpec, seed: int, num_blocks: int) -> Tensor:
    *_, owner, kind = spec.name.split(".")
    if kind == "bias":
        return torch.zeros(spec.full_shape)
    if "norm" in owner:
        return torch.ones(spec.full_shape)
    std = spec.full_shape[1 if owner in _CONVOLUTIONS else -1] ** -0.5
    if spec.name.endswith(_OUTPUT_PROJECTIONS):
        std /= math.sqrt(2 * num_blocks)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{spec.name}".encode()))
    return torch.empty(spec.full_shape).normal_(std=std, generator=generator)
