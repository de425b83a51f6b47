"""Model shapes: enough to cost, split and place a model, without torch.

A `ModelShape` lists its units; a `UnitShape` lists its layers in execution order; a plan cuts that list into stages.
Layer indices into `UnitShape.layers` are the `layers: [lo, hi)` of plans and stages, and part of parameter names.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mmtrain.models.shapes.encoder_shapes import ENCODER_SHAPES
from mmtrain.models.shapes.freezing import mark_frozen
from mmtrain.models.shapes.generator_shapes import generator_layers
from mmtrain.models.shapes.layer_shape import (
    BLOCK_KINDS,
    BLOCK_PIECES,
    LAYER_INPUTS_TABLE,
    MLP_CHUNK_TOKENS,
    Attention,
    DenseMlp,
    GatedDeltaNet,
    LayerShape,
    Mixer,
    MoeMlp,
    OffloadMode,
    RouterShape,
    SideTensor,
    adaptable_linears,
    num_pieces,
)
from mmtrain.models.shapes.loss_chunks import LossSizes
from mmtrain.models.shapes.unit_shape import UnitShape
from mmtrain.recipe.settings.block_settings import SharedKvSettings
from mmtrain.recipe.settings.llm_settings import LlmSettings, MoeSettings
from mmtrain.recipe.settings.schema import Recipe

__all__ = [
    "BLOCK_KINDS",
    "BLOCK_PIECES",
    "MLP_CHUNK_TOKENS",
    "LayerShape",
    "LossSizes",
    "ModelEdge",
    "ModelShape",
    "OffloadMode",
    "UnitShape",
    "adaptable_linears",
    "build_model_shape",
    "num_pieces",
    "padded_vocab",
]

# Of routers that train with a balancing loss: of 64 experts the fullest has 0.72 above the mean (arXiv 2408.15664,
# table 2), which is 2.34 deviations.
DEFAULT_EXPERT_SPREAD = 0.3
VOCAB_MULTIPLE = 64  # the padded vocabulary must not depend on tp, or two plans would train two models

_TOKEN_MATRICES = {"embedding": ("table.weight", LAYER_INPUTS_TABLE), "head": ("output.weight",)}  # by kind of layer


@dataclass(frozen=True)
class ModelEdge:
    """Data that flows from the end of unit `src` into layer `layer` of unit `dst`: rows of `width` features."""

    src: str
    dst: str
    layer: int
    width: int


@dataclass(frozen=True)
class ModelShape:
    """All units of a model and the edges between them."""

    units: tuple[UnitShape, ...]  # in data-flow order
    edges: tuple[ModelEdge, ...]
    tied_embeddings: bool = False

    def unit(self, name: str) -> UnitShape:
        """Return the unit called `name`."""
        return next(u for u in self.units if u.name == name)

    def edge(self, src: str, dst: str) -> ModelEdge:
        """Return an edge between two units; all edges between them carry the same rows."""
        return next(e for e in self.edges if (e.src, e.dst) == (src, dst))

    @property
    def feature_widths(self) -> dict[str, int]:
        """Return how many elements a feature of each other unit has that it exchanges with the LLM, on all edges."""
        widths: dict[str, int] = {}
        for edge in self.edges:
            unit = edge.dst if edge.src == "llm" else edge.src
            widths[unit] = widths.get(unit, 0) + edge.width
        return widths

    @property
    def token_matrices(self) -> dict[str, bool]:
        """Return the parameters that have a row for each token, by plan-independent name, and whether they train."""
        llm = self.unit("llm")
        return {
            f"{llm.name}.layers.{i}.{name}": name not in layer.frozen
            for i, layer in enumerate(llm.layers)
            for name in _TOKEN_MATRICES.get(layer.kind, ())
            if not (layer.kind == "head" and self.tied_embeddings) and (name != LAYER_INPUTS_TABLE or layer.layer_input)
        }

    @property
    def encoders(self) -> tuple[str, ...]:
        """Return the names of the units that feed the LLM."""
        return tuple(u.name for u in self.units if u.kind == "encoder")


def padded_vocab(vocab: int) -> int:
    """Round the vocabulary up to a multiple that every tensor-parallel degree in use divides."""
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def build_model_shape(recipe: Recipe) -> ModelShape:
    """Describe the recipe's model: units in data-flow order, encoders first, a generator last.

    Raises:
        RecipeError: a pattern of `train.freeze` matches no parameter.
    """
    model = recipe.model
    llm_hidden = model.llm.hidden
    units: list[UnitShape] = []
    edges: list[ModelEdge] = []
    for name, settings in model.all_encoders.items():
        layers = ENCODER_SHAPES[settings.modality].layers(settings, llm_hidden)
        units.append(UnitShape(name, "encoder", layers))
        edges.append(ModelEdge(name, "llm", layer=0, width=layers[-1].out_width))
    num_added = max((unit.layers[-1].carried_out for unit in units), default=0)
    num_queries = 0 if model.generator is None else model.generator.context_tokens
    llm_layers = _llm_layers(model.llm, num_added, num_queries)
    units.append(UnitShape("llm", "llm", llm_layers, is_guest=model.guest))
    if model.generator is not None:
        units.append(UnitShape("generator", "generator", generator_layers(model.generator, llm_hidden)))
        edges.append(ModelEdge("llm", "generator", layer=0, width=llm_hidden))
    shape = ModelShape(mark_frozen(units, recipe), tuple(edges), model.llm.tie_embeddings)
    shape = with_expert_parallelism(shape, recipe.parallel.llm.ep or 1)
    stated = recipe.parallel.llm.expert_spread
    shape = with_expert_spread(shape, DEFAULT_EXPERT_SPREAD if stated == "auto" else stated)
    fixed = [u.name for u in units if recipe.parallel.of(u.name).runs_activations_again is True]
    modes = {u.name: recipe.parallel.of(u.name).offload for u in units}
    offload: dict[str, OffloadMode] = {name: mode for name, mode in modes.items() if mode != "auto"}
    return with_offload(with_recomputed_activations(shape, fixed) if fixed else shape, offload)


def with_recomputed_activations(shape: ModelShape, units: Collection[str]) -> ModelShape:
    """Return the model with blocks that compute their activation functions again, in these units and no others.

    Frozen blocks that keep no output of theirs have nothing to compute again.
    """

    def changed(unit: str, block: LayerShape) -> LayerShape:
        return replace(block, recomputes_activation=unit in units and block.keeps_activation_output)

    return _with_blocks(shape, changed)


def with_expert_parallelism(shape: ModelShape, ep: int) -> ModelShape:
    """Return the model with each mixture's experts on `ep` replicas."""

    def changed(_: str, block: LayerShape) -> LayerShape:
        return replace(block, mlp=replace(block.mlp, ep=ep)) if isinstance(block.mlp, MoeMlp) else block

    return _with_blocks(shape, changed)


