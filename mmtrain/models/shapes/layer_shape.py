"""One layer as planner and cost models know it: its kind and its widths, no torch."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, TypeAlias

LayerKind = Literal[
    "patch_embed",
    "audio_embed",
    "vit_block",
    "projector",
    "resampler",
    "merger",
    "embedding",
    "decoder_block",
    "head",
    "context_projector",
    "unet_embed",
    "unet_residual",
    "unet_attention",
    "unet_down",
    "unet_up",
    "unet_out",
    "dit_embed",
    "dit_block",
    "dit_out",
]

# What waits in host memory where a block's activations do not stay on the device: nothing, so that it is recomputed
# from its input; the input, from which it is recomputed; or all that it would keep, so that it is not recomputed.
OffloadMode = Literal["none", "inputs", "all"]

NUM_MODULATION_VECTORS = 6  # shift, scale and gate of attention and of MLP (adaLN-single: PixArt, arXiv 2310.00426)

# Pieces of a transformer block that can run at different times. Tensor-parallel communication surrounds `qkv` and `up`
# and follows `projection` and `down`: see `costs.block_pieces`.
BLOCK_PIECES = ("norm", "qkv", "attention", "projection", "norm_mlp", "up", "down", "add")
BLOCK_KINDS = ("vit_block", "decoder_block")
ROUTER = "mlp.router"  # the linear of a mixture of experts that scores all experts for each token
SELECTION_BIAS = f"{ROUTER}.selection.bias"  # its parameter that is added to scores where experts are chosen
EXPERT_LINEARS = ("linear_fc1", "linear_fc2")  # of each expert
# Of a block's own input: the linears in the order of their GEMMs. Of the embedding: what makes those of all blocks.
LAYER_INPUT_LINEARS, LAYER_INPUT_NORM = ("layer_input.gate", "layer_input.projection"), "layer_input.norm"
LAYER_INPUTS_TABLE, LAYER_INPUTS_LINEAR = "layer_inputs.table.weight", "layer_inputs.linear.weight"
LAYER_INPUTS_NORM = "layer_inputs.norm.weight"
OUTPUT_SCALE = "output_scale"  # parameter of a block that its output is multiplied by; it does not train
AVERAGE_SHIFT, AVERAGE_SCALE = "average_shift", "average_scale"  # of a projector that standardizes averages
WITHOUT_GRADIENT = (SELECTION_BIAS, OUTPUT_SCALE, AVERAGE_SHIFT, AVERAGE_SCALE)  # parameters that no loss trains
SHARED_EXPERT, SHARED_GATE = "mlp.shared", "mlp.shared_gate"
# Last layers of encoders. A resampler attends instead of merging tokens; a merger has a convolution and a gated MLP.
PROJECTOR_KINDS = ("projector", "resampler", "merger")
MERGE_LINEAR = "merge"  # of a projector with one
MERGER_LINEARS = ("proj", "linear_1", "linear_2")  # behind its convolution, in the order of their GEMMs
# Tokens for which the MLP of a recomputed block exists at once. Each chunk reads and writes the sums of gradients of
# its weights once more, in fp32: on an H100, as modelled, 3% of its GEMMs, whatever their widths.
MLP_CHUNK_TOKENS = 8192
DELTA_CHUNK_TOKENS = 64  # of a gated DeltaNet, as in the kernels of its authors (arXiv 2412.06464)
# Tokens times value heads of a gated DeltaNet for which everything exists at once that lies between its linears.
DELTA_HEAD_TOKENS = 2**17
COPIES_SUMMED_AT_ONCE = 4096  # of rows for experts, which lie once more beside all copies meanwhile


def num_pieces(kind: LayerKind) -> int:
    """Return the number of pieces of a layer: those of a block, 1 for every other layer."""
    return len(BLOCK_PIECES) if kind in BLOCK_KINDS else 1


@dataclass(frozen=True)
class LinearParts:
    """A joint linear, such as query, key and value, whose parts have adapters of their own.

    Its outputs repeat a pattern: `sizes[0]` rows of the first part, then `sizes[1]` of the second, and so on.
    """

    names: tuple[str, ...]  # of all parts inside the layer, such as `self_attention.linear_q`, in the order of the rows
    sizes: tuple[int, ...]
    adapted: tuple[str, ...] = ()  # those with an adapter, in this order

    def part_of_rows(self, num_rows: int, first: int = 0) -> list[str]:
        """Return the part that each of the outputs from `first` on belongs to."""
        pattern = [name for name, size in zip(self.names, self.sizes, strict=True) for _ in range(size)]
        return [pattern[row % len(pattern)] for row in range(first, first + num_rows)]

    def memberships(self, num_rows: int, first: int = 0) -> list[list[float]]:
        """Return (num_rows, adapted parts): 1 where an output from `first` on belongs to the part, else 0."""
        column_of_part = {name: [float(name == other) for other in self.adapted] for name in self.names}
        return [column_of_part[name] for name in self.part_of_rows(num_rows, first)]


@dataclass(frozen=True)
class LoraShape:
    """Low-rank adapters (LoRA, arXiv 2106.09685) on linears of one layer."""

    rank: int
    scale: float  # of an adapter's output: alpha / rank, or alpha / sqrt(rank)
    linears: tuple[str, ...]  # names of the linears inside the layer, in execution order
    # Of the linears whose parts have an A each; the others have one A for all of their outputs.
    parts: tuple[tuple[str, LinearParts], ...] = ()
    dropout: float = 0.0  # probability with which an input of an adapter counts as zero

    def parts_of(self, linear: str) -> LinearParts | None:
        """Return the parts of a linear that have adapters of their own; None where one adapter is on all of it."""
        return next((parts for name, parts in self.parts if name == linear), None)

    def width(self, linear: str) -> int:
        """Return the features between A and B of a linear: the rows of A."""
        parts = self.parts_of(linear)
        return self.rank * (1 if parts is None else len(parts.adapted))


@dataclass(frozen=True)
class Attention:
    """The mixer of a block in which tokens attend to each other. Heads are those of the whole layer."""

    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    causal: bool = False
    rotary: bool = False  # encoder: queries and keys are rotated by row and column; causal attention always rotates
    rotary_base: float = 10_000.0  # encoder: of the frequencies of this rotation
    rotary_alternates: bool = False  # encoder: rows and columns take turns among the frequencies of a head
    window_side: int = 0  # encoder: side in patches of the squares inside which tokens attend; 0: the whole item
    chunk: int = 0  # encoder: neighboring tokens inside which tokens attend; 0: the whole item
    window: int = 0  # causal: tokens that a token attends to, itself and earlier ones; 0: all of its sequence
    image_spans: bool = False  # causal: tokens of one image see each other in both directions
    qkv_bias: bool = False
    key_bias: bool = True  # with `qkv_bias`: whether the keys' part of the bias is other than zero
    qk_norm: bool = False  # norms over each head of queries and of keys
    joint_qk_norm: bool = False  # RMS norms over all heads of queries together, and of keys
    output_gate: bool = False  # the output is multiplied by the sigmoid of features that the first linear makes
    value_norm: bool = False  # norms without weights over each head of values
    keeps_kv: bool = False  # keys and values also travel on, to later blocks that read them
    reads_kv: bool = False  # keys and values are those of an earlier block with as many heads and the same window
    keys_as_values: bool = False  # values are what keys are made of

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the names of the linears inside the block, in the order of their GEMMs."""
        return "self_attention.linear_qkv", "self_attention.linear_proj"

    @property
    def divided_widths(self) -> tuple[int, ...]:
        """Return the widths that tensor parallelism divides."""
        return self.heads, self.kv_outputs

    @property
    def first_width(self) -> int:
        """Return the outputs of the first linear: queries and their gates, keys and values."""
        return self.inner_width * (1 + self.output_gate) + self.kv_outputs

    @property
    def kv_outputs(self) -> int:
        """Return the outputs of the first linear that keys and values are made of."""
        if self.reads_kv:
            return 0
        return self.kv_width // 2 if self.keys_as_values else self.kv_width

    @property
    def kv_side(self) -> "SideTensor":
        """Return what keys and values are beside the hidden states, for the later blocks that read them."""
        name = "keys and values in windows" if self.window else "keys and values"
        return SideTensor(name, self.kv_width, self.kv_heads)

    @property
    def inner_width(self) -> int:
        """Return the features of a token's queries, which are those of attention's output."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Return the features of a token's keys and values together."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def rotates(self) -> bool:
        """Return whether queries and keys are rotated by their positions."""
        return self.causal or self.rotary


@dataclass(frozen=True)
class SideTensor:
    """A tensor that travels beside the hidden states, from one layer of the LLM to later ones."""

    name: str
    width: int  # features of a token
    num_heads: int = 0  # of keys and values: the ranks of a TP group hold their heads apart


@dataclass(frozen=True)
class GatedDeltaNet:
    """The mixer of a block in which each head of a sample has a state that tokens change and read (linear attention).

    Gated DeltaNet (arXiv 2412.06464): queries, keys and values pass a short causal convolution; the output of each head
    is normalized and gated. Each key head serves as many value heads as any other.
    """

    key_heads: int = 0
    value_heads: int = 0
    key_head_dim: int = 0
    value_head_dim: int = 0
    taps: int = 0  # tokens that the convolution reads: a token and those before it

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the names of the linears inside the block, in the order of their GEMMs."""
        return "self_attention.linear_in", "self_attention.linear_proj"

    @property
    def divided_widths(self) -> tuple[int, ...]:
        """Return the widths that tensor parallelism divides."""
        return (self.key_heads,)

    @property
    def inner_width(self) -> int:
        """Return the features of a token's values, which are those of the output."""
        return self.value_heads * self.value_head_dim

    @property
    def convolved_width(self) -> int:
        """Return the features of a token that the convolution runs over: queries, keys and values."""
        return 2 * self.key_heads * self.key_head_dim + self.inner_width

    @property
    def first_width(self) -> int:
        """Return the outputs of the first linear: those that are convolved, gates, and two numbers for a value head."""
        return self.convolved_width + self.inner_width + 2 * self.value_heads


