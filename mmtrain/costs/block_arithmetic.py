"""Arithmetic and bytes of the two parts of a block, its mixer and its MLP: what `layer_arithmetic` sums up for a block.

Each kind of mixer and of MLP has one class here, chosen by `mixer_arithmetic` and `mlp_arithmetic`. Widths are numbers
for a token of the whole layer; those that tensor parallelism divides are divided by the block, after they are summed.
"""

import math
from typing import TypeAlias

from mmtrain.costs import generator_arithmetic as diffusion
from mmtrain.costs.cost_model import TokenLoad
from mmtrain.costs.delta_net_arithmetic import DeltaNetArithmetic
from mmtrain.costs.expert_spread import arriving_rows, fullest_rank_load, ranks_of_token
from mmtrain.costs.part_records import FP32_BYTES, INDEX_BYTES, Gemm, PartParameters, SavedWidths
from mmtrain.models.shapes.layer_shape import (
    EXPERT_LINEARS,
    ROUTER,
    SHARED_EXPERT,
    SHARED_GATE,
    Attention,
    DenseMlp,
    GatedDeltaNet,
    LayerShape,
    MoeMlp,
)


class AttentionArithmetic:
    """The costs of attention inside a layer: a block's, or that of a generator's layer."""

    __slots__ = ("attention", "layer")

    def __init__(self, layer: LayerShape, attention: Attention) -> None:
        self.layer = layer
        self.attention = attention

    def gemms(self, tokens: int, tp: int) -> tuple[Gemm, ...]:
        """Return the GEMMs with weights that one of `tp` ranks computes in forward."""
        hidden, attention = self.layer.hidden, self.attention
        return Gemm(tokens, attention.first_width // tp, hidden), Gemm(tokens, hidden, attention.inner_width // tp)

    def flops(self, load: TokenLoad, tp: int) -> int:
        """Return the forward FLOPs of the products without weights: scores, and their sum over values."""
        return 4 * self.query_key_pairs(load) * self.attention.inner_width // tp

    @property
    def num_passes(self) -> int:
        """How often these products are computed: for rows of images a second time, see `models.attention`.

        Loads do not say how many tokens belong to images, so all count as such: an upper bound.
        """
        return 2 if self.attention.image_spans else 1

    def query_key_pairs(self, load: TokenLoad) -> int:
        """Return how many pairs of a query and a key there are; those that a mask hides are not counted.

        Nor are those of an image's tokens with later ones of the image: loads do not say which tokens those are.

        Loads do not hold all lengths. With windows the load counts as one of sequences of two lengths: see
        `_two_lengths`.
        """
        if self.layer.kind == "resampler":
            return resampled_tokens(self.layer, load) * self.layer.projector.features_per_item
        attention = self.attention
        window = attention.window if attention.causal else attention.window_side**2 or attention.chunk
        if not window or load.max_len <= window:
            if attention.causal:
                return (load.sum_sq + load.tokens) // 2
            return diffusion.query_key_pairs(self.layer, load)
        pairs_of = _causal_pairs if attention.causal else _pairs_in_pieces
        return round(sum(count * pairs_of(length, window) for count, length in _two_lengths(load)))

    def mean_keys(self, load: TokenLoad) -> float:
        """Return how many keys a query attends to on average.

        Context-parallel ranks that share a sequence have an even part of its queries and of its pairs.
        """
        queries = load.tokens
        if self.layer.kind == "resampler":
            queries = load.num_sequences * self.layer.projector.features_per_item
        return self.query_key_pairs(load) / queries

    def num_parameters(self) -> PartParameters:
        """Return the number of parameters."""
        attention, hidden = self.attention, self.layer.hidden
        inner, kv_width = attention.inner_width, attention.kv_width
        divided = attention.first_width * (hidden + int(attention.qkv_bias)) + inner * hidden
        divided += (inner + kv_width // 2) * int(attention.joint_qk_norm)
        num_norms = (1 if attention.reads_kv else 2) * int(attention.qk_norm)
        whole = int(self.layer.linear_bias) * hidden + num_norms * attention.head_dim
        return PartParameters(divided, whole)

    def saved(self, load: TokenLoad, element_bytes: int, tp: int, sorts_sequences: bool) -> SavedWidths:
        """Return what it keeps: queries, keys and values, its output, and inputs of norms; attention keeps no scores.

        sorts_sequences: see `layer_arithmetic.joins_attention_output`.
        """
        attention = self.attention
        inner, kv_width, num_heads = attention.inner_width, attention.kv_width, attention.heads
        num_heads += attention.kv_heads * (not attention.reads_kv)
        # Queries apart from keys and values, if these are fewer; those of one KV head lie together anyway. With a norm
        # over all heads both outputs.
        head_norms = inner if attention.qk_norm and tp < attention.kv_heads < attention.heads else 0
        head_norm_inputs = (inner + kv_width // 2) * int(attention.qk_norm)
        head_norms += 2 * (inner + kv_width // 2) * int(attention.joint_qk_norm)
        gathered = (tp - 1) * attention.first_width if attention.kv_heads < tp else 0  # keys and values of all ranks
        image_rows = 2 * inner if attention.image_spans else 0  # queries and outputs of the second pass
        fixed_bytes = FP32_BYTES * (self.num_passes * attention.heads // tp)  # of each head's softmax
        fixed_bytes += FP32_BYTES * (num_heads // tp) * int(attention.qk_norm)
        has_value_norm = attention.value_norm and not attention.reads_kv
        fixed_bytes += FP32_BYTES * (attention.kv_heads // tp) * int(has_value_norm)
        fixed_bytes += 4 * (inner + kv_width // 2) // tp if attention.joint_qk_norm else 0
        # Their inputs lie beside values, or gates, in one tensor.
        fixed_bytes += fp32_norm_bytes(self.layer, element_bytes, head_norm_inputs // tp, keeps_input=True)
        fixed_bytes += 2 * INDEX_BYTES * int(sorts_sequences)  # the order of the tokens, and back
        # Only torch's plainest kernel takes both a mask and grouped queries. It keeps the softmax of those rows.
        softmax = attention.heads * attention.window // tp if attention.image_spans else 0
        # Of a gate its features, its sigmoid, and what it makes of the output.
        gates = 3 * inner * int(attention.output_gate)
        divided = self._saved_of_heads(load, sorts_sequences) + gathered + head_norms + image_rows + gates
        return SavedWidths(divided, softmax, fixed_bytes)

    def _saved_of_heads(self, load: TokenLoad, sorts_sequences: bool) -> int:
        """Return how many numbers are kept for a token of queries, keys, values and attention's output.

        Values are a part of what the first linear makes, which therefore stays whole beside rotated queries and keys. A
        kernel that sorts sequences reads copies of all three instead, and the linear's output stays only where a norm
        over heads has read it, or a second pass over images does.
        """
        attention = self.attention
        inner, keys = attention.inner_width, attention.kv_width // 2
        of_linear = inner + attention.kv_outputs
        if sorts_sequences and not load.exchanged:
            of_heads = inner + 2 * keys + of_linear * (int(attention.qk_norm) + int(attention.image_spans))
        else:
            of_heads = of_linear + (inner + keys) * int(attention.rotates)
            if not attention.reads_kv:  # values apart from the linear's
                of_heads += keys * int(attention.value_norm or attention.keys_as_values)
            of_heads += 2 * keys * int(attention.keeps_kv)
        return of_heads + inner * (1 + int(joins_attention_output(load, sorts_sequences)))

    def read_by_weight_gradients(self, tp: int, joins_output: bool) -> dict[str, int]:
        """Return, by module, the numbers that a rank keeps of a token only for gradients of the module's weights."""
        attention = self.attention
        qkv, projection = attention.linears
        widths = {qkv: self.layer.hidden}
        if joins_output:
            widths[projection] = attention.inner_width // tp
        if attention.joint_qk_norm:
            widths["self_attention.q_layernorm"] = (attention.inner_width + attention.kv_width // 2) // tp
        return widths

    @property
    def gradient_width(self) -> int:
        """Numbers of a token in gradients at the peak of backward: its output, and heads before and after rotation."""
        gates = 2 * self.attention.inner_width * int(self.attention.output_gate)
        return 3 * self.attention.inner_width + 2 * self.attention.kv_width + gates

    def working_bytes(self, load: TokenLoad, tp: int) -> int:
        """Return what its backward needs beyond gradients of `gradient_width`: nothing."""
        return 0

    @property
    def elementwise_width(self) -> int:
        """How many numbers rotation and norms of queries and keys move for a token in forward."""
        attention = self.attention
        passes = int(attention.rotates) + int(attention.qk_norm or attention.joint_qk_norm)
        gates = 5 * attention.inner_width * int(attention.output_gate)
        values = attention.kv_width * int(attention.value_norm)
        return 2 * passes * (attention.heads + attention.kv_heads) * attention.head_dim + gates + values


class DenseMlpArithmetic:
    """The costs of an MLP that computes every token with all of its weights."""

    __slots__ = ("layer", "mlp")

    def __init__(self, layer: LayerShape, mlp: DenseMlp) -> None:
        self.layer = layer
        self.mlp = mlp

    def gemms(self, tokens: int, tp: int) -> tuple[Gemm, ...]:
        """Return the GEMMs with weights that one of `tp` ranks computes in forward."""
        hidden = self.layer.hidden
        return Gemm(tokens, self.mlp.first_width // tp, hidden), Gemm(tokens, hidden, self.mlp.ffn // tp)

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the linears that compute `gemms`, inside the block."""
        return self.mlp.linears

    def num_parameters(self) -> PartParameters:
        """Return the number of parameters."""
        hidden, bias = self.layer.hidden, int(self.layer.linear_bias)
        return PartParameters(self.mlp.first_width * (hidden + bias) + self.mlp.ffn * hidden, bias * hidden)

    def saved(self) -> SavedWidths:
        """Return what it keeps: gate and up together, and what they make; else input and output of the activation."""
        return SavedWidths(self.elementwise_width - self.mlp.ffn * self.layer.recomputes_activation)

    def read_by_weight_gradients(self, tp: int) -> dict[str, int]:
        """Return, by module, the numbers that a rank keeps of a token only for gradients of the module's weights."""
        first, second = self.mlp.linears
        widths = {first: self.layer.hidden}
        if not self.layer.recomputes_activation:
            widths[second] = self.mlp.ffn // tp
        return widths

    @property
    def inner_width(self) -> int:
        """Numbers that the activation function makes of a token."""
        return self.mlp.ffn

    @property
    def copied_width(self) -> int:
        """Numbers of a token that are copied before the first linear and behind the last one: none."""
        return 0

    @property
    def arriving_width(self) -> int:
        """Numbers of a token that arrive where they are copied: none."""
        return 0

    @property
    def copied_weights(self) -> int:
        """Numbers of weights that a GEMM copies: none."""
        return 0

    @property
    def elementwise_width(self) -> int:
        """How many numbers the activation function reads and writes for a token."""
        return self.mlp.first_width + self.mlp.ffn


class MoeMlpArithmetic:
    """The costs of a mixture of experts on the rank whose experts compute most tokens."""

    __slots__ = ("layer", "mlp")

    def __init__(self, layer: LayerShape, mlp: MoeMlp) -> None:
        self.layer = layer
        self.mlp = mlp

    def gemms(self, tokens: int, tp: int) -> tuple[Gemm, ...]:
        """Return the GEMMs with weights that one of `tp` ranks computes in forward.

        These are the experts', then the router's, then those of a shared expert and its gate. A group of ranks scores
        all tokens on each rank.
        """
        hidden, mlp = self.layer.hidden, self.mlp
        rows = self._computed(tokens * mlp.top_k)
        first = Gemm(rows, mlp.first_width // tp, hidden, mlp.held_experts)
        second = Gemm(rows, hidden, mlp.expert_ffn // tp, mlp.held_experts)
        of_mixture = (first, second, Gemm(tokens, mlp.experts, hidden))
        if not mlp.shared_ffn:
            return of_mixture
        shared_ffn = mlp.shared_ffn // tp
        of_shared = (Gemm(tokens, 2 * shared_ffn, hidden), Gemm(tokens, hidden, shared_ffn))
        return (*of_mixture, *of_shared, *(Gemm(tokens, 1, hidden),) * mlp.shared_gate)

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the linears that compute `gemms`, inside the block; of experts, which share one, the first's."""
        of_experts = (f"mlp.experts.0.{linear}" for linear in EXPERT_LINEARS)
        of_shared = (f"{SHARED_EXPERT}.{linear}" for linear in EXPERT_LINEARS if self.mlp.shared_ffn)
        return (*of_experts, ROUTER, *of_shared, *(SHARED_GATE,) * self.mlp.shared_gate)

    def num_parameters(self) -> PartParameters:
        """Return the number of parameters."""
        hidden, mlp = self.layer.hidden, self.mlp
        divided = mlp.held_experts * (mlp.first_width + mlp.expert_ffn) * hidden + 3 * mlp.shared_ffn * hidden
        return PartParameters(divided, (mlp.experts + mlp.shared_gate) * hidden + mlp.experts * mlp.router.has_bias)

    def saved(self) -> SavedWidths:
        """Return what it keeps of a token: for each of its experts a copy of the input and the inner widths.

        The router keeps all scores in fp32, which experts it chose, and their weights before and after these are
        divided. Each of its losses keeps as many numbers as there are scores. A copy has its weight, its row, and its
        places by expert and by row; so has a row that is sent, without the first two. A shared expert keeps its inner
        widths, and its output where a gate multiplies it.
        """
        mlp, router = self.mlp, self.mlp.router
        inner = mlp.first_width + mlp.expert_ffn * (1 - self.layer.recomputes_activation)
        of_shared = mlp.shared_ffn * (3 - self.layer.recomputes_activation)
        num_kept = 1 + (router.z_loss > 0) + (router.balance_loss > 0)  # logits, and loads of experts
        fixed_bytes = num_kept * FP32_BYTES * mlp.experts + (2 * FP32_BYTES + INDEX_BYTES) * mlp.top_k
        fixed_bytes += FP32_BYTES * router.normalizes + 4 * FP32_BYTES * router.reads_samples
        fixed_bytes += self._computed((3 * INDEX_BYTES + FP32_BYTES) * mlp.top_k)
        if mlp.ep > 1:
            fixed_bytes += INDEX_BYTES * (mlp.top_k + math.ceil(2 * ranks_of_token(mlp, mlp.ep)))
        gated = (self.layer.hidden + 1) * mlp.shared_gate
        divided, on_rank = self._computed(mlp.top_k * inner) + of_shared, self.copied_width + gated
        return SavedWidths(divided, on_rank, fixed_bytes)

    def read_by_weight_gradients(self, tp: int) -> dict[str, int]:
        """Return, by module, the numbers that a rank keeps of a token only for gradients of the module's weights."""
        mlp = self.mlp
        first, second = self.linears[: len(EXPERT_LINEARS)]
        widths = {first: self._computed(mlp.top_k * self.layer.hidden)}
        if not self.layer.recomputes_activation:
            widths[second] = self._computed(mlp.top_k * mlp.expert_ffn // tp)
            widths[f"{SHARED_EXPERT}.{EXPERT_LINEARS[1]}"] = mlp.shared_ffn // tp
        return widths

    @property
    def inner_width(self) -> int:
        """Numbers that the activation functions make of a token, in all of its experts."""
        return self._computed(self.mlp.top_k * self.mlp.expert_ffn) + self.mlp.shared_ffn

    @property
    def copied_width(self) -> int:
        """Numbers of a token that are copied for its experts, as many as these make of it."""
        return self._computed(self.mlp.top_k * self.layer.hidden)

    @property
    def arriving_width(self) -> int:
        """Numbers of a token that arrive where its experts are, as many as go back."""
        return math.ceil(arriving_rows(self.mlp) * self.layer.hidden)

    @property
    def copied_weights(self) -> int:
        """Numbers of the first linears' weights that a grouped GEMM copies; twice those of the last ones."""
        return self.mlp.held_experts * self.mlp.first_width * self.layer.hidden

    @property
    def elementwise_width(self) -> int:
        """How many numbers the activation functions read and write for a token, in all of its experts."""
        mlp = self.mlp
        return self._computed(mlp.top_k * (mlp.first_width + mlp.expert_ffn)) + 3 * mlp.shared_ffn

    def _computed(self, number: int) -> int:
        """Return how many of something the rank has whose experts have most rows, of `number` in the mean."""
        return math.ceil(number * fullest_rank_load(self.mlp))


class LayerInputArithmetic:
    """The costs of a block's own input, or in the embedding of those of all blocks.

    Every rank of a TP group computes all of it but rows of the table.
    """

    __slots__ = ("layer",)

    def __init__(self, layer: LayerShape) -> None:
        self.layer = layer

    @property
    def num_features(self) -> int:
        """Features of a token that the embedding makes for all blocks."""
        return self.layer.layer_input * len(self.layer.side_out)

    def gemms(self, tokens: int) -> tuple[Gemm, ...]:
        """Return the GEMMs of a forward: gate and projection of a block, or that of the embedding."""
        width, hidden = self.layer.layer_input, self.layer.hidden
        if not width:
            return ()
        if self.layer.kind == "embedding":
            return (Gemm(tokens, self.num_features, hidden),)
        return Gemm(tokens, width, hidden), Gemm(tokens, hidden, width)

    def num_parameters(self) -> PartParameters:
        """Return the number of parameters."""
        width, hidden = self.layer.layer_input, self.layer.hidden
        if not width:
            return PartParameters(0, 0)
        if self.layer.kind == "embedding":
            return PartParameters(self.layer.vocab * self.num_features, self.num_features * hidden + width)
        return PartParameters(0, 2 * width * hidden + hidden)

    def saved_bytes(self, element_bytes: int) -> int:
        """Return what is kept for a token: inputs of linears, of the gate's activation and products, and of norms.

        The inputs of blocks lie beside the hidden states in what the embedding makes, and stay until the last of them
        is read.
        """
        width, hidden = self.layer.layer_input, self.layer.hidden
        if not width:
            return 0
        if self.layer.kind == "embedding":
            numbers, num_norms = hidden + 2 * self.num_features, len(self.layer.side_out)
        else:
            numbers, num_norms = 2 * hidden + 3 * width, 1
        return element_bytes * numbers + FP32_BYTES * num_norms

    @property
    def elementwise_width(self) -> int:
        """Return how many numbers are moved for a token in forward beside those of GEMMs."""
        width, hidden = self.layer.layer_input, self.layer.hidden
        return 8 * self.num_features if self.layer.kind == "embedding" else 5 * hidden * (width > 0) + 5 * width


MixerArithmetic: TypeAlias = AttentionArithmetic | DeltaNetArithmetic
MlpArithmetic: TypeAlias = DenseMlpArithmetic | MoeMlpArithmetic


def mixer_arithmetic(layer: LayerShape) -> MixerArithmetic:
    """Return the costs of the layer's mixer, which it must have."""
    match layer.mixer:
        case Attention() as attention:
            return AttentionArithmetic(layer, attention)
        case GatedDeltaNet() as delta_net:
            return DeltaNetArithmetic(layer, delta_net)
        case None:
            raise AssertionError(f"a {layer.kind} without a mixer")


def attention_arithmetic(layer: LayerShape) -> AttentionArithmetic:
    """Return the costs of the layer's mixer, which must be attention."""
    return AttentionArithmetic(layer, layer.attention)


def mlp_arithmetic(layer: LayerShape) -> MlpArithmetic:
    """Return the costs of the layer's MLP, which it must have."""
    match layer.mlp:
        case DenseMlp() as mlp:
            return DenseMlpArithmetic(layer, mlp)
        case MoeMlp() as mlp:
            return MoeMlpArithmetic(layer, mlp)
        case None:
            raise AssertionError(f"a {layer.kind} without an MLP")


def resampled_tokens(layer: LayerShape, load: TokenLoad) -> int:
    """Return how many tokens the queries of a resampler attend to: all but class tokens."""
    return load.tokens - layer.extra_tokens * load.num_sequences


def joins_attention_output(load: TokenLoad, sorts_sequences: bool) -> bool:
    """Return whether a block copies attention's output before the next linear reads it.

    So do ranks that share sequences, and a kernel that sorts sequences by length where lengths differ. Where they are
    not known, as in bounds of memory, they count as equal.
    """
    lengths_differ = load.num_sequences * load.max_len > load.tokens
    return load.exchanged > 0 or (sorts_sequences and lengths_differ)


def fp32_norm_bytes(layer: LayerShape, element_bytes: int, normalized: int, *, keeps_input: bool = False) -> int:
    """Return how many bytes more than others zero-centered norms over so many numbers keep: they compute in fp32.

    They keep a copy of their input in fp32, in place of the input unless something else keeps that.
    """
    if not layer.zero_centered_norms or element_bytes >= FP32_BYTES:
        return 0
    return normalized * (FP32_BYTES - element_bytes * (not keeps_input))


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
