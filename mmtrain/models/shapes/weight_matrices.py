"""Which weights Muon trains, and of which matrices their rows are: those of queries, keys and values, gate and up.

Muon orthogonalizes the linears of blocks and projectors. Embeddings, the head, norms, biases, convolutions, learned
vectors, routers, the gates of shared experts and linears of single blocks' inputs are left to AdamW, and so are
generators.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from mmtrain.models.shapes.layer_shape import (
    EXPERT_LINEARS,
    SHARED_EXPERT,
    Attention,
    DenseMlp,
    GatedDeltaNet,
    LayerShape,
    MoeMlp,
    deepstack_projectors,
)

NamedMatrices = Iterator[tuple[str, "WeightMatrices"]]  # with names of linears inside their layer


@dataclass(frozen=True)
class WeightMatrices:
    """The matrices that one weight (outputs, inputs) holds.

    Its rows are `groups` equal blocks, one after the other, and a block has `widths` rows of each matrix.
    """

    inputs: int  # columns
    widths: tuple[int, ...]
    groups: int = 1

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Return rows and columns of each matrix."""
        return tuple((self.groups * width, self.inputs) for width in self.widths)

    @property
    def num_weights(self) -> int:
        """Return the numbers of all matrices together."""
        return self.groups * sum(self.widths) * self.inputs


def weight_matrices(layer: LayerShape) -> dict[str, WeightMatrices]:
    """Return the weights of a layer that Muon trains, by the names of their linears inside the layer."""
    match layer.kind:
        case "vit_block" | "decoder_block":
            return dict(chain(_mixer_matrices(layer), _mlp_matrices(layer)))
        case "projector" | "resampler" | "merger":
            return dict(_projector_matrices(layer))
        case _:
            return {}


def _mixer_matrices(layer: LayerShape) -> NamedMatrices:
    mixer, hidden = layer.mixer, layer.hidden
    match mixer:
        case Attention():
            queries = mixer.inner_width // mixer.kv_heads
            gates = (queries,) * mixer.output_gate
            # Of keys and of values; neither in a block that reads those of an earlier one.
            num_kv = mixer.kv_outputs // (mixer.kv_heads * mixer.head_dim)
            widths = (queries, *gates, *(mixer.head_dim,) * num_kv)
            num_groups = mixer.kv_heads
        case GatedDeltaNet():
            ratio = mixer.value_heads // mixer.key_heads
            values = ratio * mixer.value_head_dim
            # Queries, keys, values, gates, and rates and steps of the states.
            widths = (mixer.key_head_dim, mixer.key_head_dim, values, values, ratio, ratio)
            num_groups = mixer.key_heads
        case None:
            raise AssertionError("blocks have a mixer")
    first, last = mixer.linears
    yield first, WeightMatrices(hidden, widths, num_groups)
    yield last, WeightMatrices(mixer.inner_width, (hidden,))


def _mlp_matrices(layer: LayerShape) -> NamedMatrices:
    mlp, hidden = layer.mlp, layer.hidden
    match mlp:
        case DenseMlp():
            first, last = mlp.linears
            yield first, WeightMatrices(hidden, (mlp.ffn,) * (1 + mlp.gated))
            yield last, WeightMatrices(mlp.ffn, (hidden,))
        case MoeMlp():
            experts = [(f"mlp.experts.{number}", mlp.expert_ffn) for number in range(mlp.experts)]
            shared = [(SHARED_EXPERT, mlp.shared_ffn)] if mlp.shared_ffn else []
            first, last = EXPERT_LINEARS
            for expert, ffn in (*experts, *shared):
                yield f"{expert}.{first}", WeightMatrices(hidden, (ffn, ffn))
                yield f"{expert}.{last}", WeightMatrices(ffn, (hidden,))
        case None:
            raise AssertionError("blocks have an MLP")


def _projector_matrices(layer: LayerShape) -> NamedMatrices:
    hidden, out = layer.hidden, layer.out
    if layer.kind == "resampler":
        head_dim = layer.attention.head_dim
        yield "linear_q", WeightMatrices(hidden, (hidden,))
        yield "linear_kv", WeightMatrices(hidden, (head_dim, head_dim), hidden // head_dim)
        yield "linear_proj", WeightMatrices(hidden, (hidden,))
    if layer.kind == "merger":
        ffn = layer.dense_mlp.ffn
        yield "proj", WeightMatrices(out, (out,))
        yield "linear_1", WeightMatrices(out, (ffn, ffn))
        yield "linear_2", WeightMatrices(ffn, (out,))
        return
    merged_width = hidden * (1 if layer.projector.pools else layer.projector.joins)
    if layer.mlp is None:
        yield "linear", WeightMatrices(merged_width, (out,))
        return
    ffn = layer.dense_mlp.ffn
    for projector in ("", *(f"{name}." for name in deepstack_projectors(layer))):
        inputs = hidden * layer.projector.joins if projector else merged_width
        yield f"{projector}linear_1", WeightMatrices(inputs, (ffn,))
        yield f"{projector}linear_2", WeightMatrices(ffn, (out,))
