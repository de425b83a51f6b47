"""Model shapes: enough to cost, split and place a model, without torch.

A `ModelShape` lists its units; a `UnitShape` lists its layers in execution order; a plan cuts that list into stages.
Layer indices into `UnitShape.layers` are the `layers: [lo, hi)` of plans and stages, and part of parameter names.
"""

from dataclasses import dataclass
from typing import Literal

from mmtrain.models.freezing import mark_frozen
from mmtrain.models.generator_shapes import generator_layers
from mmtrain.models.layer_shape import BLOCK_PIECES, LayerShape, num_pieces
from mmtrain.recipe.model_settings import AudioSettings, EncoderSettings, LlmSettings, VisionSettings
from mmtrain.recipe.schema import Recipe

__all__ = [
    "BLOCK_PIECES",
    "LayerShape",
    "ModelEdge",
    "ModelShape",
    "UnitShape",
    "build_model_shape",
    "num_pieces",
    "padded_vocab",
]

VOCAB_MULTIPLE = 64  # the padded vocabulary must not depend on tp, or two plans would train two models


@dataclass(frozen=True)
class UnitShape:
    """One unit: its layers in execution order.

    The projector layer closes an encoder: final norm, class token dropped, pixel shuffle, MLP to the LLM's width.
    """

    name: str
    kind: Literal["encoder", "llm", "generator"]
    layers: tuple[LayerShape, ...]

    @property
    def is_splittable(self) -> bool:
        """Whether its layers may go to several stages, and each to tensor-parallel ranks.

        Those of a U-Net do not: skips join its ends, and its levels are no equal parts.
        """
        return all(layer.kind != "unet_embed" for layer in self.layers)

    @property
    def first_trainable(self) -> int | None:
        """Index of the first layer with a trainable parameter; below it nothing needs a backward."""
        return next((i for i, layer in enumerate(self.layers) if layer.trainable), None)


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

    units: tuple[UnitShape, ...]
    edges: tuple[ModelEdge, ...]
    tied_embeddings: bool = False

    def unit(self, name: str) -> UnitShape:
        """Return the unit called `name`."""
        return next(u for u in self.units if u.name == name)

    def edge(self, src: str, dst: str) -> ModelEdge:
        """Return an edge between two units; all edges between them carry the same rows."""
        return next(e for e in self.edges if (e.src, e.dst) == (src, dst))

    @property
    def encoders(self) -> tuple[str, ...]:
        """Names of the units that feed the LLM."""
        return tuple(u.name for u in self.units if u.kind == "encoder")


def padded_vocab(vocab: int) -> int:
    """Round the vocabulary up to a multiple that every tensor-parallel size in use divides."""
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def build_model_shape(recipe: Recipe) -> ModelShape:
    """Describe the recipe's model: units in data-flow order, encoders first, a generator last."""
    llm = _llm(recipe.model.llm)
    encoders: list[UnitShape] = []
    if recipe.model.vision is not None:
        encoders.append(_vision(recipe.model.vision, recipe.model.llm.hidden))
    if recipe.model.audio is not None:
        encoders.append(_audio(recipe.model.audio, recipe.model.llm.hidden))
    edges = [ModelEdge(unit.name, "llm", layer=0, width=recipe.model.llm.hidden) for unit in encoders]
    after: list[UnitShape] = []
    if recipe.model.generator is not None:
        layers = generator_layers(recipe.model.generator, recipe.model.llm.hidden)
        after.append(UnitShape("generator", "generator", layers))
        edges.append(ModelEdge("llm", "generator", layer=0, width=recipe.model.llm.hidden))
    return ModelShape(mark_frozen((*encoders, llm, *after), recipe), tuple(edges), recipe.model.llm.tie_embeddings)


def _vision(v: VisionSettings, llm_hidden: int) -> UnitShape:
    embed = LayerShape(
        "patch_embed",
        hidden=v.hidden,
        out=v.hidden,
        patch_features=3 * v.patch**2,
        max_side=v.max_side,
        extra_tokens=int(v.class_token),
        position_rows=2 * v.max_side if v.positions == "factorized" else v.max_side**2 + int(v.class_token),
        norm_widths=(v.hidden,) if v.pre_norm else (),
        linear_bias=v.patch_bias,
    )
    projector = LayerShape(
        "projector",
        hidden=v.hidden,
        out=llm_hidden,
        ffn=llm_hidden,
        joins=v.merge**2,
        extra_tokens=int(v.class_token),
        norm_widths=(v.hidden,) * v.post_norm + (v.hidden * v.merge**2,) * v.projector.norm,
        linear_bias=True,
    )
    return UnitShape("vision", "encoder", (embed, *[_vit_block(v, v.qkv_bias)] * v.layers, projector))


def _audio(a: AudioSettings, llm_hidden: int) -> UnitShape:
    embed = LayerShape(
        "audio_embed",
        hidden=a.hidden,
        out=a.hidden,
        mel_bins=a.mel_bins,
        position_rows=a.max_frames // 2 if a.positions == "learned" else 0,
        linear_bias=True,
    )
    projector = LayerShape(
        "projector",
        hidden=a.hidden,
        out=llm_hidden,
        ffn=llm_hidden,
        joins=a.downsample,
        norm_widths=(a.hidden,) + (a.hidden * a.downsample,) * a.projector.norm,
        linear_bias=True,
    )
    return UnitShape("audio", "encoder", (embed, *[_vit_block(a, qkv_bias=True)] * a.layers, projector))


def _vit_block(e: EncoderSettings, qkv_bias: bool) -> LayerShape:
    return LayerShape(
        "vit_block",
        hidden=e.hidden,
        out=e.hidden,
        heads=e.heads,
        kv_heads=e.heads,
        head_dim=e.hidden // e.heads,
        ffn=e.ffn,
        linear_bias=True,
        qkv_bias=qkv_bias,
    )


def _llm(m: LlmSettings) -> UnitShape:
    vocab = padded_vocab(m.vocab)
    embedding = LayerShape("embedding", hidden=m.hidden, out=m.hidden, vocab=vocab)
    block = LayerShape(
        "decoder_block",
        hidden=m.hidden,
        out=m.hidden,
        heads=m.heads,
        kv_heads=m.kv_heads or m.heads,
        head_dim=m.head_dim or m.hidden // m.heads,
        ffn=m.ffn,
        gated=m.mlp == "swiglu",
        causal=True,
        rms_norm=True,
        qkv_bias=m.qkv_bias,
    )
    head = LayerShape("head", hidden=m.hidden, out=vocab, vocab=vocab, rms_norm=True)
    return UnitShape("llm", "llm", (embedding, *[block] * m.layers, head))
