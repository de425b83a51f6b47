"""How each parameter of a stage relates to the whole model: its name, its full shape, and this rank's shard of it.

Tensor parallelism splits a parameter along one dimension of its *full view* into one contiguous shard for each rank.
For most parameters the full view is the full tensor. The first linear of a gated MLP holds [gate shard; up shard] on
each rank, so its full view is (2, ffn, hidden), split along dimension 1.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mmtrain.models.stage_module import StageModule

_OUTPUT_PROJECTIONS = (
    "self_attention.linear_proj.weight",
    "cross_attention.linear_proj.weight",
    "mlp.linear_fc2.weight",
)
_LAYER_SCALES = ("self_attn_bda", "mlp_bda")
_CONVOLUTIONS = ("conv1", "conv2")
_DIMS_OF_IMAGE_KERNEL = 4  # output and input channels, rows, columns
MAX_ELEMENTS_DRAWN_AT_ONCE = 2**20  # larger parameters are drawn in blocks: 9 ms of a core for a million numbers
MAX_DRAWS = 64  # blocks of a parameter; the largest power of two up to this that divides its split dimension


@dataclass(frozen=True)
class ParamSpec:
    """A parameter from the view of the whole model."""

    name: str  # plan-independent, e.g. `vision.layers.3.self_attention.linear_qkv.weight`
    full_shape: tuple[int, ...]  # of the full view
    dim: int | None  # dimension of the full view that tensor parallelism splits; None: every rank holds all of it

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape of one rank's shard of the full view; elements in the order of the rank's parameter."""
        return tuple(size // tp if i == self.dim else size for i, size in enumerate(self.full_shape))


def stage_param_specs(stage: StageModule, unit: str, tp: int) -> dict[str, ParamSpec]:
    """Describe every parameter of the stage; keys are the names in the module."""
    return {name: ParamSpec(f"{unit}.{name}", *_full_view(param, tp)) for name, param in stage.named_parameters()}


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
    return tuple(size * tp if i == dim else size for i, size in enumerate(shape)), dim


def tp_shard(full: Tensor, spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
    """Return the shard (a view) that rank `tp_rank` holds of a tensor in the full view."""
    assert tuple(full.shape) == spec.full_shape, f"{spec.name}: got {tuple(full.shape)}, need {spec.full_shape}"
    return full if spec.dim is None else full.chunk(tp, dim=spec.dim)[tp_rank]


def join_tp_shards(shards: Sequence[Tensor], spec: ParamSpec) -> Tensor:
    """Join the shards of all tensor-parallel ranks, in rank order, into the full view."""
    if spec.dim is None:
        return shards[0].reshape(spec.full_shape)
    return torch.cat([shard.reshape(spec.local_shape(len(shards))) for shard in shards], dim=spec.dim)


class WeightSource(Protocol):
    """Weights to start from, such as those of a pretrained model."""

    def fill(self, param: Tensor, spec: ParamSpec, tp_rank: int, tp: int) -> bool:
        """Fill this rank's shard of a parameter; return False if there are no weights for it."""

    def fill_master(
        self, master: Tensor, spec: ParamSpec, tp_rank: int, tp: int, first: int, dtype: torch.dtype
    ) -> bool:
        """Fill elements of this rank's flattened shard, from `first` on, if more is known of them than fits `dtype`."""


def initialize_parameters(
    stage: StageModule,
    specs: Mapping[str, ParamSpec],
    seed: int,
    tp_rank: int,
    tp: int,
    pretrained: WeightSource | None = None,
) -> None:
    """Set every parameter to its initial values, which are the same for any mesh and any split into stages.

    Parameters that `pretrained` has no weights for are drawn under the seed and the parameter's name, large ones block
    by block, so that a rank draws its own shard and not the whole tensor. Weights are normal with standard deviation
    1 / sqrt(fan-in) (LeCun; for embedding tables 1 / sqrt(width)), divided by sqrt(2 * blocks) for projections into the
    residual stream (GPT-2). Norms and layer scales are 1; biases and the weights of zero-centered norms are 0, and so
    is an adapter's second matrix, so that a new adapter changes nothing. At a width of 2,500 this gives GPT-2's 0.02; a
    fixed 0.02 would make the outputs of narrow models vanish.
    """
    num_blocks = sum(layer.heads > 0 for layer in stage.shape.layers)
    with torch.no_grad():
        for name, param in stage.named_parameters():
            spec = specs[name]
            if pretrained is not None and pretrained.fill(param, spec, tp_rank, tp):
                continue
            if getattr(param, "zero_centered", False):
                param.zero_()
            else:
                param.copy_(_initial_shard(spec, seed, num_blocks, tp_rank, tp).reshape(param.shape))


def _initial_shard(spec: ParamSpec, seed: int, num_blocks: int, tp_rank: int, tp: int) -> Tensor:
    *_, module, kind = spec.name.split(".")
    if kind == "bias" or (module, kind) == ("lora", "b"):
        return torch.zeros(spec.local_shape(tp))
    if "norm" in module or module in _LAYER_SCALES:
        return torch.ones(spec.local_shape(tp))
    if len(spec.full_shape) == _DIMS_OF_IMAGE_KERNEL:
        fan_in = math.prod(spec.full_shape[1:])
    else:
        fan_in = spec.full_shape[1 if module in _CONVOLUTIONS else -1]
    std = fan_in**-0.5
    if spec.name.endswith(_OUTPUT_PROJECTIONS):
        std /= math.sqrt(2 * num_blocks)
    return _draw_shard(spec, std, seed, tp_rank, tp)


def _draw_shard(spec: ParamSpec, std: float, seed: int, tp_rank: int, tp: int) -> Tensor:
    """Draw rank `tp_rank`'s shard of the full view, in fp32; on several threads, where torch has them."""
    dim = spec.dim or 0
    length = spec.full_shape[dim]
    lo, hi = (0, length) if spec.dim is None else (tp_rank * length // tp, (tp_rank + 1) * length // tp)
    num_draws = _num_draws(spec)
    step = length // num_draws
    shard = torch.empty(spec.local_shape(tp))

    def draw(number: int) -> None:
        shape = tuple(step if i == dim else size for i, size in enumerate(spec.full_shape))
        name = spec.name if num_draws == 1 else f"{spec.name}:{number}"
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        values = torch.empty(shape).normal_(std=std, generator=generator)
        first, end = max(lo, number * step), min(hi, (number + 1) * step)
        shard.narrow(dim, first - lo, end - first).copy_(values.narrow(dim, first - number * step, end - first))

    numbers = range(lo // step, -(-hi // step))
    if len(numbers) == 1 or torch.get_num_threads() == 1:
        for number in numbers:
            draw(number)
        return shard
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for _ in threads.map(draw, numbers):  # raises what a thread raised
            pass
    return shard


def _num_draws(spec: ParamSpec) -> int:
    """Return in how many equal blocks, along the dimension that is split, a parameter is drawn: a power of two.

    It depends on the whole tensor only, so every layout draws the same numbers. One block is drawn as the whole tensor
    was before there were blocks: small models keep their weights.
    """
    if math.prod(spec.full_shape) <= MAX_ELEMENTS_DRAWN_AT_ONCE:
        return 1
    return math.gcd(spec.full_shape[spec.dim or 0], MAX_DRAWS)
