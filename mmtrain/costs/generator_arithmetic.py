"""What the layers of an image generator cost in arithmetic and bytes: `analytic` for those after the LLM.

A load's tokens are positions of the latents (patches, in a transformer), its sequences the images. Tensor-parallel
ranks share out the heads and inner widths of a transformer's blocks, nothing else. The noise that an embedding reads
needs no gradient; the context does, while the LLM trains. A convolution is the product of its output positions with
kernel x input channels, as torch's FLOP counter has it.
"""

from mmtrain.costs.cost_model import TokenLoad
from mmtrain.models.model_shape import LayerShape

_KERNEL = 9  # of every convolution: 3 x 3
GemmSides = tuple[int, int, int]  # (m, n, k) of a product


def gemm_sides(layer: LayerShape, load: TokenLoad, tp: int = 1) -> tuple[GemmSides, ...]:
    """Products with weights that one of `tp` ranks computes in forward, in order."""
    t, images, wide, out = num_positions(layer, load), load.num_sequences, layer.hidden, layer.out
    rows = images * layer.context
    match layer.kind:
        case "context_projector":
            return ((rows, out, wide),)
        case "unet_embed":
            return (
                (t, out, layer.patch_features),
                (images, layer.time_width, out),
                (images, layer.time_width, layer.time_width),
            )
        case "unet_residual":
            both = ((t, out, _KERNEL * wide), (images, out, layer.time_width), (t, out, _KERNEL * out))
            return both if wide == out else (*both, (t, out, wide))
        case "unet_attention":
            own = [(t, wide, wide)] * 4  # queries, keys, values and output
            crossed = [(t, wide, wide), *[(rows, wide, layer.context_width)] * 2, (t, wide, wide)]
            mlp = [(t, 2 * layer.ffn, wide), (t, wide, layer.ffn)]
            return (t, wide, wide), *own, *crossed, *mlp, (t, wide, wide)
        case "unet_down" | "unet_up" | "unet_out":
            return ((t, out, _KERNEL * wide),)
        case "dit_embed":
            return (
                (t, out, layer.patch_features),
                (images, out, layer.time_width),
                (images, out, out),
                (images, 6 * out, out),
            )
        case "dit_block":
            into, back = (t, wide // tp, wide), (t, wide, wide // tp)
            crossed = [into, *[(rows, wide // tp, layer.context_width)] * 2, back]
            return into, into, into, back, *crossed, (t, layer.ffn // tp, wide), (t, wide, layer.ffn // tp)
        case _:
            assert layer.kind == "dit_out"
            return ((t, out, wide),)


def num_gemms_without_input_grad(layer: LayerShape) -> int:
    """How many of the first products read nothing that could need a gradient: noise, and waves of the timestep."""
    return 2 if layer.kind in ("unet_embed", "dit_embed") else 0


def num_positions(layer: LayerShape, load: TokenLoad) -> int:
    """Places at which the layer works: fewer on the coarser levels of a U-Net."""
    return load.tokens // layer.scale**2


def query_key_pairs(layer: LayerShape, load: TokenLoad) -> int:
    """Query-key pairs: every position with those of its image, and with the image's context."""
    if not layer.heads:
        return 0
    return load.sum_sq // layer.scale**4 + num_positions(layer, load) * layer.context


def num_parameters(layer: LayerShape, tp: int = 1) -> int:
    """Learned numbers that one of `tp` ranks holds."""
    wide, out, time = layer.hidden, layer.out, layer.time_width
    match layer.kind:
        case "context_projector" | "dit_out":
            return wide * out + out + (2 * wide if layer.kind == "dit_out" else 0)  # with a shift and a scale
        case "unet_embed":
            return (layer.patch_features + 1) * out + (out + 1) * time + (time + 1) * time
        case "unet_residual":
            convolutions = (_KERNEL * wide + 1) * out + (_KERNEL * out + 1) * out
            return convolutions + 2 * wide + 2 * out + (time + 1) * out + ((wide + 1) * out if wide != out else 0)
        case "unet_attention":
            linears = 2 * (wide + 1) * wide  # into the block and out of it
            attention = 3 * wide**2 + wide**2 + 2 * wide * layer.context_width + 2 * (wide + 1) * wide
            mlp = (wide + 1) * 2 * layer.ffn + (layer.ffn + 1) * wide
            return linears + attention + mlp + 4 * 2 * wide  # four norms
        case "unet_down" | "unet_up":
            return (_KERNEL * wide + 1) * out
        case "unet_out":
            return (_KERNEL * wide + 1) * out + 2 * wide
        case "dit_embed":
            return (layer.patch_features + 1) * out + (time + 1) * out + (out + 1) * out + (out + 1) * 6 * out
        case _:
            assert layer.kind == "dit_block"
            into = 4 * (wide + 1) * wide + 2 * (layer.context_width + 1) * wide + (wide + 1) * layer.ffn
            back = 2 * wide * wide + layer.ffn * wide
            return (into + back) // tp + 3 * wide + 6 * wide  # biases after `back`, and its share of the modulation


def saved_elements(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Numbers kept by one of `tp` ranks for backward when nothing is recomputed, counted as autograd saves them."""
    t, images, wide, out = num_positions(layer, load), load.num_sequences, layer.hidden, layer.out
    context = images * layer.context
    match layer.kind:
        case "context_projector":
            return context * wide
        case "unet_embed":
            return t * wide + images * (out + 3 * layer.time_width)
        case "unet_residual":  # both sides of norm and SiLU before each convolution
            return 3 * t * (wide + out) + images * 2 * layer.time_width
        case "unet_attention":  # norms' and products' inputs; gate, its GELU, what it gates and their product
            return t * (15 * wide + 4 * layer.ffn) + context * (layer.context_width + 2 * wide)
        case "unet_down":
            return 4 * t * wide
        case "unet_up":
            return t * wide
        case "unet_out":
            return 3 * t * wide
        case "dit_embed":
            return t * layer.patch_features + images * (layer.time_width + 3 * out)
        case "dit_block":  # norms' inputs and outputs, what is modulated, and what gates scale
            split = t * (6 * wide + 2 * layer.ffn) + context * 2 * wide  # queries, keys, values, what heads give
            return t * 9 * wide + split // tp + context * layer.context_width
        case _:
            return 3 * t * wide


def elementwise_elements(layer: LayerShape, load: TokenLoad, tp: int = 1) -> int:
    """Numbers read and written in the element-wise work of a forward: norms, activations, residuals, resampling."""
    t, wide, out = num_positions(layer, load), layer.hidden, layer.out
    match layer.kind:
        case "context_projector":
            return 0
        case "unet_residual":
            return t * (4 * wide + 9 * out)
        case "unet_attention":
            return t * (17 * wide + 4 * layer.ffn)
        case "dit_block":
            return t * (24 * wide + 2 * layer.ffn // tp)
        case "unet_up":
            return 2 * t * wide
        case "unet_out" | "dit_out":
            return 4 * t * wide
        case _:
            return t * out


def input_rows(layer: LayerShape, load: TokenLoad) -> int:
    """Rows of `hidden` numbers that the layer reads, the context apart."""
    if layer.kind == "context_projector":
        return load.num_sequences * layer.context
    resampled = {"unet_down": 4 * num_positions(layer, load), "unet_up": num_positions(layer, load) // 4}
    return resampled.get(layer.kind, num_positions(layer, load))