@dataclass(frozen=True)
class DenseMlp:
    """An MLP that computes every token with all of its weights."""

    ffn: int  # inner width
    gated: bool = False  # SwiGLU: two input projections

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the names of the linears inside the block, in the order of their GEMMs."""
        return "mlp.linear_fc1", "mlp.linear_fc2"

    @property
    def first_width(self) -> int:
        """Return the outputs of the first linear: those of the gate too, if there is one."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def divided_widths(self) -> tuple[int, ...]:
        """Return the inner widths that tensor parallelism divides."""
        return (self.ffn,)


@dataclass(frozen=True)
class RouterShape:
    """How a router scores experts and chooses among them, and what losses of its own it has."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalizes: bool = False  # the weights of a token's experts are divided by their sum
    weight_scale: float = 1.0  # and then multiplied by this
    has_bias: bool = False  # added to scores where experts are chosen, not to their weights
    updates_bias: bool = False  # every step, by the tokens of each expert in it
    groups: int = 1  # of experts
    top_groups: int = 1  # that experts of a token are chosen from
    balance_loss: float = 0.0  # coefficients
    z_loss: float = 0.0

    @property
    def reads_samples(self) -> bool:
        """Return whether training reads which sample a token belongs to."""
        return self.updates_bias or self.balance_loss > 0 or self.z_loss > 0


@dataclass(frozen=True)
class MoeMlp:
    """A mixture of experts: each token is computed by the `top_k` of `experts` gated MLPs that its router scores best.

    Outputs are weighted by the scores. No token is dropped, whatever the load of an expert. A shared expert computes
    every token.
    """

    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0  # inner width of each
    shared_ffn: int = 0  # inner width of the shared expert; 0: there is none
    shared_gate: bool = False  # the shared expert's output is multiplied by the sigmoid of a score of the token
    ep: int = 1  # replicas that hold the experts together, as many of them each
    load_spread: float = 0.0  # standard deviation of the experts' numbers of tokens in a pass, over their mean
    router: RouterShape = RouterShape()

    @property
    def held_experts(self) -> int:
        """Return the experts of one rank."""
        return self.experts // self.ep

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the names of the linears inside the block: the router's, the shared expert's, those of the experts."""
        shared = [f"{SHARED_EXPERT}.{linear}" for linear in EXPERT_LINEARS if self.shared_ffn]
        shared += [SHARED_GATE] * self.shared_gate
        of_experts = (f"mlp.experts.{i}.{linear}" for i in range(self.experts) for linear in EXPERT_LINEARS)
        return ROUTER, *shared, *of_experts

    @property
    def gated(self) -> bool:
        """Return True: experts are gated."""
        return True

    @property
    def first_width(self) -> int:
        """Return the outputs of an expert's first linear, gates and values."""
        return 2 * self.expert_ffn

    @property
    def ffn(self) -> int:
        """Return the inner width of an expert."""
        return self.expert_ffn

    @property
    def divided_widths(self) -> tuple[int, ...]:
        """Return the inner widths that tensor parallelism divides."""
        return (self.expert_ffn, *((self.shared_ffn,) if self.shared_ffn else ()))

    def column_ranks(self, hidden: int, tp: int) -> int:
        """Return among how many ranks of a TP group the columns of rows are divided that they exchange with others."""
        return tp if self.ep > 1 and hidden % tp == 0 else 1


