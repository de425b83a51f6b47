"""The seconds of a block piece by piece: compute, and the tensor-parallel collectives between the pieces.

The pieces of a block are `BLOCK_PIECES`; any other layer is one piece. A collective at the end of a piece leaves the
compute stream free until the next piece starts: that is a tensor-parallel bubble (Optimus, arXiv 2408.03505). It is
shorter than the collective by what the collective takes from the rank itself: `overlap_slowdown`.

In forward there is an all-reduce after `projection` and after `down`, which sums their outputs; in backward there is
one after `qkv` and after `up`, which sums the gradients of their inputs. With sequence parallelism each all-reduce
becomes a reduce-scatter at the same place, and an all-gather before the GEMMs that need all tokens: in forward after
`norm` and `norm_mlp`, in backward after `add` and `norm_mlp` (Korthikanti et al., arXiv 2205.05198).

In chunks of tokens (`models.megatron.chunked_gemms`) a GEMM hides most of its collective: all of them but the gathers
and reductions of the first and the last chunk. A pass that stops at a collective communicates all tokens at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmtrain.costs.block_arithmetic import LayerInputArithmetic, mixer_arithmetic, mlp_arithmetic
from mmtrain.costs.collectives import CollectiveKind, GroupLayout
from mmtrain.costs.cost_model import CostModel, PassDirection, PieceCost, TokenSplit
from mmtrain.models.shapes.layer_shape import LAYER_INPUT_LINEARS
from mmtrain.models.shapes.model_shape import BLOCK_PIECES, LayerShape

NORM, QKV, ATTENTION, PROJECTION, NORM_MLP, UP, DOWN, ADD = range(len(BLOCK_PIECES))
_REDUCED: dict[PassDirection, tuple[int, ...]] = {"forward": (PROJECTION, DOWN), "backward": (QKV, UP)}
_GATHERED: dict[PassDirection, tuple[int, ...]] = {"forward": (NORM, NORM_MLP), "backward": (ADD, NORM_MLP)}
_WIDTHS = {NORM: 2, NORM_MLP: 5, ADD: 3}  # of the residual stream that norms and additions read and write
# Of a mixture, behind the others, those of its router, and of a shared expert's linears and its gate.
_GEMM_PIECES = (QKV, PROJECTION, UP, DOWN, UP, UP, DOWN, UP)
# By piece, the kernels that `analytic_costs.FORWARD_KERNELS` counts for the block.
_KERNELS = {"vit_block": (1, 2, 2, 1, 2, 2, 1, 1), "decoder_block": (1, 3, 8, 1, 2, 3, 1, 1)}


@dataclass(frozen=True)
class BlockSeconds:
    """The seconds of one direction of a block by kind of work."""

    gemms: Sequence[float]  # of GEMMs with weights, in the order of `_GEMM_PIECES`, of which only mixtures have all
    attention: float
    elementwise: float  # of all element-wise work
    launches: float  # of starting all kernels
    kv_gather: float  # of joining keys and values where there are fewer heads than ranks; nothing runs beside it


class ComputeBeside(NamedTuple):
    """The compute around a collective of a block that can run beside it unless the pass stops there."""

    gemm_s: float = 0.0  # of the GEMM that makes what is reduced, or reads what is gathered
    chunk_s: float = 0.0  # of one of its chunks of tokens; as `gemm_s` where there are no chunks
    # Of the GEMM of the weight's gradient, which runs beside all of the collective. Where there is one, no chunks are
    # made: most of the collective is hidden without.
    after_s: float = 0.0

    def scaled(self, factor: float) -> "ComputeBeside":
        """Return the compute at so many times its seconds."""
        return ComputeBeside(*(factor * seconds for seconds in self))


@dataclass(frozen=True)
class PieceCollective:
    """The tensor-parallel collective at the end of a piece."""

    kind: CollectiveKind
    seconds: float  # of all tokens at once
    slowdown: float  # share of the seconds that compute beside it loses
    beside: ComputeBeside
    chunks: int
    chunk_seconds: float  # of one chunk of the tokens; as `seconds` where there are no chunks

    @property
    def lengthening_s(self) -> float:
        """By how much it lengthens a pass that goes on behind the piece."""
        return self.seconds - self.hidden_s

    @property
    def hidden_s(self) -> float:
        """What a pass that goes on behind the piece saves of GEMM and collective one after the other.

        Chunk by chunk, the longer of the two streams runs through, and waits only for one chunk of the other. Smaller
        GEMMs and smaller collectives take longer together, so that little or less than nothing may be saved.
        """
        gemm_s, chunk_s, after_s = self.beside
        if self.chunks == 1:
            return (1 - self.slowdown) * min(self.seconds, after_s)
        collective_s = self.chunks * self.chunk_seconds
        compute_s = self.chunks * chunk_s
        end_s = max(compute_s + self.chunk_seconds, chunk_s + collective_s, compute_s + after_s)
        together_s = compute_s + after_s + collective_s - end_s
        return self.seconds + gemm_s + after_s - end_s - self.slowdown * together_s

    def cost(self, compute_s: float) -> PieceCost:
        """Return the cost of a piece that computes so long and ends with this collective."""
        taken_s = self.slowdown * self.seconds
        return PieceCost(compute_s + taken_s, self.seconds - taken_s, self.hidden_s)


def collective_kinds(direction: PassDirection, *, sp: bool) -> dict[int, CollectiveKind]:
    """Return the collectives behind pieces of a block, by piece; `sp`: with sequence parallelism."""
    reduced: CollectiveKind = "reduce_scatter" if sp else "all_reduce"
    gathered = _GATHERED[direction] if sp else ()
    return dict.fromkeys(_REDUCED[direction], reduced) | dict.fromkeys(gathered, "all_gather")


def piece_collectives(
    costs: CostModel,
    nbytes: int,
    tp: int,
    direction: PassDirection,
    beside: Mapping[int, ComputeBeside],
    split: TokenSplit,
) -> dict[int, PieceCollective]:
    """Return the collectives that follow pieces of a block in its tensor-parallel group.

    nbytes: of the hidden states. beside: by piece, the compute beside the collective that follows it.
    """
    group, collectives = GroupLayout(tp), {}
    for piece, kind in collective_kinds(direction, sp=split.sp).items():
        chunks = 1 if beside[piece].after_s else split.chunks
        chunk_bytes = -(-nbytes // chunks)
        collectives[piece] = PieceCollective(
            kind,
            costs.collective(kind, nbytes, group),
            costs.overlap_slowdown(kind, chunk_bytes, group),
            beside[piece],
            chunks,
            costs.collective(kind, chunk_bytes, group),
        )
    return collectives


def pieces_of(compute: Sequence[float], collectives: Mapping[int, PieceCollective]) -> tuple[PieceCost, ...]:
    """Return the costs of pieces from what each computes and the collectives that follow some of them."""
    return tuple(
        collectives[piece].cost(compute_s) if piece in collectives else PieceCost(compute_s, 0.0)
        for piece, compute_s in enumerate(compute)
    )


def piece_compute(layer: LayerShape, tp: int, direction: PassDirection, seconds: BlockSeconds) -> list[float]:
    """Divide what a block computes among its pieces, in the order of `BLOCK_PIECES`."""
    compute = [0.0] * len(BLOCK_PIECES)
    num_of_parts = len(seconds.gemms) - (len(LAYER_INPUT_LINEARS) if layer.layer_input else 0)
    for piece, gemm_s in zip(_GEMM_PIECES, seconds.gemms[:num_of_parts], strict=False):
        compute[piece] += gemm_s
    compute[ADD] += sum(seconds.gemms[num_of_parts:])
    compute[ATTENTION] += seconds.attention
    compute[QKV] += seconds.kv_gather
    elements = _elements(layer, tp)
    kernels = _KERNELS[layer.kind]
    for piece in range(len(compute)):
        elementwise_s = seconds.elementwise * elements[piece] / sum(elements)
        compute[piece] += elementwise_s + seconds.launches * kernels[piece] / sum(kernels)
    return compute


def scale_pieces(pieces: Sequence[PieceCost], total_s: float) -> tuple[PieceCost, ...]:
    """Return the pieces in the same proportions, with `total_s` seconds in all."""
    current_s = sum(piece.total_s for piece in pieces)
    factor = total_s / current_s if current_s else 0.0
    return tuple(PieceCost(*(seconds * factor for seconds in piece)) for piece in pieces)


def _elements(layer: LayerShape, tp: int) -> list[float]:
    """Return how many numbers the element-wise work of each piece moves for a token on one of `tp` ranks."""
    mixer, mlp = mixer_arithmetic(layer), mlp_arithmetic(layer)
    split = {ATTENTION: mixer.elementwise_width / tp, UP: mlp.elementwise_width / tp}
    widths: dict[int, float] = dict(_WIDTHS)
    if layer.layer_scale or layer.post_norms:
        widths[NORM_MLP] += 2
        widths[ADD] += 2
    if layer.adds_carried:
        widths[ADD] += 3
    if layer.output_scale:
        widths[ADD] += 2
    if layer.layer_input:
        widths[ADD] += LayerInputArithmetic(layer).elementwise_width / layer.hidden
    return [split.get(piece, widths.get(piece, 0) * layer.hidden) for piece in range(len(BLOCK_PIECES))]
