"""Arithmetic and bytes of the layers of an image generator: what `layer_arithmetic` is for all other layers.

A load's tokens are positions of the latents (patches, in a transformer), its sequences are images. Tensor parallelism
splits the heads and inner widths of a transformer's blocks, and nothing else. The noise that an embedding reads needs
no gradient; the context needs one while the LLM trains. A convolution is the GEMM of its output positions with kernel
x input channels, as in torch's FLOP counter.
"""

from mmtrain.costs.cost_model import TokenLoad
from mmtrain.models.shapes.model_shape import LayerShape

_KERNEL = 9  # elements of the kernel of every convolution: 3 x 3
GemmSides = tuple[int, int, int]  # m, n, k


def gemm_sides(layer: LayerShape, load: TokenLoad, tp: int = 1) -> tuple[GemmSides, ...]:
    """Return the GEMMs with weights that one of `tp` ranks computes in forward, in order."""
    t, images, wide, out = num_positions(layer, load), load.num_sequences, layer.hidden, layer.out
    rows = images * layer.generator.context
    match layer.kind:
        case "context_projector":
            return ((rows, out, wide),)
        case "unet_embed":
            return (
                (t, out, layer.media.patch_features),
                (images, layer.generator.time_width, out),
                (images, layer.generator.time_width, layer.generator.time_width),
            )
        case "unet_residual":
            gemms = ((t, out, _KERNEL * wide), (images, out, layer.generator.time_width), (t, out, _KERNEL * out))
            return gemms if wide == out else (*gemms, (t, out, wide))
        case "unet_attention":
            self_attention = [(t, wide, wide)] * 4  # queries, keys, values and output
            cross_attention = [(t, wide, wide), *[(rows, wide, layer.generator.context_width)] * 2, (t, wide, wide)]
            mlp = [(t, 2 * layer.dense_mlp.ffn, wide), (t, wide, layer.dense_mlp.ffn)]
            return (t, wide, wide), *self_attention, *cross_attention, *mlp, (t, wide, wide)
        case "unet_down" | "unet_up" | "unet_out":
            return ((t, out, _KERNEL * wide),)
        case "dit_embed":
            return (
                (t, out, layer.media.patch_features),
                (images, out, layer.generator.time_width),
                (images, out, out),
                (images, 6 * out, out),
            )
        case "dit_block":
            into, back = (t, wide // tp, wide), (t, wide, wide // tp)
            cross_attention = [into, *[(rows, wide // tp, layer.generator.context_width)] * 2, back]
            return (
                into,
                into,
                into,
                back,
                *cross_attention,
                (t, layer.dense_mlp.ffn // tp, wide),
                (t, wide, layer.dense_mlp.ffn // tp),
            )
        case _:
            assert layer.kind == "dit_out"
            return ((t, out, wide),)


def num_gemms_without_input_grad(layer: LayerShape) -> int:
    """Return how many of the first GEMMs read an input without gradient: the noise, and the embedded timestep."""
    return 2 if layer.kind in ("unet_embed", "dit_embed") else 0


def num_positions(layer: LayerShape, load: TokenLoad) -> int:
    """Return the number of positions that the layer computes: fewer on the coarser levels of a U-Net."""
    return load.tokens // layer.generator.scale**2


def query_key_pairs(layer: LayerShape, load: TokenLoad) -> int:
    """Return the number of query-key pairs: every position with those of its image, and with the image's context."""
    return load.sum_sq // layer.generator.scale**4 + num_positions(layer, load) * layer.generator.context


def num_parameters(layer: LayerShape, tp: int = 1) -> int:
    """Return the number of parameters that one of `tp` ranks holds."""
    wide, out, time = layer.hidden, layer.out, layer.generator.time_width
    match layer.kind:
        case "context_projector" | "dit_out":
            return wide * out + out + (2 * wide if layer.kind == "dit_out" else 0)  # with a shift and a scale
        case "unet_embed":
            return (layer.media.patch_features + 1) * out + (out + 1) * time + (time + 1) * time
        case "unet_residual":
            convolutions = (_KERNEL * wide + 1) * out + (_KERNEL * out + 1) * out
            return convolutions + 2 * wide + 2 * out + (time + 1) * out + ((wide + 1) * out if wide != out else 0)
        case "unet_attention":
            linears = 2 * (wide + 1) * wide  # into the block and out of it
            attention = 3 * wide**2 + wide**2 + 2 * wide * layer.generator.context_width + 2 * (wide + 1) * wide
            mlp = (wide + 1) * 2 * layer.dense_mlp.ffn + (layer.dense_mlp.ffn + 1) * wide
            return linears + attention + mlp + 4 * 2 * wide  # four norms
        case "unet_down" | "unet_up":
            return (_KERNEL * wide + 1) * out
        case "unet_out":
            return (_KERNEL * wide + 1) * out + 2 * wide
        case "dit_embed":
            return (layer.media.patch_features + 1) * out + (time + 1) * out + (out + 1) * out + (out + 1) * 6 * out
        case _:
            assert layer.kind == "dit_block"
            into = (
                4 * (wide + 1) * wide
                + 2 * (layer.generator.context_width + 1) * wide
                + (wide + 1) * layer.dense_mlp.ffn
            )
            back = 2 * wide * wide + layer.dense_mlp.ffn * wide
            return (into + back) // tp + 3 * wide + 6 * wide  # biases after `back`, and the block's modulation


def saved_elements(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Return how many numbers autograd saves for backward on one of `tp` ranks when nothing is recomputed."""
    t, images, wide, out = num_positions(layer, load), load.num_sequences, layer.hidden, layer.out
    context = images * layer.generator.context
    match layer.kind:
        case "context_projector":
            return context * wide
        case "unet_embed":
            return t * wide + images * (out + 3 * layer.generator.time_width)
        case "unet_residual":  # both sides of norm and SiLU before each convolution
            return 3 * t * (wide + out) + images * 2 * layer.generator.time_width
        case "unet_attention":  # inputs of norms and GEMMs; the gate, its GELU, what it gates, and their product
            return t * (15 * wide + 4 * layer.dense_mlp.ffn) + context * (layer.generator.context_width + 2 * wide)
        case "unet_down":
            return 4 * t * wide
        case "unet_up":
            return t * wide
        case "unet_out":
            return 3 * t * wide
        case "dit_embed":
            return t * layer.media.patch_features + images * (layer.generator.time_width + 3 * out)
        case "dit_block":  # norms' inputs and outputs, what is modulated, and what gates scale
            split = (
                t * (6 * wide + 2 * layer.dense_mlp.ffn) + context * 2 * wide
            )  # queries, keys, values, output of heads
            return t * 9 * wide + split // tp + context * layer.generator.context_width
        case _:
            return 3 * t * wide


def elementwise_elements(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Return how many numbers the element-wise work of a forward moves: norms, activations, residuals, resampling."""
    t, wide, out = num_positions(layer, load), layer.hidden, layer.out
    match layer.kind:
        case "context_projector":
            return 0
        case "unet_residual":
            return t * (4 * wide + 9 * out)
        case "unet_attention":
            return t * (17 * wide + 4 * layer.dense_mlp.ffn)
        case "dit_block":
            return t * (24 * wide + 2 * layer.dense_mlp.ffn // tp)
        case "unet_up":
            return 2 * t * wide
        case "unet_out" | "dit_out":
            return 4 * t * wide
        case _:
            return t * out


def input_rows(layer: LayerShape, load: TokenLoad) -> int:
    """Return the number of rows of width `hidden` that the layer reads, not counting the context."""
    if layer.kind == "context_projector":
        return load.num_sequences * layer.generator.context
    resampled = {"unet_down": 4 * num_positions(layer, load), "unet_up": num_positions(layer, load) // 4}
    return resampled.get(layer.kind, num_positions(layer, load))
