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
from dataclasses import dataclass

from mmtrain.costs import generator_arithmetic as diffusion
from mmtrain.costs.cost_model import TokenLoad
from mmtrain.models.shapes.model_shape import LayerShape, LossSizes, ModelShape, UnitShape, adaptable_linears

_INDEX_BYTES = 8
_FP32_BYTES = 4
# Kinds of layers without a trainable norm between their input and their first GEMM.
READS_INPUT_RAW = ("patch_embed", "audio_embed", "projector", "context_projector")


@dataclass(frozen=True, slots=True)
class Gemm:
    """The product (m, k) x (k, n) of activations with a weight."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """FLOPs of the GEMM."""
        return 2 * self.m * self.n * self.k


def gemms(layer: LayerShape, load: TokenLoad, tp: int = 1) -> tuple[Gemm, ...]:
    """Return the GEMMs with weights that one of `tp` ranks computes in forward, in order.

    The two products inside attention are not among them, see `attention_flops`.
    """
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
            rows, width = feature_rows(layer, load), merged_width(layer)
            if not layer.ffn:
                return (Gemm(rows, layer.out, width // tp),)
            num_projectors = 1 + layer.carried_in
            first, second = Gemm(rows, layer.ffn // tp, width), Gemm(rows, layer.out, layer.ffn // tp)
            return (first,) * num_projectors + (second,) * num_projectors
        case "embedding":
            return ()
        case "head":
            return (Gemm(load.num_targets, layer.vocab // tp, h),)
        case _:
            return tuple(Gemm(*sides) for sides in diffusion.gemm_sides(layer, load, tp))


def adapter_gemms(layer: LayerShape, load: TokenLoad, tp: int = 1) -> tuple[tuple[Gemm, ...], ...]:
    """Return for each of the layer's `gemms` the two of its adapter, with A and with B; () if it has none."""
    lora = layer.lora
    if lora is None:
        return ((),) * len(gemms(layer, load, tp))
    return tuple(
        (Gemm(gemm.m, lora.rank, gemm.k), Gemm(gemm.m, gemm.n, lora.rank)) if linear in lora.linears else ()
        for linear, gemm in zip(adaptable_linears(layer), gemms(layer, load, tp), strict=True)
    )


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
    linears = adaptable_linears(layer)
    return not linears or any(f"{linear}.weight" not in layer.frozen for linear in linears)


def feature_rows(layer: LayerShape, load: TokenLoad) -> int:
    """Return the number of rows that leave a projector: class tokens are dropped, and tokens joined."""
    return (load.tokens - layer.extra_tokens * load.num_sequences) // layer.joins


def merged_width(layer: LayerShape) -> int:
    """Return the features of a row that a projector's first linear reads."""
    return layer.hidden if layer.pools else layer.hidden * layer.joins


