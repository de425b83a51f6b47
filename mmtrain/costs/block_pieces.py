"""The seconds of a block piece by piece: compute, and the tensor-parallel collectives between the pieces.

The pieces of a block are `BLOCK_PIECES`; any other layer is one piece. A collective at the end of a piece leaves the
compute stream free until the next piece starts: that is a tensor-parallel bubble (Optimus, arXiv 2408.03505).

In forward there is an all-reduce after `projection` and after `down`, which sums their outputs; in backward there is
one after `qkv` and after `up`, which sums the gradients of their inputs. With sequence parallelism each all-reduce
becomes a reduce-scatter at the same place, and an all-gather before the GEMMs that need all tokens: in forward after
`norm` and `norm_mlp`, in backward after `add` and `norm_mlp` (Korthikanti et al., arXiv 2205.05198).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmtrain.costs.cost_model import PieceCost
from mmtrain.costs.layer_arithmetic import head_elements
from mmtrain.models.model_shape import BLOCK_PIECES, LayerShape

PassDirection = Literal["forward", "backward"]
NORM, QKV, ATTENTION, PROJECTION, NORM_MLP, UP, DOWN, ADD = range(len(BLOCK_PIECES))
_REDUCED: dict[PassDirection, tuple[int, ...]] = {"forward": (PROJECTION, DOWN), "backward": (QKV, UP)}
_GATHERED: dict[PassDirection, tuple[int, ...]] = {"forward": (NORM, NORM_MLP), "backward": (ADD, NORM_MLP)}
_WIDTHS = {NORM: 2, NORM_MLP: 5, ADD: 3}  # of the residual stream that norms and additions read and write
# By piece, the kernels that `analytic_costs.FORWARD_KERNELS` counts for the block.
_KERNELS = {"vit_block": (1, 2, 2, 1, 2, 2, 1, 1), "decoder_block": (1, 3, 8, 1, 2, 3, 1, 1)}


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
    """Return the pieces in the same proportions, with `total_s` seconds in all."""
    current_s = sum(map(sum, pieces))
    factor = total_s / current_s if current_s else 0.0
    return tuple(PieceCost(compute * factor, collective * factor) for compute, collective in pieces)


def _elements(layer: LayerShape, tp: int) -> list[float]:
    """Return how many numbers the element-wise work of each piece moves for a token on one of `tp` ranks."""
    split = {ATTENTION: head_elements(layer) / tp, UP: (3 if layer.gated else 2) * layer.ffn / tp}
    widths = dict(_WIDTHS)
    if layer.layer_scale or layer.post_norms:
        widths[NORM_MLP] += 2
        widths[ADD] += 2
    if layer.adds_carried:
        widths[ADD] += 3
    return [split.get(piece, widths.get(piece, 0) * layer.hidden) for piece in range(len(BLOCK_PIECES))]