Mixer: TypeAlias = Attention | GatedDeltaNet  # what moves information between tokens
Mlp: TypeAlias = DenseMlp | MoeMlp


@dataclass(frozen=True)
class MediaShape:
    """What a layer that embeds pixels, frames of audio or latents reads."""

    patch_features: int = 0  # patch_embed: 3 * frames of a patch * patch * patch; those of a latent's patch
    mel_bins: int = 0  # audio_embed: features of a frame
    partial_cells: int = 0  # audio_embed: frames that may be missing in the last token of a clip
    conv_channels: int = 0  # audio_embed: of three convolutions over time and mel bands; 0: of two over time
    max_side: int = 0  # patch_embed: side of the position table, in patches
    position_rows: int = 0  # learned position vectors
    position_neighbors: int = 4  # patch_embed: of these, what a patch is interpolated from where a table is stretched

    @property
    def frames_per_token(self) -> int:
        """Return the frames of audio that become one token."""
        return 8 if self.conv_channels else 2

    @property
    def conv_bands(self) -> tuple[int, int, int]:
        """Return the mel bands behind each of three convolutions, which halve them and round up."""
        first = (self.mel_bins + 1) // 2
        second = (first + 1) // 2
        return first, second, (second + 1) // 2


@dataclass(frozen=True)
class ProjectorShape:
    """How a projector makes features for the LLM of an encoder's tokens."""

    joins: int = 1  # tokens merged into one feature, a square of patches or neighbors in time
    pools: bool = False  # merged by their average instead of side by side
    merge_linear: bool = False  # merged tokens are mapped to the width of one by a linear without bias
    newline: bool = False  # a learned vector follows the features of each item
    features_per_item: int = 0  # resampler: its learned queries
    standardizes: bool = False  # a stored vector is subtracted from averages, which another multiplies
    plain_norm: bool = False  # its own norm has no weights
    layer_post_norm: bool = False  # with `rms_norm`: its encoder's last norm is a LayerNorm nevertheless