def attention_flops(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Return the forward FLOPs of the two products inside attention: scores, and their sum over values."""
    return 4 * query_key_pairs(layer, load) * layer.heads * layer.head_dim // tp


def num_attention_passes(layer: LayerShape) -> int:
    """Return how often a block's attention is computed: rows of images a second time, see `models.attention`.

    Loads do not say how many tokens belong to images, so all count as such: an upper bound.
    """
    return 2 if layer.image_spans else 1


def query_key_pairs(layer: LayerShape, load: TokenLoad) -> int:
    """Return how many pairs of a query and a key attention of the layer has; those that a mask hides are not counted.

    Nor are those of an image's tokens with later ones of the image: loads do not say which tokens those are.

    Loads do not hold all lengths. With windows the load counts as one of sequences of two lengths: see `_two_lengths`.
    """
    window = layer.window if layer.causal else layer.window_side**2 or layer.chunk
    if not window or load.max_len <= window:
        return (load.sum_sq + load.tokens) // 2 if layer.causal else diffusion.query_key_pairs(layer, load)
    pairs_of = _causal_pairs if layer.causal else _pairs_in_pieces
    return round(sum(count * pairs_of(length, window) for count, length in _two_lengths(load)))


def _causal_pairs(length: float, window: int) -> float:
    """Return the pairs in a sequence of so many tokens, each of which sees itself and the `window` - 1 before it."""
    seen = min(length, window)  # by the last token
    return length * seen - seen * (seen - 1) / 2


def _pairs_in_pieces(length: float, window: int) -> float:
    """Return the pairs in an image or clip whose squares or chunks have `window` tokens; the last may have fewer."""
    return length * min(length, window)


def _two_lengths(load: TokenLoad) -> tuple[tuple[float, float], ...]:
    """Return (number, length) of the load's longest sequences and of its others, as if all others were equally long.

    Number, tokens, squares and greatest length of the load determine both. The result is exact if there are two lengths
    only, as with images of one size beside long texts.
    """
    longest, num_sequences = load.max_len, load.num_sequences
    missing = num_sequences * longest - load.tokens  # tokens by which all are shorter than the longest
    squares = min(load.sum_sq, load.tokens * longest)  # more cannot be, but in loads that were scaled
    missing_squares = num_sequences * longest**2 - 2 * load.tokens * longest + squares
    if missing <= 0 or missing_squares <= 0 or missing**2 > num_sequences * missing_squares:
        length = load.tokens / max(num_sequences, 1)
        return ((num_sequences, length),)
    num_others = missing**2 / missing_squares
    return (num_sequences - num_others, longest), (num_others, longest - missing_squares / missing)


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

    If any of the layer's own matrices trains, all of its parameters count; if any of its norms and biases does, all of
    these.
    """
    if layer.queries and "table.weight" in layer.frozen:
        return layer.queries * layer.hidden
    if _trains_matrices(layer):
        return num_parameters(layer, tp)
    num_in_matrices = sum(gemm.n * gemm.k for gemm in gemms(layer, TokenLoad(0, 0, 0, 0), tp))
    num_in_vectors = _num_weights(layer, tp) - num_in_matrices if layer.trains_weights else 0
    return num_in_vectors + _num_adapter_parameters(layer, tp)


def _num_adapter_parameters(layer: LayerShape, tp: int) -> int:
    if layer.lora is None:  # the planner asks for the parameters of layers very often
        return 0
    pairs = adapter_gemms(layer, TokenLoad(0, 0, 0, 0), tp)
    return sum(gemm.n * gemm.k for pair in pairs for gemm in pair)


def _num_weights(layer: LayerShape, tp: int) -> int:
    h, norm = layer.hidden, layer.hidden * (1 if layer.rms_norm else 2)
    bias = int(layer.linear_bias)
    extra = sum(width * (1 if layer.rms_norm else 2) for width in layer.norm_widths)
    extra += h * int(layer.layer_post_norm)
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
            split += (inner + kv // 2) * int(layer.joint_qk_norm)
            whole = num_norms(layer) * norm + 2 * (bias + int(layer.layer_scale)) * h
            whole += 2 * layer.head_dim * int(layer.qk_norm)
            return split // tp + whole
        case "projector":
            width, whole = merged_width(layer), extra + int(layer.newline) * layer.out
            if not layer.ffn:
                return width * layer.out // tp + bias * layer.out + whole
            whole += layer.carried_in * width * (1 if layer.rms_norm else 2)
            of_each = layer.ffn * (width + bias + layer.out) // tp + bias * layer.out
            return of_each * (1 + layer.carried_in) + whole
        case "embedding":
            return layer.vocab * h // tp + layer.queries * h
        case "head":
            return layer.vocab * h // tp + norm
        case _:
            return diffusion.num_parameters(layer, tp)


def joins_attention_output(load: TokenLoad, sorts_sequences: bool) -> bool:
    """Return whether a block copies attention's output before the next linear reads it.

    So do ranks that share sequences, and a kernel that sorts sequences by length where lengths differ. Where they are
    not known, as in bounds of memory, they count as equal.
    """
    lengths_differ = load.num_sequences * load.max_len > load.tokens
    return load.exchanged > 0 or (sorts_sequences and lengths_differ)


def _attention_width(layer: LayerShape, load: TokenLoad, sorts_sequences: bool) -> int:
    """Return how many numbers a block keeps for a token of queries, keys, values and attention's output.

    Values are a part of what the first linear makes, which therefore stays whole beside rotated queries and keys. A
    kernel that sorts sequences reads copies of all three instead, and the linear's output stays only where a norm over
    heads has read it, or a second pass over images does.
    """
    inner, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    of_heads = inner + 2 * keys
    if sorts_sequences and not load.exchanged:
        of_heads *= 1 + int(layer.qk_norm) + int(layer.image_spans)
    else:
        of_heads += (inner + keys) * int(layer.rotates)
    return of_heads + inner * (1 + int(joins_attention_output(load, sorts_sequences)))


def rotary_table_bytes(layer: LayerShape, load: TokenLoad, element_bytes: int) -> int:
    """Return the bytes of cosines and sines that rotate a microbatch's heads, which blocks of a stage share."""
    return load.tokens * layer.head_dim * element_bytes if layer.rotates else 0


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
            return t * (element_bytes * (layer.patch_features + sum(layer.norm_widths)) + 4 * _INDEX_BYTES)
        case "audio_embed":
            # Inputs of both convolutions, three frames side by side, and inputs of their activations.
            return t * (element_bytes * (2 * 3 * layer.mel_bins + 2 * h + 3 * h + h) + _INDEX_BYTES)
        case "vit_block" | "decoder_block":
            inner, kv = layer.heads * layer.head_dim, 2 * layer.kv_heads * layer.head_dim
            # Queries apart from keys and values, if these are fewer; with a norm over all heads both outputs.
            head_norms = inner if layer.qk_norm and layer.kv_heads < layer.heads else 0
            head_norm_inputs = (inner + kv // 2) * int(layer.qk_norm)
            head_norms += 2 * (inner + kv // 2) * int(layer.joint_qk_norm)
            outputs = 2 * h if layer.post_norms else 0  # that norms read
            in_fp32 = 4 * (inner + kv // 2) // tp if layer.joint_qk_norm else 0
            scaled = 2 * h if layer.layer_scale else 0
            num_softmaxes = num_attention_passes(layer) * layer.heads // tp
            statistics = 4 * (4 + num_softmaxes)  # of two norms, of each head's softmax and norm, in fp32
            statistics += 4 * ((layer.heads + layer.kv_heads) // tp) * int(layer.qk_norm)
            statistics += 2 * _INDEX_BYTES * int(sorts_sequences)  # the order of the tokens, and back
            # Gated: gate and up together, and what they make; else input and output of the activation.
            mlp = _activation_function_width(layer) - layer.ffn * layer.recomputes_activation
            gathered = (tp - 1) * (inner + kv) if layer.kv_heads < tp else 0  # keys and values of all ranks
            image_rows = 2 * inner if layer.image_spans else 0  # queries and outputs of the second pass
            attended = _attention_width(layer, load, sorts_sequences)
            split = attended + gathered + head_norms + image_rows + mlp
            whole = 4 * h + outputs + scaled
            in_fp32 += _fp32_norm_bytes(layer, element_bytes, num_norms(layer) * h + head_norm_inputs // tp)
            # Only torch's plainest kernel takes both a mask and grouped queries. It keeps the softmax of those rows.
            softmax = layer.heads * layer.window // tp if layer.image_spans else 0
            return t * (element_bytes * (whole + softmax + split // tp) + statistics + in_fp32)
        case "projector":
            rows, joined = feature_rows(layer, load), merged_width(layer)
            inputs = rows * joined * max(1, len(layer.norm_widths)) + (t * h if layer.norm_widths else 0)
            # Of each projector for an earlier block: the input of its norm, and that of its first linear.
            inputs += layer.carried_in * rows * joined * 2
            inner = rows * 2 * layer.ffn // tp * (1 + layer.carried_in)
            statistics = 2 * _FP32_BYTES * t  # of its norms
            return element_bytes * (inputs + inner) + statistics + 2 * _INDEX_BYTES * t * (1 + layer.carried_in)
        case "embedding":
            return _INDEX_BYTES * t
        case "head":
            sizes = loss_sizes(layer, load, element_bytes, tp)
            rows = load.num_targets * (2 * _INDEX_BYTES + _fp32_norm_bytes(layer, element_bytes, h))
            if sizes.uses_chunks:  # the norm keeps its input, and the loss no output of the norm
                return rows + load.num_targets * element_bytes * h + sizes.kept_bytes
            return rows + load.num_targets * (element_bytes * 2 * h + 3 * _FP32_BYTES) + sizes.logits_bytes
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


def _fp32_norm_bytes(layer: LayerShape, element_bytes: int, normalized: int) -> int:
    """Return how many bytes more than others zero-centered norms over so many numbers keep: they compute in fp32.

    They keep a copy of their input in fp32.
    """
    if not layer.zero_centered_norms or element_bytes >= _FP32_BYTES:
        return 0
    return normalized * _FP32_BYTES


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
            normalized_heads = (layer.heads + layer.kv_heads) * layer.head_dim if layer.joint_qk_norm else 0
            scaled = 2 * h if layer.layer_scale else 0
            read_by = {"self_attention.linear_qkv": h, "mlp.linear_fc1": h}
            if joins_output:
                read_by["self_attention.linear_proj"] = layer.heads * layer.head_dim // tp
            if not layer.recomputes_activation:
                read_by["mlp.linear_fc2"] = layer.ffn // tp
            adapted = () if layer.lora is None else layer.lora.linears
            width = sum(inputs for linear, inputs in read_by.items() if linear not in adapted)
            width += scaled + normalized_heads // tp
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

    Element-wise work is norms, activations and residuals. The operands of GEMMs are not included (see `AnalyticCosts`).
    """
    t, h = load.tokens, layer.hidden
    match layer.kind:
        case "patch_embed":
            return 4 * t * h
        case "audio_embed":
            return t * (12 * layer.mel_bins + 14 * h)
        case "vit_block" | "decoder_block":
            on_heads = head_elements(layer)
            residual = 10 * h + (4 * h if layer.layer_scale or layer.post_norms else 0)
            residual += 3 * h * int(layer.adds_carried)
            return t * (residual + (_activation_function_width(layer) + on_heads) // tp)
        case "projector":
            joins = 2 * feature_rows(layer, load) * layer.out_width if layer.carried_in else 0
            of_each = 3 * t * h + 2 * feature_rows(layer, load) * layer.ffn // tp
            return of_each * (1 + layer.carried_in) + joins
        case "embedding":
            return 2 * t * layer.out_width
        case "head":
            return load.num_targets * 2 * h + softmax_elements(layer, load, tp)
        case _:
            return diffusion.elementwise_elements(layer, load, tp)


def softmax_elements(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Return how many numbers the softmax of a head's logits moves in forward."""
    return load.num_targets * (8 * layer.vocab // tp)


def activation_function_elements(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Return how many numbers the activation function of a block's MLP moves in forward."""
    return load.tokens * _activation_function_width(layer) // tp


def _activation_function_width(layer: LayerShape) -> int:
    """Return how many numbers the activation function of a block's MLP reads and writes for a token."""
    return (3 if layer.gated else 2) * layer.ffn


def activation_output_bytes(layer: LayerShape, load: TokenLoad, element_bytes: int, tp: int = 1) -> int:
    """Return the bytes of what the activation function of a block's MLP makes."""
    return load.tokens * (layer.ffn // tp) * element_bytes


def head_elements(layer: LayerShape) -> int:
    """Return how many numbers a block's work on queries and keys moves for a token: rotation and norms of heads."""
    passes = int(layer.rotates) + int(layer.qk_norm or layer.joint_qk_norm)
    return 2 * passes * (layer.heads + layer.kv_heads) * layer.head_dim


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
            return load.tokens * layer.patch_features
        case "audio_embed":
            return 2 * load.tokens * layer.mel_bins * _FP32_BYTES
        case "embedding":
            return load.tokens * _INDEX_BYTES
        case "head":  # with the places and the sources of targets
            return (load.tokens + 2 * load.num_targets) * _INDEX_BYTES
        case _:
            return 0


def context_parallel_load(load: TokenLoad, cp: int) -> TokenLoad:
    """Return the load of each of `cp` ranks that share every sequence: an even part of tokens and query-key pairs.

    All ranks have equally many pairs, whether each has some heads of all tokens (DeepSpeed Ulysses, arXiv 2309.14509),
    or two pieces of a sequence at the same distance from its two ends, under a causal mask (Ring Attention, arXiv
    2310.01889, as balanced in Megatron-core). All other costs follow from the share's tokens.
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
    return sum(unit_flops(u.layers, loads[u.name], input_grad[u.name]) for u in shape.units if u.name in loads)


def unit_flops(layers: Sequence[LayerShape], load: TokenLoad, input_grad: Sequence[bool]) -> int:
    """Return the forward and backward FLOPs of consecutive layers."""
    return sum(
        forward_flops(layer, load) + _backward_flops(layer, load, needed)
        for layer, needed in zip(layers, input_grad, strict=True)
    )


def _backward_flops(layer: LayerShape, load: TokenLoad, input_grad: bool) -> int:
    weight_grad, input_grad = needed_gradients(layer, input_grad)
    return backward_flops(layer, load, weight_grad=weight_grad, input_grad=input_grad)
