"""A layer's seconds piece by piece: what computes, and the collectives of tensor parallelism between the pieces.

The pieces of a block are `models.shape.BLOCK_PIECES`; other layers are one. A collective that ends a piece leaves the
compute stream free until the next piece begins: that is a tensor-parallel bubble (Optimus, arXiv 2408.03505).

Where they lie: forward, behind `projection` and `down`, whose outputs are summed; backward, behind `qkv` and `up`,
whose inputs' gradients are. With sequence parallelism each of these all-reduces becomes a reduce-scatter there, and an
all-gather before the products that need whole tokens: forward behind `norm` and `norm_mlp`, backward behind `add` and
`norm_mlp` (Korthikanti et al., arXiv 2205.05198).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmtrain.costs.cost_model import PieceCost
from mmtrain.models.model_shape import BLOCK_PIECES, LayerShape

PassDirection = Literal["forward", "backward"]
NORM, QKV, ATTENTION, PROJECTION, NORM_MLP, UP, DOWN, ADD = range(len(BLOCK_PIECES))
_REDUCED: dict[PassDirection, tuple[int, ...]] = {"forward": (PROJECTION, DOWN), "backward": (QKV, UP)}
_GATHERED: dict[PassDirection, tuple[int, ...]] = {"forward": (NORM, NORM_MLP), "backward": (ADD, NORM_MLP)}
_WIDTHS = {NORM: 2, NORM_MLP: 5, ADD: 3}  # of the residual stream, read and written by norms and additions
# Kernels of `model.FORWARD_KERNELS`, as they fall on the pieces.
_KERNELS = {"vit_block": (2, 4, 5, 2, 3, 3, 2, 1), "decoder_block": (2, 3, 11, 2, 3, 5, 2, 2)}


@dataclass(frozen=True)
class BlockSeconds:
    """The seconds of one direction of a block by kind of work."""

    gemms: Sequence[float]  # of the four GEMMs with weights, in forward order
    attention: float
    elementwise: float  # of all element-wise work
    launches: float  # of starting all kernels
    kv_gather: float  # of joining keys and values where there are fewer heads than ranks; nothing runs beside it
    all_reduces: float  # of all tensor-parallel all-reduces


def block_pieces(
    layer: LayerShape, tp: int, direction: PassDirection, seconds: BlockSeconds, *, sp: bool
) -> tuple[PieceCost, ...]:
    """Divide a block's seconds among its pieces, in the order of `BLOCK_PIECES`; `sp`: with sequence parallelism."""
    compute = [0.0] * len(BLOCK_PIECES)
    for piece, gemm_s in zip((QKV, PROJECTION, UP, DOWN), seconds.gemms, strict=True):
        compute[piece] = gemm_s
    compute[ATTENTION] += seconds.attention
    compute[QKV] += seconds.kv_gather
    elements = _elements(layer, tp)
    kernels = _KERNELS[layer.kind]
    for piece in range(len(compute)):
        elementwise_s = seconds.elementwise * elements[piece] / sum(elements)
        compute[piece] += elementwise_s + seconds.launches * kernels[piece] / sum(kernels)
    collective = [0.0] * len(compute)
    ends = [*_REDUCED[direction], *(_GATHERED[direction] if sp else ())]
    for piece in ends:
        collective[piece] += seconds.all_reduces / len(ends)
    return tuple(map(PieceCost, compute, collective))


def scale_pieces(pieces: Sequence[PieceCost], total_s: float) -> tuple[PieceCost, ...]:
    """The pieces in the same proportions, `total_s` seconds together."""
    modelled = sum(map(sum, pieces))
    factor = total_s / modelled if modelled else 0.0
    return tuple(PieceCost(compute * factor, collective * factor) for compute, collective in pieces)


def _elements(layer: LayerShape, tp: int) -> list[float]:
    """Numbers that a token's element-wise work in each piece reads and writes on one of `tp` ranks."""
    rotary = 2 * (layer.heads + layer.kv_heads) * layer.head_dim if layer.causal else 0
    own = {ATTENTION: rotary / tp, UP: (3 if layer.gated else 2) * layer.ffn / tp}
    return [own.get(piece, _WIDTHS.get(piece, 0) * layer.hidden) for piece in range(len(BLOCK_PIECES))]