@dataclass(frozen=True)
class GeneratorShape:
    """What a generator's layer reads beside hidden states, and at which resolution it computes."""

    scale: int = 1  # U-Net: downsampling of each side; the layer has tokens / scale^2 positions
    context: int = 0  # outputs of the LLM that condition one item
    context_width: int = 0  # features of each of them
    time_width: int = 0  # features of the diffusion timestep


_NO_MEDIA, _NO_PROJECTOR, _NO_GENERATOR = MediaShape(), ProjectorShape(), GeneratorShape()  # of all other layers


@dataclass(frozen=True)
class LayerShape:
    """One layer. Widths are in features of the whole layer, before tensor parallelism divides them.

    A `vit_block` is the block of every encoder. A block has a mixer and an MLP; other kinds of layers have one only if
    they attend or have two linears around an activation function. Two kinds change the number of tokens: an
    `audio_embed` makes one token of some frames, a projector makes one feature of `joins` tokens. A resampler is a
    projector whose learned queries attend to the tokens of an item: its mixer says with which heads. A merger is a
    projector with a convolution before a gated MLP. Saved cost tables
    hold these fields under names of their own: see `costs.layer_fields`.
    """

    kind: LayerKind
    hidden: int  # width of the residual stream the layer reads
    out: int  # width of its output
    mixer: Mixer | None = None
    mlp: Mlp | None = None  # None for a projector that is one linear
    media: MediaShape = _NO_MEDIA
    projector: ProjectorShape = _NO_PROJECTOR
    generator: GeneratorShape = _NO_GENERATOR
    vocab: int = 0  # embedding, head: padded rows
    queries: int = 0  # embedding: learned vectors for the positions of an image to draw
    layer_input: int = 0  # features of a block's own input; embedding: of those that it makes, one for each block
    side_in: tuple[SideTensor, ...] = ()  # what comes beside the hidden states: a block's own input first
    side_out: tuple[SideTensor, ...] = ()  # what leaves beside them
    extra_tokens: int = 0  # tokens a patch_embed adds to each item (a class token), or a projector drops of each
    rms_norm: bool = False  # RMSNorm without bias, or LayerNorm with bias
    linear_bias: bool = False
    post_norms: bool = False  # norms over the outputs of mixer and MLP
    zero_centered_norms: bool = False  # RMS norms that multiply by 1 + weight, in fp32
    layer_scale: bool = False  # outputs of mixer and MLP are multiplied by a vector each
    output_scale: bool = False  # the block's output is multiplied by one number, which does not train
    caps_logits: bool = False  # head: logits pass a hyperbolic tangent
    norm_widths: tuple[int, ...] = ()  # patch_embed, projector: widths of their norms
    carried_in: int = 0  # tensors of width `hidden` that travel beside the hidden states into the layer (DeepStack)
    carried_out: int = 0  # tensors of width `out` that leave it so
    recomputes_activation: bool = False  # block: the output of the MLP's activation function is computed again
    offload: OffloadMode = "none"  # block: what waits for its backward in host memory
    trainable: bool = True  # whether anything trains: weights of the layer, or adapters on them
    frozen: frozenset[str] = frozenset()  # parameters, by their names inside the layer, that do not train
    lora: LoraShape | None = None
    trains_adapters_only: bool = False  # backward computes no gradient of the layer's own weights

    def __hash__(self) -> int:
        """Return the hash of all fields, computed once: the planner's caches look layers up all the time."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __getstate__(self) -> dict[str, object]:
        """Return the fields alone: another process hashes strings in another way."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def attention(self) -> Attention:
        """Return the mixer of a layer that attends."""
        assert isinstance(self.mixer, Attention), f"a {self.kind} without attention"
        return self.mixer

    @property
    def dense_mlp(self) -> DenseMlp:
        """Return the MLP of a layer that has a dense one."""
        assert isinstance(self.mlp, DenseMlp), f"a {self.kind} without a dense MLP"
        return self.mlp

    @property
    def trains_weights(self) -> bool:
        """Whether weights of the layer's own train."""
        return self.trainable and not self.trains_adapters_only

    @property
    def trains_experts(self) -> bool:
        """Whether weights of experts train, on any rank."""
        linears = self.mlp.linears if isinstance(self.mlp, MoeMlp) else ()
        return any(is_of_expert(linear) and f"{linear}.weight" not in self.frozen for linear in linears)

    @property
    def keeps_activation_output(self) -> bool:
        """Whether a gradient reads the output of a block's activation function: a weight's, or that of an adapter."""
        has_adapter = self.lora is not None and self.mlp is not None and self.mlp.linears[-1] in self.lora.linears
        return self.trains_weights or has_adapter

    @property
    def in_width(self) -> int:
        """Return the features of a token that enter the layer: hidden states, and what travels beside them."""
        return sum(self.in_widths)

    @property
    def out_width(self) -> int:
        """Return the features of a token that leave the layer."""
        return sum(self.out_widths)

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Return the features of each tensor that enters the layer: hidden states, those of DeepStack, and sides."""
        return (self.hidden,) * (1 + self.carried_in) + tuple(side.width for side in self.side_in)

    @property
    def out_widths(self) -> tuple[int, ...]:
        """Return the features of each tensor that leaves the layer."""
        return (self.out,) * (1 + self.carried_out) + tuple(side.width for side in self.side_out)

    @property
    def keeps_kv(self) -> bool:
        """Return whether keys and values of the block travel on."""
        return isinstance(self.mixer, Attention) and self.mixer.keeps_kv

    @property
    def keeps_output(self) -> bool:
        """Return whether the output of an encoder's block also travels on beside the hidden states."""
        return self.kind == "vit_block" and self.carried_out > self.carried_in

    @property
    def adds_carried(self) -> bool:
        """Return whether the LLM's block adds to its output the first of the tensors that came beside its input."""
        return self.kind == "decoder_block" and self.carried_out < self.carried_in

    def input_elements(self, tokens: int, num_items: int) -> int:
        """Return how many elements a stage that starts with this layer receives from the previous stage.

        These are the hidden states of a microbatch, and what travels beside them. Blocks of a diffusion transformer
        also receive the context, the embedded timestep and its modulation; the last layer receives the embedded
        timestep. The embedding receives no hidden states: it draws its own noise.
        """
        hidden_elements = 0 if self.kind == "dit_embed" else tokens * self.in_width
        return hidden_elements + self.conditioning_elements(num_items)

    def conditioning_elements(self, num_items: int) -> int:
        """Return the elements of `input_elements` that are not hidden states: context and timestep of each item."""
        context_elements = self.generator.context * self.generator.context_width
        if self.kind == "dit_embed":
            return num_items * context_elements
        if self.kind == "dit_block":
            return num_items * (context_elements + (NUM_MODULATION_VECTORS + 1) * self.hidden)
        if self.kind == "dit_out":
            return num_items * self.hidden
        return 0


