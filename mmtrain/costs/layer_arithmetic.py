"""Arithmetic and bytes of a layer, from its shape alone.

All figures that mmtrain prints follow these conventions:

* A GEMM (m, k) x (k, n) is 2mnk FLOPs; nothing but matrix products counts.
* Attention over packed sequences is block-diagonal: a sequence of n tokens has n^2 query-key pairs, under a causal
  mask the n (n + 1) / 2 that are not masked, in a sliding window fewer. (torch's FLOP counter counts n^2 always.)
* Backward: a GEMM with a weight costs one forward for the weight's gradient and one for its input's; the two products
  inside attention have two inputs each and cost twice their forward.
* Gradients that are not needed are not counted: a frozen weight has no weight gradient, and in a layer below which
  nothing trains the GEMM that reads the layer's input has no input gradient. (Blocks and head normalize their input
  first; that norm trains with the layer and needs the input gradient anyway.)
* Gradients of norms and biases do not count, nor does a layer of which nothing else trains as trained.
* Adapters (LoRA) are GEMMs of their own beside those of the layer: see `adapter_gemms`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest

from mmtrain.costs import audio_arithmetic as audio
from mmtrain.costs import generator_arithmetic as diffusion
from mmtrain.costs import merger_arithmetic as merger
from mmtrain.costs import resampler_arithmetic as resampler
from mmtrain.costs.block_arithmetic import LayerInputArithmetic, fp32_norm_bytes, mixer_arithmetic, mlp_arithmetic
from mmtrain.costs.cost_model import TokenLoad
from mmtrain.costs.expert_spread import evenly_loaded
from mmtrain.costs.part_records import FP32_BYTES, INDEX_BYTES, Gemm
from mmtrain.models.shapes.layer_shape import Attention, MoeMlp, block_linears, is_of_expert
from mmtrain.models.shapes.model_shape import (
    BLOCK_KINDS,
    LayerShape,
    LossSizes,
    ModelShape,
    UnitShape,
    adaptable_linears,
)

# Kinds of layers without a trainable norm between their input and their first GEMM.
READS_INPUT_RAW = ("patch_embed", "audio_embed", "projector", "resampler", "merger", "context_projector")


def gemms(layer: LayerShape, load: TokenLoad, tp: int = 1) -> tuple[Gemm, ...]:
    """Return the GEMMs with weights that one of `tp` ranks computes in forward, in order.

    The two products inside attention are not among them, see `attention_flops`.
    """
    t, h = load.tokens, layer.hidden
    match layer.kind:
        case "patch_embed":
            return (Gemm(t - layer.extra_tokens * load.num_sequences, h, layer.media.patch_features),)
        case "audio_embed":
            return audio.gemms(layer, t)
        case "vit_block" | "decoder_block":
            of_parts = (*mixer_arithmetic(layer).gemms(t, tp), *mlp_arithmetic(layer).gemms(t, tp))
            return (*of_parts, *LayerInputArithmetic(layer).gemms(t))
        case "projector":
            rows, width = feature_rows(layer, load), merged_width(layer)
            merge = (Gemm(rows, h, joined_width(layer) // tp),) * layer.projector.merge_linear
            if layer.mlp is None:
                return (Gemm(rows, layer.out, width // tp), *merge)
            num_projectors, ffn = 1 + layer.carried_in, layer.dense_mlp.ffn // tp
            first, second = Gemm(rows, ffn, width), Gemm(rows, layer.out, ffn)
            return (*(first,) * num_projectors, *(second,) * num_projectors, *merge)
        case "resampler":
            return resampler.gemms(layer, load, tp)
        case "merger":
            return merger.gemms(layer, feature_rows(layer, load), tp)
        case "embedding":
            return LayerInputArithmetic(layer).gemms(t)
        case "head":
            return (Gemm(load.num_targets, layer.vocab // tp, h),)
        case _:
            return tuple(Gemm(*sides) for sides in diffusion.gemm_sides(layer, load, tp))


def adapter_gemms(layer: LayerShape, load: TokenLoad, tp: int = 1) -> tuple[tuple[Gemm, ...], ...]:
    """Return for each of the layer's `gemms` the two of its adapter, with A and with B; () if it has none.

    All experts of a layer have one, or none has. Parts of a linear with adapters of their own are computed together,
    with all their features between A and B: the second GEMM takes zeros for those of other parts.
    """
    lora = layer.lora
    if lora is None:
        return ((),) * len(gemms(layer, load, tp))
    return tuple(
        (replace(gemm, n=lora.width(linear)), replace(gemm, k=lora.width(linear))) if linear in lora.linears else ()
        for linear, gemm in zip_longest(gemm_linears(layer), gemms(layer, load, tp))
    )


def gemm_linears(layer: LayerShape) -> tuple[str, ...]:
    """Return the names of the linears that compute the first of the layer's `gemms`; only these may have an adapter."""
    if layer.kind in BLOCK_KINDS:
        assert layer.mixer is not None, "blocks have a mixer"
        return (*layer.mixer.linears, *mlp_arithmetic(layer).linears)
    return adaptable_linears(layer)