def with_expert_spread(shape: ModelShape, spread: float) -> ModelShape:
    """Return the model whose experts have numbers of tokens with this standard deviation over their mean."""

    def changed(_: str, block: LayerShape) -> LayerShape:
        return replace(block, mlp=replace(block.mlp, load_spread=spread)) if isinstance(block.mlp, MoeMlp) else block

    return _with_blocks(shape, changed)


def with_offload(shape: ModelShape, modes: Mapping[str, OffloadMode]) -> ModelShape:
    """Return the model whose blocks keep in host memory what `modes` says by unit, nothing in other units."""
    return _with_blocks(shape, lambda unit, block: replace(block, offload=modes.get(unit, "none")))


def _with_blocks(shape: ModelShape, changed: Callable[[str, LayerShape], LayerShape]) -> ModelShape:
    """Return the model with what `changed` makes of each block, by its unit's name; equal blocks stay one object."""
    units = []
    for unit in shape.units:
        blocks = (layer for layer in dict.fromkeys(unit.layers) if layer.kind in BLOCK_KINDS)
        marked = {block: changed(unit.name, block) for block in blocks}
        units.append(replace(unit, layers=tuple(marked.get(layer, layer) for layer in unit.layers)))
    return replace(shape, units=tuple(units))


def unit_offload(unit: UnitShape) -> OffloadMode:
    """Return what the blocks of a unit keep in host memory."""
    return next((layer.offload for layer in unit.layers if layer.kind in BLOCK_KINDS), "none")


