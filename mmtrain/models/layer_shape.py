"""One layer as planner and cost models know it: kind and widths, no torch."""

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal[
    "patch_embed",
    "audio_embed",
    "vit_block",
    "projector",
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

# Pieces in which a transformer block can be run apart. Tensor parallelism communicates between `qkv` and what stands
# around it, likewise `up`; and behind `projection` and `down`: see `costs.pieces`.
BLOCK_PIECES = ("norm", "qkv", "attention", "projection", "norm_mlp", "up", "down", "add")


def num_pieces(kind: LayerKind) -> int:
    """Pieces of a layer: those of a block, or the layer itself."""
    return len(BLOCK_PIECES) if kind in ("vit_block", "decoder_block") else 1


@dataclass(frozen=True)
class LayerShape:
    """One layer. Widths are in features of the whole layer, before tensor parallelism divides them.

    A `vit_block` is the block of every encoder. Two layers change the number of tokens: an `audio_embed` reads two
    frames for each token it hands on, a projector joins `joins` tokens to one feature.
    """

    kind: LayerKind
    hidden: int  # width of the residual stream the layer reads
    out: int  # width it hands on
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0  # inner width of an MLP
    gated: bool = False  # SwiGLU: two input projections
    causal: bool = False
    rms_norm: bool = False  # RMSNorm without bias, or LayerNorm with bias
    linear_bias: bool = False
    qkv_bias: bool = False
    patch_features: int = 0  # patch_embed: 3 * patch * patch
    mel_bins: int = 0  # audio_embed: features of a frame
    max_side: int = 0  # patch_embed: side of the position table, in patches
    vocab: int = 0  # embedding, head: padded rows
    joins: int = 1  # projector: tokens joined to one feature: a square of patches, or neighbours in time
    extra_tokens: int = 0  # tokens a patch_embed adds to each item (a class token) and a projector drops
    position_rows: int = 0  # patch_embed, audio_embed: learned position vectors
    norm_widths: tuple[int, ...] = ()  # patch_embed, projector: widths of their layer norms
    scale: int = 1  # U-Net: its sides are those of the latent divided by this, its positions tokens / scale^2
    context: int = 0  # rows of the LLM that condition one item
    context_width: int = 0
    time_width: int = 0  # features of the timestep
    trainable: bool = True
    frozen: frozenset[str] = frozenset()  # parameters, by their names inside the layer, that do not train

    def input_elements(self, tokens: int, num_items: int) -> int:
        """Numbers that a stage which begins with this layer is handed by the stage before, for a microbatch.

        Hidden states; to a diffusion transformer's blocks also the context and how the timestep scales them. Its
        embedding reads noise of its own.
        """
        return (0 if self.kind == "dit_embed" else tokens * self.hidden) + self.conditioning_elements(num_items)

    def conditioning_elements(self, num_items: int) -> int:
        """Of them, the numbers beside the hidden states."""
        if self.kind == "dit_embed":
            return num_items * self.context * self.context_width
        return num_items * (self.context * self.context_width + 6 * self.hidden) if self.kind == "dit_block" else 0