def has_rms_post_norm(projector: LayerShape) -> bool:
    """Return whether the encoder's last norm, if a projector has it, is an RMSNorm."""
    return projector.rms_norm and not projector.projector.layer_post_norm


def norm_parameters(name: str, layer: LayerShape) -> tuple[str, ...]:
    """Return the names of the parameters of the layer's norm called `name`."""
    return (f"{name}.weight",) if layer.rms_norm else (f"{name}.weight", f"{name}.bias")


def adaptable_linears(layer: LayerShape) -> tuple[str, ...]:
    """Return the names of the linears of a layer that may have an adapter, in the order of its GEMMs.

    Of a mixture these are experts and shared expert. Its router and the gate of the latter are few numbers.
    """
    match layer.kind:
        case "vit_block" | "decoder_block":
            return tuple(linear for linear in block_linears(layer) if linear not in (ROUTER, SHARED_GATE))
        case "resampler":
            return "linear_kv", "linear_q", "linear_proj", "linear"
        case "merger":
            return MERGER_LINEARS
        case "projector":
            if layer.mlp is None:
                return ("linear",)
            projectors = ("", *(f"{name}." for name in deepstack_projectors(layer)))
            return tuple(f"{projector}{linear}" for linear in ("linear_1", "linear_2") for projector in projectors)
        case _:
            return ()