def _llm_layers(settings: LlmSettings, num_added: int, num_queries: int) -> tuple[LayerShape, ...]:
    """Describe the layers of the LLM, whose first `num_added` blocks add outputs of encoder blocks (DeepStack).

    num_queries: positions of an image that a generator draws, each of which has a learned embedding.
    """
    vocab, hidden = padded_vocab(settings.vocab), settings.hidden
    embedding = LayerShape("embedding", hidden, hidden, vocab=vocab, carried_out=num_added, queries=num_queries)
    attention = Attention(
        heads=settings.heads,
        kv_heads=settings.kv_heads or settings.heads,
        head_dim=settings.head_dim or settings.hidden // settings.heads,
        causal=True,
        image_spans=settings.image_attention == "bidirectional",
        qkv_bias=settings.qkv_bias,
        qk_norm=settings.qk_norm,
        output_gate=settings.attention_gate,
        value_norm=settings.value_norm,
    )
    block = LayerShape(
        "decoder_block",
        hidden=settings.hidden,
        out=settings.hidden,
        mixer=attention,
        mlp=DenseMlp(settings.ffn, gated=settings.mlp != "gelu"),
        rms_norm=True,
        post_norms=settings.post_norms,
        zero_centered_norms=settings.zero_centered_norms,
        output_scale=settings.block_scales,
    )
    other = replace(block, mixer=_limited_mixer(settings, attention))
    if (full := settings.full_attention) is not None:
        kv_heads = full.kv_heads or attention.kv_heads
        of_full = replace(attention, kv_heads=kv_heads, head_dim=full.head_dim, keys_as_values=full.keys_as_values)
        block = replace(block, mixer=of_full)
    blocks = [block if i in settings.full_attention_blocks else other for i in range(settings.layers)]
    if (moe := settings.moe) is not None:
        mixture = _mixture(moe)
        blocks = [shape if i in moe.dense_blocks else replace(shape, mlp=mixture) for i, shape in enumerate(blocks)]
    if settings.shared_kv is not None:
        blocks = _with_shared_kv(blocks, settings.shared_kv)
    if (inputs := settings.per_layer_embeddings) is not None:
        embedding = replace(embedding, layer_input=inputs.width)
        blocks = [replace(shape, layer_input=inputs.width) for shape in blocks]
    embedding, blocks = _with_sides(embedding, blocks)
    for i in range(num_added):
        blocks[i] = replace(blocks[i], carried_in=num_added - i, carried_out=num_added - i - 1)
    head = LayerShape(
        "head",
        hidden=settings.hidden,
        out=vocab,
        vocab=vocab,
        rms_norm=True,
        zero_centered_norms=settings.zero_centered_norms,
        caps_logits=settings.logit_cap is not None,
    )
    return (embedding, *blocks, head)


def _with_shared_kv(blocks: Sequence[LayerShape], shared: SharedKvSettings) -> list[LayerShape]:
    """Let the last blocks read keys and values that the last block before them of the same window keeps."""
    first = len(blocks) - shared.blocks
    last_of_window = {block.attention.window: number for number, block in enumerate(blocks[:first])}
    read = {block.attention.window for block in blocks[first:]}
    marked = []
    for number, block in enumerate(blocks):
        attention = block.attention
        if number >= first:
            mlp = block.dense_mlp if shared.ffn is None else replace(block.dense_mlp, ffn=shared.ffn)
            block = replace(block, mixer=replace(attention, reads_kv=True, keys_as_values=False), mlp=mlp)
        elif attention.window in read and last_of_window[attention.window] == number:
            block = replace(block, mixer=replace(attention, keeps_kv=True))
        marked.append(block)
    return marked


def _with_sides(embedding: LayerShape, blocks: Sequence[LayerShape]) -> tuple[LayerShape, list[LayerShape]]:
    """State what travels beside the hidden states into and out of each layer: all that a later block reads."""
    sides: tuple[SideTensor, ...] = ()  # behind the block
    placed: list[LayerShape] = []
    for number, block in reversed([*enumerate(blocks)]):
        own = (SideTensor(f"input {number}", block.layer_input),) if block.layer_input else ()
        entering = sides
        if isinstance(block.mixer, Attention) and (block.mixer.reads_kv or block.mixer.keeps_kv):
            kv = block.mixer.kv_side
            entering = tuple(side for side in sides if side != kv) + (kv,) * block.mixer.reads_kv
        placed.append(replace(block, side_in=(*own, *entering), side_out=sides))
        sides = (*own, *entering)
    return replace(embedding, side_out=sides), placed[::-1]


def _limited_mixer(settings: LlmSettings, attention: Attention) -> Mixer:
    """Return the mixer of blocks that have no full attention if the recipe states another."""
    if (delta_net := settings.delta_net) is None:
        return replace(attention, window=settings.window or 0, image_spans=settings.image_attention != "causal")
    return GatedDeltaNet(
        key_heads=delta_net.key_heads,
        value_heads=delta_net.value_heads,
        key_head_dim=delta_net.key_head_dim,
        value_head_dim=delta_net.value_head_dim,
        taps=delta_net.taps,
    )


def _mixture(moe: MoeSettings) -> MoeMlp:
    """Describe a mixture of experts."""
    router = RouterShape(
        scores=moe.scores,
        normalizes=moe.normalize,
        weight_scale=moe.weight_scale,
        has_bias=moe.selection_bias,
        groups=moe.groups,
        top_groups=moe.top_groups,
        balance_loss=moe.balance_loss,
        z_loss=moe.z_loss,
    )
    return MoeMlp(moe.experts, moe.top_k, moe.ffn, moe.shared_ffn or 0, moe.shared_gate, router=router)
