"""What a layer costs in arithmetic and bytes, from its shape alone.

Conventions, the same for every figure mmtrain prints:

* A matrix product (m, k) x (k, n) is 2mnk FLOPs; nothing but matrix products counts.
* Attention over packed sequences is block-diagonal: a sequence of n tokens has n^2 query-key pairs, under a causal
  mask the n (n + 1) / 2 that are not masked. (torch's FLOP counter counts n^2 in both cases.)
* Backward: a product with a weight costs one forward for the weight's gradient and one for its input's; the two
  products inside attention have two inputs each and cost twice their forward.
* Gradients nobody needs are not counted: a frozen weight has no weight part, and a layer below which nothing trains
  has no input part for the product that reads the layer's input. (Blocks and head normalise their input first;
  that norm trains with the layer and needs the input part anyway.)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mmtrain.costs import generator_arithmetic as diffusion
from mmtrain.costs.cost_model import TokenLoad
from mmtrain.models.model_shape import LayerShape, ModelShape, UnitShape

_INDEX_BYTES = 8
READS_INPUT_RAW = (
    "patch_embed",
    "audio_embed",
    "projector",
    "context_projector",
)  # no trainable norm between the layer's input and its first product


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product (m, k) x (k, n) of activations with a weight."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """FLOPs of the product."""
        return 2 * self.m * self.n * self.k


def gemms(layer: LayerShape, load: TokenLoad, tp: int = 1) -> tuple[Gemm, ...]:
    """Products with weights that one of `tp` ranks computes in forward, in order; attention's own are apart."""
    t, h = load.tokens, layer.hidden
    match layer.kind:
        case "patch_embed":
            return (Gemm(t - layer.extra_tokens * load.num_sequences, h, layer.patch_features),)
        case "audio_embed":
            return (Gemm(2 * t, h, 3 * layer.mel_bins), Gemm(t, h, 3 * h))
        case "vit_block" | "decoder_block":
            inner = layer.heads * layer.head_dim
            qkv = inner + 2 * layer.kv_heads * layer.head_dim
            fc1 = layer.ffn * (2 if layer.gated else 1)
            return (
                Gemm(t, qkv // tp, h),
                Gemm(t, h, inner // tp),
                Gemm(t, fc1 // tp, h),
                Gemm(t, h, layer.ffn // tp),
            )
        case "projector":
            rows = feature_rows(layer, load)
            return (Gemm(rows, layer.ffn // tp, h * layer.joins), Gemm(rows, layer.out, layer.ffn // tp))
        case "embedding":
            return ()
        case "head":
            return (Gemm(t, layer.vocab // tp, h),)
        case _:
            return tuple(Gemm(*sides) for sides in diffusion.gemm_sides(layer, load, tp))


def feature_rows(layer: LayerShape, load: TokenLoad) -> int:
    """Rows a projector hands on: class tokens dropped, tokens joined."""
    return (load.tokens - layer.extra_tokens * load.num_sequences) // layer.joins


def attention_flops(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Forward FLOPs of the two products inside attention: scores, and their sum over values."""
    pairs = (load.sum_sq + load.tokens) // 2 if layer.causal else diffusion.query_key_pairs(layer, load)
    return 4 * pairs * layer.heads * layer.head_dim // tp


def forward_flops(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """FLOPs one of `tp` ranks spends on the forward of `layer`."""
    return sum(g.flops for g in gemms(layer, load, tp)) + attention_flops(layer, load, tp)


def backward_flops(layer: LayerShape, load: TokenLoad, tp: int = 1, *, weight_grad: bool, input_grad: bool) -> int:
    """FLOPs one of `tp` ranks spends on the backward of `layer`, without recomputing its forward."""
    passes = backward_passes(layer, load, tp, weight_grad=weight_grad, input_grad=input_grad)
    attention = 2 * attention_flops(layer, load, tp) if weight_grad or input_grad else 0
    return attention + sum(g.flops * times for g, times in passes)


def backward_passes(
    layer: LayerShape, load: TokenLoad, tp: int = 1, *, weight_grad: bool, input_grad: bool
) -> tuple[tuple[Gemm, int], ...]:
    """Each forward product with how often backward repeats its size: 0, 1 or 2 times."""
    if not weight_grad and not input_grad:
        return ()
    forward = gemms(layer, load, tp)
    without = diffusion.num_gemms_without_input_grad(layer)  # first products whose input needs no gradient
    if not input_grad and layer.kind in READS_INPUT_RAW:
        without = max(without, 1)
    if not weight_grad and without:
        return ()
    return tuple((g, int(weight_grad) + int(i >= without)) for i, g in enumerate(forward))


def num_parameters(layer: LayerShape, tp: int = 1) -> int:
    """Learned numbers of `layer` that one of `tp` ranks holds.

    A tied head counts its matrix; who holds embedding and head on one rank counts it once (see `memory`).
    """
    h, norm = layer.hidden, layer.hidden * (1 if layer.rms_norm else 2)
    bias = int(layer.linear_bias)
    extra = sum(2 * width for width in layer.norm_widths)
    match layer.kind:
        case "patch_embed":
            positions = (layer.position_rows + layer.extra_tokens) * h
            return layer.patch_features * h + bias * h + positions + extra
        case "audio_embed":
            return 3 * (layer.mel_bins + h) * h + 2 * bias * h + layer.position_rows * h
        case "vit_block" | "decoder_block":
            inner, kv = layer.heads * layer.head_dim, 2 * layer.kv_heads * layer.head_dim
            fc1 = layer.ffn * (2 if layer.gated else 1)
            split = (inner + kv) * (h + int(layer.qkv_bias)) + inner * h + fc1 * (h + bias) + layer.ffn * h
            return split // tp + 2 * norm + 2 * bias * h
        case "projector":
            width = h * layer.joins
            return layer.ffn * (width + bias + layer.out) // tp + bias * layer.out + extra
        case "embedding":
            return layer.vocab * h // tp
        case "head":
            return layer.vocab * h // tp + norm
        case _:
            return diffusion.num_parameters(layer, tp)


def activation_bytes(layer: LayerShape, load: TokenLoad, element_bytes: int, tp: int = 1) -> int:
    """Bytes one of `tp` ranks keeps from forward to backward of `layer` when nothing is recomputed.

    Counted as autograd saves them: inputs of norms and products, what RMSNorm normalised, queries, keys and values
    before and after rotation, attention's output apart and joined, both sides of activations. Attention keeps no
    scores. The loss keeps its softmax in fp32.
    """
    t, h = load.tokens, layer.hidden
    normalised = h if layer.rms_norm else 0
    match layer.kind:
        case "patch_embed":
            return t * (element_bytes * (layer.patch_features + sum(layer.norm_widths)) + 4 * _INDEX_BYTES)
        case "audio_embed":
            # What both convolutions read, three frames side by side, and what their activations read.
            return t * (element_bytes * (2 * 3 * layer.mel_bins + 2 * h + 3 * h + h) + _INDEX_BYTES)
        case "vit_block" | "decoder_block":
            inner, kv = layer.heads * layer.head_dim, 2 * layer.kv_heads * layer.head_dim
            rotated = inner + kv // 2 if layer.causal else 0
            tables = layer.head_dim if layer.causal else 0
            statistics = 4 * (4 + layer.heads // tp)  # of two norms and of each head's softmax, in fp32
            # Gated: gate and up together, then the gate, its SiLU and the product; else the two sides of GELU.
            mlp = layer.ffn * (5 if layer.gated else 2)
            gathered = (tp - 1) * (inner + kv) if layer.kv_heads < tp else 0  # keys and values of all ranks
            split = (inner + kv) + gathered + rotated + 2 * inner + mlp
            return t * (element_bytes * (4 * h + 2 * normalised + tables + split // tp) + statistics)
        case "projector":
            rows, joined = feature_rows(layer, load), h * layer.joins
            inputs = t * h + rows * joined * max(1, len(layer.norm_widths))
            return element_bytes * (inputs + rows * 2 * layer.ffn // tp) + 2 * _INDEX_BYTES * t
        case "embedding":
            return _INDEX_BYTES * t
        case "head":
            return t * (element_bytes * (2 * h + normalised) + 4 * layer.vocab // tp + 2 * _INDEX_BYTES)
        case _:
            return element_bytes * diffusion.saved_elements(layer, load, tp)


def weight_grad_bytes(layer: LayerShape, load: TokenLoad, element_bytes: int, tp: int = 1) -> int:
    """How much less of `activation_bytes` a rank keeps of a frozen layer: only gradients of weights need it.

    Inputs of products, and what RMSNorm normalised; those that something else reads as well stay.
    """
    h, normalised = layer.hidden, layer.hidden if layer.rms_norm else 0
    match layer.kind:
        case "vit_block" | "decoder_block":
            width = 2 * h + 2 * normalised + layer.ffn // tp
        case "head":
            width = h + normalised
        case _:
            width = 0
    return load.tokens * width * element_bytes


def sequence_parallel_savings(
    layer: LayerShape, load: TokenLoad, element_bytes: int, tp: int, recompute: bool = False
) -> int:
    """How much less of `activation_bytes` (if recomputed: of `input_bytes`) a rank keeps with sequence parallelism.

    Inputs and outputs of norms are then a slice of the tokens on each rank (Korthikanti et al., arXiv 2205.05198).
    """
    h, normalised = layer.hidden, layer.hidden if layer.rms_norm else 0
    widths = {"vit_block": 4 * h + 2 * normalised, "decoder_block": 4 * h + 2 * normalised, "head": 2 * h + normalised}
    width = widths.get(layer.kind, 0)
    whole = load.tokens * (min(h, width) if recompute else width) * element_bytes
    return whole - whole // tp


def elementwise_elements(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Numbers one of `tp` ranks reads and writes in the element-wise work of a forward: norms, activations, residuals.

    Products account for their own operands (see `AnalyticCosts`).
    """
    t, h = load.tokens, layer.hidden
    match layer.kind:
        case "patch_embed":
            return 4 * t * h
        case "audio_embed":
            return t * (12 * layer.mel_bins + 14 * h)
        case "vit_block" | "decoder_block":
            rotary = 2 * (layer.heads + layer.kv_heads) * layer.head_dim if layer.causal else 0
            return t * (10 * h + ((3 if layer.gated else 2) * layer.ffn + rotary) // tp)
        case "projector":
            return 3 * t * h + 2 * feature_rows(layer, load) * layer.ffn // tp
        case "embedding":
            return 2 * t * h
        case "head":
            return t * (2 * h + 8 * layer.vocab // tp)
        case _:
            return diffusion.elementwise_elements(layer, load, tp)


def input_bytes(layer: LayerShape, load: TokenLoad, element_bytes: int) -> int:
    """Bytes of the input of `layer`: what remains of its activations when all else is recomputed."""
    match layer.kind:
        case "patch_embed":
            return load.tokens * layer.patch_features * element_bytes
        case "audio_embed":
            return 2 * load.tokens * layer.mel_bins * element_bytes
        case "embedding":
            return load.tokens * _INDEX_BYTES
        case _:
            return diffusion.input_rows(layer, load) * layer.hidden * element_bytes


def context_parallel_load(load: TokenLoad, cp: int) -> TokenLoad:
    """What each of `cp` context-parallel ranks works on: an even share of the tokens, and of the query-key pairs.

    Ranks take a sequence's pieces in pairs from both its ends, so that a causal mask leaves all of them as many pairs
    (Liu et al., arXiv 2310.01889, as balanced in Megatron-core). All other costs follow from the share's tokens.
    """
    return TokenLoad(-(-load.tokens // cp), -(-load.sum_sq // cp), -(-load.max_len // cp), load.num_sequences)


def context_bytes(layer: LayerShape, share: TokenLoad, element_bytes: int, tp: int, cp: int) -> int:
    """Bytes of keys and values that a context-parallel rank receives in a forward: those of all other ranks."""
    return (cp - 1) * share.tokens * 2 * layer.kv_heads * layer.head_dim // tp * element_bytes


def input_grad_needed(shape: ModelShape) -> dict[str, tuple[bool, ...]]:
    """For every unit and layer: must the layer's backward hand on a gradient (does anything below it train)?"""
    return {unit.name: tuple(_upstream(shape, unit)) for unit in shape.units}


def _upstream(shape: ModelShape, unit: UnitShape) -> Iterator[bool]:
    entering = [e.layer for e in shape.edges if e.dst == unit.name and _trains(shape, shape.unit(e.src))]
    first = unit.first_trainable
    for i in range(len(unit.layers)):
        below = first is not None and first < i
        yield below or any(layer <= i for layer in entering)


def _trains(shape: ModelShape, unit: UnitShape) -> bool:
    """Whether anything trains in the unit or in those that feed it."""
    sources = (shape.unit(e.src) for e in shape.edges if e.dst == unit.name)
    return unit.first_trainable is not None or any(_trains(shape, source) for source in sources)


def model_flops(shape: ModelShape, loads: Mapping[str, TokenLoad]) -> int:
    """FLOPs that MFU counts for a global batch: forward and every gradient needed, unpadded, nothing recomputed.

    loads: per unit, the sum of all its microbatches' loads.
    """
    needs = input_grad_needed(shape)
    return sum(unit_flops(u.layers, loads[u.name], needs[u.name]) for u in shape.units if u.name in loads)


def unit_flops(layers: Sequence[LayerShape], load: TokenLoad, input_grad: Sequence[bool]) -> int:
    """Forward and backward FLOPs of consecutive layers."""
    return sum(
        forward_flops(layer, load) + backward_flops(layer, load, weight_grad=layer.trainable, input_grad=needed)
        for layer, needed in zip(layers, input_grad, strict=True)
    )
