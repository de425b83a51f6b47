"""How each parameter of a stage relates to the whole model: its name, its full shape, and this rank's shard of it.

Tensor parallelism splits a parameter along one dimension of its *full view* into one contiguous shard for each rank.
For most parameters the full view is the full tensor. The first linear of a gated MLP holds [gate shard; up shard] on
each rank, so its full view is (2, ffn, hidden), split along dimension 1.
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mmtrain.models.shapes.layer_shape import AVERAGE_SCALE, AVERAGE_SHIFT, OUTPUT_SCALE, PROJECTOR_KINDS
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.models.shapes.unit_shape import UnitShape
from mmtrain.models.shapes.weight_matrices import WeightMatrices

_OUTPUT_PROJECTIONS = (
    "self_attention.linear_proj.weight",
    "cross_attention.linear_proj.weight",
    ".linear_fc2.weight",
)
_LAYER_SCALES = ("self_attn_bda", "mlp_bda")
_CONVOLUTIONS = ("conv1", "conv2", "conv3")
_SLOWEST_DECAY, _FASTEST_DECAY = 0.01, 16.0  # of heads of a gated DeltaNet (arXiv 2412.06464)
_DIMS_OF_IMAGE_KERNEL = 4  # output and input channels, rows, columns
MAX_ELEMENTS_DRAWN_AT_ONCE = 2**20  # larger parameters are drawn in blocks: 9 ms of a core for a million numbers
MAX_DRAWS = 64  # blocks of a parameter; the largest power of two up to this that divides its split dimension
MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam; a shard of one is named like its parameter, with `#` and this


@dataclass(frozen=True)
class UnitRates:
    """What a unit's update has of its own."""

    lr_scale: float  # multiplies the learning rate
    weight_decay: float
    layer_decay: float = 1.0  # of the rate, from each block to the one before it
    num_blocks: int = 0  # of the unit; layer 0 is before them, and the last layer behind them
    matrices: Mapping[str, WeightMatrices] = field(default_factory=dict)  # of weights that Muon trains, by their names
    matrix_dtype: torch.dtype = torch.float32  # in which Muon moves and orthogonalizes matrices

    def lr_scale_of(self, name: str) -> float:
        """Return what multiplies the learning rate of the parameter with this plan-independent name."""
        if self.layer_decay == 1.0:
            return self.lr_scale
        layer = int(name.split(".")[2])
        return self.lr_scale * self.layer_decay ** max(self.num_blocks - layer, 0)

    def groups(self, names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
        """Return the optimizer's groups of parameters, given with their plan-independent names; none is empty.

        Norms and biases do not decay. `lr_scale` of a group multiplies the learning rate; `is_muon`: Muon trains it.
        """
        groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
        for param, name in names.items():
            weight_decay = self.weight_decay if param.ndim > 1 else 0.0
            scale, is_muon = self.lr_scale_of(name), name in self.matrices
            group = {"params": [], "weight_decay": weight_decay, "lr_scale": scale, "is_muon": is_muon}
            groups.setdefault((scale, weight_decay, is_muon), group)["params"].append(param)
        return list(groups.values())


@dataclass(frozen=True)
class NamedShard:
    """The shard of one tensor that this rank saves and counts in gradient norms.

    Tensor parallelism splits the tensor first (`spec.dim`, rank `tp_rank` of `tp`). If `flat` is given, ZeRO-1 keeps
    elements [lo, hi) of that shard, flattened. `tensor` is the live tensor, not a copy.
    """

    name: str  # the parameter's plan-independent name, with a suffix for optimizer state
    spec: ParamSpec
    tp_rank: int
    tp: int
    flat: tuple[int, int] | None
    tensor: Tensor


def stage_param_specs(stage: nn.Module, unit: str, tp: int) -> dict[str, ParamSpec]:
    """Describe every parameter of the stage; keys are the names in the module."""
    return {
        name: ParamSpec(
            f"{unit}.{name}",
            *_full_view(param, tp),
            getattr(param, "zero_centered", False),
            tp > 1 and getattr(param, "sequence_parallel", False),
        )
        for name, param in stage.named_parameters()
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
    return tuple(size * tp if i == dim else size for i, size in enumerate(shape)), dim


def tp_shard(full: Tensor, spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
    """Return the shard (a view) that rank `tp_rank` holds of a tensor in the full view."""
    assert tuple(full.shape) == spec.full_shape, f"{spec.name}: got {tuple(full.shape)}, need {spec.full_shape}"
    return full if spec.dim is None else full.chunk(tp, dim=spec.dim)[tp_rank]


class ShapedModule(Protocol):
    """A module that knows the shape of the unit it is a part of, as stages do."""

    @property
    def shape(self) -> UnitShape:
        """Return the shape of the whole unit."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the part."""


class WeightSource(Protocol):
    """Weights to start from, such as those of a pretrained model."""

    def fill(self, param: Tensor, spec: ParamSpec, tp_rank: int, tp: int) -> bool:
        """Fill this rank's shard of a parameter; return False if there are no weights for it."""

    def fill_range(self, values: Tensor, spec: ParamSpec, tp_rank: int, tp: int, first: int) -> bool:
        """Fill elements of this rank's flattened shard, from `first` on; return False as `fill` does."""

    def fill_master(
        self, master: Tensor, spec: ParamSpec, tp_rank: int, tp: int, first: int, dtype: torch.dtype
    ) -> bool:
        """Fill elements of this rank's flattened shard, from `first` on, if more is known of them than fits `dtype`."""


def initialize_parameters(
    stage: ShapedModule,
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
    is an adapter's second matrix, so that a new adapter changes nothing. Heads of a gated DeltaNet start with decays
    and biases as those of its authors. At a width of 2,500 this gives GPT-2's 0.02; a
    fixed 0.02 would make the outputs of narrow models vanish.
    """
    with torch.no_grad():
        for name, param in stage.named_parameters():
            if pretrained is not None and pretrained.fill(param, specs[name], tp_rank, tp):
                continue
            values = initial_values(specs[name], seed, num_blocks(stage), tp_rank, tp, (0, param.numel()))
            param.copy_(values.view(param.shape))


def num_blocks(stage: ShapedModule) -> int:
    """Return the number of blocks of the whole unit."""
    return sum(layer.mixer is not None and layer.kind not in PROJECTOR_KINDS for layer in stage.shape.layers)


def initial_values(
    spec: ParamSpec, seed: int, num_blocks: int, tp_rank: int, tp: int, elements: tuple[int, int]
) -> Tensor:
    """Return elements [first, last) of a rank's flattened shard of a parameter as they start, in fp32.

    See `initialize_parameters`; only what these elements need is drawn.
    """
    first, last = elements
    *_, module, kind = spec.name.split(".")
    if first == last:
        return torch.empty(0)
    if spec.starts_at_zero or kind in ("bias", AVERAGE_SHIFT) or (module, kind) == ("lora", "b"):
        return torch.zeros(last - first)
    if "norm" in module or module in _LAYER_SCALES or kind in ("step_bias", OUTPUT_SCALE, AVERAGE_SCALE):
        return torch.ones(last - first)
    if kind == "decay_log":  # uniform between 0 and `_FASTEST_DECAY`, before its logarithm is taken
        quantiles: Tensor = torch.special.ndtr(_draw(spec, 1.0, seed, tp_rank, tp, elements))
        return (_FASTEST_DECAY * quantiles).clamp(min=_SLOWEST_DECAY).log()
    return _draw(spec, _initial_std(spec, num_blocks), seed, tp_rank, tp, elements)


def _initial_std(spec: ParamSpec, num_blocks: int) -> float:
    *_, module, _ = spec.name.split(".")
    if len(spec.full_shape) == _DIMS_OF_IMAGE_KERNEL:
        fan_in = math.prod(spec.full_shape[1:])
    else:
        fan_in = spec.full_shape[1 if module in _CONVOLUTIONS else -1]
    std: float = fan_in**-0.5
    if spec.name.endswith(_OUTPUT_PROJECTIONS):
        std /= math.sqrt(2 * num_blocks)
    return std


def _draw(spec: ParamSpec, std: float, seed: int, tp_rank: int, tp: int, elements: tuple[int, int]) -> Tensor:
    """Draw elements [first, last) of a rank's flattened shard; on several threads, where torch has them."""
    dim, num_draws = spec.dim or 0, _num_draws(spec)
    step = spec.full_shape[dim] // num_draws
    pieces: dict[int, list[_Piece]] = {}
    for piece in _pieces(spec, step, tp_rank, tp, elements):
        pieces.setdefault(piece.draw, []).append(piece)
    drawn = torch.empty(elements[1] - elements[0])

    def draw(number: int) -> None:
        shape = tuple(step if i == dim else size for i, size in enumerate(spec.full_shape))
        name = spec.name if num_draws == 1 else f"{spec.name}:{number}"
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        values = torch.empty(shape).normal_(std=std, generator=generator).view(-1)
        for piece in pieces[number]:
            drawn[piece.place : piece.place + piece.size] = values[piece.start : piece.start + piece.size]

    if len(pieces) <= 1 or torch.get_num_threads() == 1:
        for number in pieces:
            draw(number)
        return drawn
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for _ in threads.map(draw, pieces):  # raises what a thread raised
            pass
    return drawn


class _Piece(NamedTuple):
    """Consecutive elements of what is drawn."""

    draw: int  # the block that they are in
    start: int  # in the flattened block
    place: int  # among the elements that are wanted
    size: int


def _pieces(spec: ParamSpec, step: int, tp_rank: int, tp: int, elements: tuple[int, int]) -> Iterator[_Piece]:
    """Yield where elements [first, last) of a rank's flattened shard lie in blocks of `step` along the split dimension.

    A block is several runs of consecutive elements of the shard, one for each index of the dimensions before.
    """
    first, last = elements
    dim = spec.dim or 0
    rows = spec.local_shape(tp)[dim]  # of the shard, along the dimension
    row_size = math.prod(spec.full_shape[dim + 1 :])
    first_row = 0 if spec.dim is None else tp_rank * rows
    for run in range(first // (rows * row_size), -(-last // (rows * row_size))):
        run_start = run * rows * row_size
        # Rows of this run that are wanted, at least in part, counted in the full view.
        lo = first_row + max(0, first - run_start) // row_size
        hi = first_row + -(-min(rows * row_size, last - run_start) // row_size)
        for draw in range(lo // step, -(-hi // step)):
            start_in_shard = run_start + (max(draw * step, first_row) - first_row) * row_size
            end_in_shard = run_start + (min((draw + 1) * step, first_row + rows) - first_row) * row_size
            start, end = max(first, start_in_shard), min(last, end_in_shard)
            in_run = start - run_start + first_row * row_size  # in this run of the full view
            yield _Piece(draw, run * step * row_size + in_run - draw * step * row_size, start - first, end - start)


def _num_draws(spec: ParamSpec) -> int:
    """Return in how many equal blocks, along the dimension that is split, a parameter is drawn: a power of two.

    It depends on the whole tensor only, so every layout draws the same numbers. One block is drawn as the whole tensor
    was before there were blocks: small models keep their weights.
    """
    if math.prod(spec.full_shape) <= MAX_ELEMENTS_DRAWN_AT_ONCE:
        return 1
    return math.gcd(spec.full_shape[spec.dim or 0], MAX_DRAWS)