def joint_linears(layer: LayerShape) -> dict[str, LinearParts]:
    """Return the joint linears of a layer whose parts may have adapters of their own, by the linears' names.

    These are those of the LLM's blocks that `transformers` has apart. The part of queries holds their gates too.
    """
    if layer.kind != "decoder_block":
        return {}
    joint = {}
    if isinstance(layer.mixer, Attention):
        attention = layer.mixer
        queries = attention.inner_width * (1 + attention.output_gate) // attention.kv_heads
        sizes = (queries, *(attention.head_dim,) * (attention.kv_outputs // (attention.kv_heads * attention.head_dim)))
        names = tuple(f"self_attention.linear_{part}" for part in "qkv"[: len(sizes)])
        joint[attention.linears[0]] = LinearParts(names, sizes)
    mlp = layer.mlp
    if isinstance(mlp, DenseMlp) and mlp.gated:
        names = (f"{mlp.linears[0]}_gate", f"{mlp.linears[0]}_up")
        joint[mlp.linears[0]] = LinearParts(names, (mlp.ffn, mlp.ffn))
    return joint


def block_linears(block: LayerShape) -> tuple[str, ...]:
    """Return the names of all linears of a block: its mixer's, then those of its MLP."""
    return tuple(linear for part in (block.mixer, block.mlp) if part is not None for linear in part.linears)


def is_of_expert(parameter: str) -> bool:
    """Return whether a parameter, by any of its names, belongs to an expert, which a replica may not hold."""
    return ".experts." in parameter


def shard_holds_experts(shard: int, ep: int) -> bool:
    """Return whether `shard` replicas may hold one copy of a unit together, and `ep` replicas its experts."""
    return shard % ep == 0 or ep % shard == 0


def expert_shard(shard: int, ep: int) -> int:
    """Return how many replicas hold a copy of the same experts together, of units of which `shard` hold one copy.

    `ep` replicas hold different experts, so fewer are left for each. One of the two numbers divides the other.
    """
    return max(shard // ep, 1)


def deepstack_projectors(layer: LayerShape) -> tuple[str, ...]:
    """Return the names inside a projector of those for the outputs of earlier blocks."""
    return tuple(f"deepstack.{i}" for i in range(layer.carried_in))


def adapter_parameters(name: str) -> tuple[str, str]:
    """Return the names of the two matrices of the adapter on the linear called `name`."""
    return f"{name}.lora.a", f"{name}.lora.b"


def is_adapter(parameter: str) -> bool:
    """Return whether a parameter, by its name inside the layer or its plan-independent one, belongs to an adapter."""
    return parameter.endswith((".lora.a", ".lora.b"))


def linear_parameters(name: str, bias: bool) -> tuple[str, ...]:
    """Return the names of the parameters of a linear called `name`."""
    return (f"{name}.weight", f"{name}.bias") if bias else (f"{name}.weight",)