def adapter_flops(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Return the FLOPs one of `tp` ranks spends on the adapters in forward; backward needs twice as many."""
    if layer.lora is None:
        return 0
    return sum(gemm.flops for pair in adapter_gemms(layer, load, tp) for gemm in pair)


def needed_gradients(layer: LayerShape, input_grad: bool) -> tuple[bool, bool]:
    """Return whether backward computes the gradients of the layer's own matrices, and those of its GEMMs' inputs.

    Adapters, norms and biases need the latter also if nothing below the layer trains: their gradients come through the
    layer's matrices.
    """
    trains_matrices = _trains_matrices(layer)
    return trains_matrices, input_grad or (layer.trainable and not trains_matrices)


def _trains_matrices(layer: LayerShape) -> bool:
    """Return whether more of the layer's own weights train than norms and biases, which cost next to nothing."""
    if not layer.frozen or not layer.trains_weights:
        return layer.trains_weights
    linears = block_linears(layer) if layer.kind in BLOCK_KINDS else adaptable_linears(layer)
    return not linears or any(f"{linear}.weight" not in layer.frozen for linear in linears)


def feature_rows(layer: LayerShape, load: TokenLoad) -> int:
    """Return the number of rows that leave a projector: class tokens are dropped, and tokens joined or resampled."""
    if layer.kind == "resampler":
        return resampler.num_features(layer, load)
    return (load.tokens - layer.extra_tokens * load.num_sequences) // layer.projector.joins


def joined_width(layer: LayerShape) -> int:
    """Return the features of a row of merged tokens."""
    return layer.hidden if layer.projector.pools else layer.hidden * layer.projector.joins


def merged_width(layer: LayerShape) -> int:
    """Return the features of a row that a projector's first linear reads, behind that which merges tokens."""
    return layer.hidden if layer.projector.merge_linear else joined_width(layer)


def _projector_ffn(layer: LayerShape) -> int:
    """Return the inner width of a projector; 0 if it is one linear."""
    return 0 if layer.mlp is None else layer.dense_mlp.ffn


def attention_flops(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Return the forward FLOPs of a mixer's products without weights; in attention, of scores and of their sums."""
    return 0 if layer.mixer is None else mixer_arithmetic(layer).flops(load, tp)


def forward_flops(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Return the FLOPs one of `tp` ranks spends on the forward of `layer`."""
    layer_flops = sum(gemm.flops for gemm in gemms(layer, load, tp))
    return layer_flops + attention_flops(layer, load, tp) + adapter_flops(layer, load, tp)


def backward_flops(layer: LayerShape, load: TokenLoad, tp: int = 1, *, weight_grad: bool, input_grad: bool) -> int:
    """Return the FLOPs one of `tp` ranks spends on the backward of `layer`, without recomputing its forward."""
    passes = backward_passes(layer, load, tp, weight_grad=weight_grad, input_grad=input_grad)
    attention = 2 * attention_flops(layer, load, tp) if weight_grad or input_grad else 0
    return attention + 2 * adapter_flops(layer, load, tp) + sum(gemm.flops * times for gemm, times in passes)


def backward_passes(
    layer: LayerShape, load: TokenLoad, tp: int = 1, *, weight_grad: bool, input_grad: bool
) -> tuple[tuple[Gemm, int], ...]:
    """Return each forward GEMM with how often backward computes one of its size: 0, 1 or 2 times."""
    if not weight_grad and not input_grad:
        return ()
    num_without = diffusion.num_gemms_without_input_grad(layer)  # the first GEMMs, whose input needs no gradient
    if not input_grad and layer.kind in READS_INPUT_RAW:
        num_without = max(num_without, 1)  # projectors for DeepStack have norms, which train with them
    if not weight_grad and num_without:
        return ()
    forward = gemms(layer, load, tp)
    return tuple((gemm, int(weight_grad) + int(i >= num_without)) for i, gemm in enumerate(forward))


def num_parameters(layer: LayerShape, tp: int = 1) -> int:
    """Return the number of parameters of `layer`, adapters included, that one of `tp` ranks holds.

    A tied head counts its matrix; `rank_memory` counts it once where embedding and head are on one rank.
    """
    return _num_weights(layer, tp) + _num_adapter_parameters(layer, tp)


def num_trained_parameters(layer: LayerShape, tp: int = 1) -> int:
    """Return how many parameters of `layer` train, of those that one of `tp` ranks holds.

    If any of the layer's own matrices trains, all of its parameters count but those of experts, which count one by one;
    if any of its norms and biases does, all of these.
    """
    if layer.queries and "table.weight" in layer.frozen:
        return layer.queries * layer.hidden
    if _trains_matrices(layer):
        held, trained = _expert_parameters(layer, tp)
        return num_parameters(layer, tp) - held + trained
    num_in_matrices = sum(gemm.num_weights for gemm in gemms(layer, TokenLoad(0, 0, 0, 0), tp))
    num_in_vectors = _num_weights(layer, tp) - num_in_matrices if layer.trains_weights else 0
    return num_in_vectors + _num_adapter_parameters(layer, tp)


def num_apart_parameters(layer: LayerShape, tp: int = 1) -> int:
    """Return how many of `num_trained_parameters` belong to experts of which each replica of a group holds others.

    Only every `ep`-th replica holds the same ones, and reduces their gradients. None where replicas hold all experts.
    """
    if not isinstance(layer.mlp, MoeMlp) or layer.mlp.ep == 1:
        return 0
    in_weights = _expert_parameters(layer, tp)[1] if _trains_matrices(layer) else 0
    return in_weights + _num_adapter_parameters(layer, tp, of_experts_only=True)


def num_held_apart(layer: LayerShape, tp: int = 1) -> int:
    """Return how many of `num_parameters` belong to experts of which each replica of a group holds others."""
    if not isinstance(layer.mlp, MoeMlp) or layer.mlp.ep == 1:
        return 0
    return _expert_parameters(layer, tp)[0]


@lru_cache(maxsize=1 << 10)
def _expert_parameters(layer: LayerShape, tp: int) -> tuple[int, int]:
    """Return the parameters of the experts that a rank holds, and those that train on the rank where most do."""
    mlp = layer.mlp
    if not isinstance(mlp, MoeMlp):
        return 0, 0
    sizes = [width * layer.hidden // tp for width in (mlp.first_width, mlp.expert_ffn)]
    held = mlp.held_experts * sum(sizes)
    if not layer.frozen:
        return held, held
    names = [name for name in mlp.linears if is_of_expert(name)]
    trained = [
        size if f"{name}.weight" not in layer.frozen else 0
        for name, size in zip(names, sizes * mlp.experts, strict=True)
    ]
    num_names = len(sizes) * mlp.held_experts
    return held, max(sum(trained[first : first + num_names]) for first in range(0, len(trained), num_names))


def _num_adapter_parameters(layer: LayerShape, tp: int, *, of_experts_only: bool = False) -> int:
    if layer.lora is None:
        return 0
    linears, pairs = gemm_linears(layer), adapter_gemms(layer, TokenLoad(0, 0, 0, 0), tp)
    return sum(
        pair[0].num_weights + pair[1].num_weights * layer.lora.rank // layer.lora.width(linear)
        for linear, pair in zip(linears, pairs, strict=False)  # other GEMMs have no adapters
        if pair and (not of_experts_only or is_of_expert(linear))
    )


@lru_cache(maxsize=1 << 12)  # the planner asks for the parameters of layers very often
def _num_weights(layer: LayerShape, tp: int) -> int:
    h, norm = layer.hidden, layer.hidden * (1 if layer.rms_norm else 2)
    bias = int(layer.linear_bias)
    extra = sum(width * (1 if layer.rms_norm else 2) for width in layer.norm_widths)
    extra += h * int(layer.projector.layer_post_norm)
    match layer.kind:
        case "patch_embed":
            positions = (layer.media.position_rows + layer.extra_tokens) * h
            return layer.media.patch_features * h + bias * h + positions + extra
        case "audio_embed":
            return audio.num_parameters(layer)
        case "vit_block" | "decoder_block":
            mixer, mlp = mixer_arithmetic(layer).num_parameters(), mlp_arithmetic(layer).num_parameters()
            whole = num_norms(layer) * norm + 2 * int(layer.layer_scale) * h + mixer.whole + mlp.whole
            whole += int(layer.output_scale) + LayerInputArithmetic(layer).num_parameters().whole
            return (mixer.divided + mlp.divided) // tp + whole
        case "projector":
            width, whole = merged_width(layer), extra + int(layer.projector.newline) * layer.out
            whole += 2 * int(layer.projector.standardizes) * h - int(layer.projector.plain_norm) * width
            whole += int(layer.projector.merge_linear) * h * joined_width(layer) // tp
            if layer.mlp is None:
                return width * layer.out // tp + bias * layer.out + whole
            whole += layer.carried_in * width * (1 if layer.rms_norm else 2)
            of_each = layer.dense_mlp.ffn * (width + bias + layer.out) // tp + bias * layer.out
            return of_each * (1 + layer.carried_in) + whole
        case "resampler":
            return resampler.num_parameters(layer, tp) + extra
        case "merger":
            return merger.num_parameters(layer, tp) + extra + int(layer.projector.newline) * layer.out
        case "embedding":
            of_blocks = LayerInputArithmetic(layer).num_parameters()
            return (layer.vocab * h + of_blocks.divided) // tp + layer.queries * h + of_blocks.whole
        case "head":
            return layer.vocab * h // tp + norm
        case _:
            return diffusion.num_parameters(layer, tp)


def rotary_table_bytes(layer: LayerShape, load: TokenLoad, element_bytes: int) -> int:
    """Return the bytes of cosines and sines that rotate a microbatch's heads, which blocks of a stage share."""
    mixer = layer.mixer
    rotates = isinstance(mixer, Attention) and mixer.rotates
    return load.tokens * layer.attention.head_dim * element_bytes if rotates else 0


def _layer_activation_bytes(
    layer: LayerShape, load: TokenLoad, element_bytes: int, tp: int = 1, sorts_sequences: bool = False
) -> int:
    """Return the bytes one of `tp` ranks keeps from forward to backward of `layer` when nothing is recomputed.

    This counts what autograd saves: inputs of norms and GEMMs, queries, keys and values, attention's output, inputs and
    outputs of activations. Attention keeps no scores. The head keeps the logits of tokens with a target, or gradients:
    see `loss_sizes`.
    """
    t, h = load.tokens, layer.hidden
    match layer.kind:
        case "patch_embed":
            # At most: the places and the weights of neighbors in a grid of positions, which are interpolated.
            numbers = layer.media.patch_features + sum(layer.norm_widths)
            in_fp32 = layer.media.position_neighbors * (INDEX_BYTES + FP32_BYTES) + 2 * FP32_BYTES * len(
                layer.norm_widths
            )
            return t * (element_bytes * numbers + in_fp32)
        case "audio_embed":
            return t * (element_bytes * audio.saved_width(layer) + INDEX_BYTES)
        case "vit_block" | "decoder_block":
            mixer = mixer_arithmetic(layer).saved(load, element_bytes, tp, sorts_sequences)
            mlp = mlp_arithmetic(layer).saved()
            # Inputs and outputs of two norms, what norms over outputs read, and what layer scales multiply.
            whole = 4 * h + 2 * h * int(layer.post_norms) + 2 * h * int(layer.layer_scale)
            numbers = whole + mixer.on_rank + mlp.on_rank + (mixer.divided + mlp.divided) // tp
            in_fp32 = fp32_norm_bytes(layer, element_bytes, num_norms(layer) * h) + 4 * FP32_BYTES  # of two norms
            of_input = LayerInputArithmetic(layer).saved_bytes(element_bytes)
            return t * (element_bytes * numbers + in_fp32 + mixer.fixed_bytes + mlp.fixed_bytes + of_input)
        case "projector":
            rows, joined = feature_rows(layer, load), merged_width(layer)
            reads_averages = layer.projector.plain_norm and len(layer.norm_widths) == 1  # no norm reads tokens
            of_norm = rows * joined if reads_averages else t * h
            inputs = rows * joined * max(1, len(layer.norm_widths)) + (of_norm if layer.norm_widths else 0)
            inputs += int(layer.projector.merge_linear) * rows * joined_width(layer)
            # Of each projector for an earlier block: the input of its norm, and that of its first linear.
            inputs += layer.carried_in * rows * joined * 2
            inner = rows * 2 * _projector_ffn(layer) // tp * (1 + layer.carried_in)
            statistics = 2 * FP32_BYTES * t  # of its norms
            return element_bytes * (inputs + inner) + statistics + 2 * INDEX_BYTES * t * (1 + layer.carried_in)
        case "resampler":
            return resampler.saved_bytes(layer, load, element_bytes, tp, sorts_sequences)
        case "merger":
            return merger.saved_bytes(layer, load, feature_rows(layer, load), element_bytes, tp)
        case "embedding":
            # The table of blocks' inputs reads the ids once more.
            of_blocks = LayerInputArithmetic(layer).saved_bytes(element_bytes)
            return t * (INDEX_BYTES * (1 + (layer.layer_input > 0)) + of_blocks)
        case "head":
            sizes = loss_sizes(layer, load, element_bytes, tp)
            rows = load.num_targets * (2 * INDEX_BYTES + fp32_norm_bytes(layer, element_bytes, h))
            if sizes.uses_chunks:  # the norm keeps its input, and the loss no output of the norm
                return rows + load.num_targets * element_bytes * h + sizes.kept_bytes
            in_fp32 = (3 + layer.caps_logits) * FP32_BYTES
            return rows + load.num_targets * (element_bytes * 2 * h + in_fp32) + sizes.logits_bytes
        case _:
            return element_bytes * diffusion.saved_elements(layer, load, tp)


def loss_sizes(layer: LayerShape, load: TokenLoad, element_bytes: int, tp: int = 1) -> LossSizes:
    """Return the sizes of a head's loss on one of `tp` ranks, which say whether it is computed by chunks of tokens.

    By chunks, forward computes the gradients too, and keeps them instead of logits.
    """
    return LossSizes(load.num_targets, layer.vocab // tp, layer.hidden, element_bytes, _trains_matrices(layer))


def num_norms(layer: LayerShape) -> int:
    """Return how many norms a block has over the width of the residual stream."""
    return 4 if layer.post_norms else 2


def activation_bytes(
    layer: LayerShape, load: TokenLoad, element_bytes: int, tp: int = 1, sorts_sequences: bool = False
) -> int:
    """Return the bytes that one of `tp` ranks keeps between forward and backward of `layer`, with every gradient.

    sorts_sequences: whether attention does, see `joins_attention_output`.
    """
    of_layer = _layer_activation_bytes(layer, load, element_bytes, tp, sorts_sequences)
    return of_layer + adapter_bytes(layer, load, element_bytes, tp)


def adapter_bytes(layer: LayerShape, load: TokenLoad, element_bytes: int, tp: int = 1) -> int:
    """Return the part of `activation_bytes` that adapters keep beside the inputs of their linears: what A computes."""
    return sum(pair[0].m * pair[0].n for pair in adapter_gemms(layer, load, tp) if pair) * element_bytes


def weight_grad_bytes(
    layer: LayerShape, load: TokenLoad, element_bytes: int, tp: int = 1, joins_output: bool = False
) -> int:
    """Return the part of `activation_bytes` that only gradients of weights need, so that a frozen layer drops it.

    It consists of the inputs of GEMMs, unless something else reads them too, such as the adapter of the GEMM's weight.

    joins_output: see `joins_attention_output`.
    """
    h, rows = layer.hidden, load.tokens
    match layer.kind:
        case "vit_block" | "decoder_block":
            read_by = mixer_arithmetic(layer).read_by_weight_gradients(tp, joins_output)
            read_by |= mlp_arithmetic(layer).read_by_weight_gradients(tp)
            adapted = () if layer.lora is None else layer.lora.linears
            width = sum(inputs for module, inputs in read_by.items() if module not in adapted)
            width += 2 * h * int(layer.layer_scale)
        case "head":
            width, rows = h, load.num_targets
            if loss_sizes(layer, load, element_bytes, tp).uses_chunks:
                width = 0  # forward has used it
        case _:
            width = 0
    return rows * width * element_bytes


def sequence_parallel_savings(
    layer: LayerShape, load: TokenLoad, element_bytes: int, tp: int, recompute: bool = False
) -> int:
    """Return how many bytes sequence parallelism saves of `activation_bytes` (of `input_bytes` with recompute).

    With it each rank keeps a slice of the tokens of norms' inputs and outputs (Korthikanti et al., arXiv 2205.05198).
    """
    h = layer.hidden
    of_block = 4 * h + (2 * h if layer.layer_scale or layer.post_norms else 0)
    of_block += (2 * h + 3 * layer.layer_input) * (layer.layer_input > 0)
    widths = {"vit_block": of_block, "decoder_block": of_block, "head": h}
    width = widths.get(layer.kind, 0)
    whole = load.tokens * (min(h, width) if recompute else width) * element_bytes
    if layer.kind == "head" and not recompute:
        # Ranks normalize their slices of all tokens, and only then select those with a target, for which all compute
        # the loss.
        return load.num_targets * width * element_bytes - whole // tp
    return whole - whole // tp


def elementwise_elements(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Return how many numbers the element-wise work of a forward moves on one of `tp` ranks.

    Element-wise work is norms, activations and residuals. The operands of GEMMs are not included (see `AnalyticCosts`),
    nor are copies of rows for experts (see `expert_costs.copied_elements`).
    """
    t, h = load.tokens, layer.hidden
    match layer.kind:
        case "patch_embed":
            return layer.media.position_neighbors * t * h
        case "audio_embed":
            return t * audio.elementwise_width(layer)
        case "vit_block" | "decoder_block":
            divided = mixer_arithmetic(layer).elementwise_width + mlp_arithmetic(layer).elementwise_width
            residual = 10 * h + (4 * h if layer.layer_scale or layer.post_norms else 0)
            residual += 3 * h * int(layer.adds_carried) + 2 * h * int(layer.output_scale)
            residual += LayerInputArithmetic(layer).elementwise_width
            return t * (residual + divided // tp)
        case "projector":
            joins = 2 * feature_rows(layer, load) * layer.out_width if layer.carried_in else 0
            of_each = (3 + layer.projector.merge_linear) * t * h
            of_each += 2 * feature_rows(layer, load) * _projector_ffn(layer) // tp
            return of_each * (1 + layer.carried_in) + joins
        case "resampler":
            return resampler.elementwise_elements(layer, load, tp)
        case "merger":
            return merger.elementwise_elements(layer, load, feature_rows(layer, load), tp)
        case "embedding":
            return t * (2 * layer.out_width + LayerInputArithmetic(layer).elementwise_width)
        case "head":
            return load.num_targets * 2 * h + softmax_elements(layer, load, tp)
        case _:
            return diffusion.elementwise_elements(layer, load, tp)


def softmax_elements(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Return how many numbers the softmax of a head's logits moves in forward."""
    return load.num_targets * ((8 + 2 * layer.caps_logits) * layer.vocab // tp)


def activation_function_elements(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Return how many numbers the activation function of a block's MLP moves in forward."""
    return load.tokens * mlp_arithmetic(layer).elementwise_width // tp


def activation_output_bytes(layer: LayerShape, load: TokenLoad, element_bytes: int, tp: int = 1) -> int:
    """Return the bytes of what the activation function of a block's MLP makes."""
    return load.tokens * (mlp_arithmetic(layer).inner_width // tp) * element_bytes


def input_bytes(layer: LayerShape, load: TokenLoad, element_bytes: int) -> int:
    """Return the bytes of the input of `layer`: what remains of its activations when all others are recomputed.

    A layer that reads a step's data keeps nothing: it reads that again, which stays until the step ends.
    """
    if layer.kind in ("patch_embed", "audio_embed", "embedding"):
        return 0
    return diffusion.input_rows(layer, load) * layer.hidden * element_bytes


def payload_bytes(layer: LayerShape, load: TokenLoad) -> int:
    """Return the bytes of a microbatch's data that the layer reads: pixels as bytes, frames in fp32, ids, or labels."""
    match layer.kind:
        case "patch_embed":
            return load.tokens * layer.media.patch_features
        case "audio_embed":
            return layer.media.frames_per_token * load.tokens * layer.media.mel_bins * FP32_BYTES
        case "embedding":
            return load.tokens * INDEX_BYTES
        case "head":  # with the places and the sources of targets
            return (load.tokens + 2 * load.num_targets) * INDEX_BYTES
        case _:
            return 0


def context_parallel_load(load: TokenLoad, cp: int) -> TokenLoad:
    """Return the load of each of `cp` ranks that share every sequence: an even part of tokens and query-key pairs.

    All ranks have equally many pairs. Each has some heads of all tokens (DeepSpeed Ulysses, arXiv 2309.14509), or two
    pieces of a sequence at the same distance from its two ends (Ring Attention, arXiv 2310.01889, with a causal mask
    balanced as in Megatron-core). All other costs follow from the share's tokens.
    """
    tokens, targets = -(-load.tokens // cp), None if load.targets is None else -(-load.targets // cp)
    return TokenLoad(tokens, -(-load.sum_sq // cp), -(-load.max_len // cp), load.num_sequences, targets, tokens)


def input_grad_needed(shape: ModelShape) -> dict[str, tuple[bool, ...]]:
    """Return for every unit, by layer, whether backward needs the gradient of its input: something below it trains."""
    return {unit.name: tuple(_upstream(shape, unit)) for unit in shape.units}


def _upstream(shape: ModelShape, unit: UnitShape) -> Iterator[bool]:
    entering = [e.layer for e in shape.edges if e.dst == unit.name and _trains(shape, shape.unit(e.src))]
    first = unit.first_trainable
    for i in range(len(unit.layers)):
        below = first is not None and first < i
        yield below or any(layer <= i for layer in entering)


def _trains(shape: ModelShape, unit: UnitShape) -> bool:
    """Return whether anything trains in the unit or in those that feed it."""
    sources = (shape.unit(e.src) for e in shape.edges if e.dst == unit.name)
    return unit.first_trainable is not None or any(_trains(shape, source) for source in sources)


def model_flops(shape: ModelShape, loads: Mapping[str, TokenLoad]) -> int:
    """Return the FLOPs that MFU counts for a global batch: forward and all needed gradients, without recomputation.

    Args:
        loads: by unit, the sum of the loads of all its microbatches, unpadded.
    """
    input_grad = input_grad_needed(shape)
    return sum(
        unit_flops([evenly_loaded(layer) for layer in unit.layers], loads[unit.name], input_grad[unit.name])
        for unit in shape.units
        if unit.name in loads
    )


def unit_flops(layers: Sequence[LayerShape], load: TokenLoad, input_grad: Sequence[bool]) -> int:
    """Return the forward and backward FLOPs of consecutive layers."""
    return sum(
        forward_flops(layer, load) + _backward_flops(layer, load, needed)
        for layer, needed in zip(layers, input_grad, strict=True)
    )


def _backward_flops(layer: LayerShape, load: TokenLoad, input_grad: bool) -> int:
    weight_grad, input_grad = needed_gradients(layer, input_grad)
    return backward_flops(layer, load, weight_grad=weight_grad, input_grad=input_grad)
