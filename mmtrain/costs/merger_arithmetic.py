"""Arithmetic and bytes of a merger: what `layer_arithmetic` is for all other layers.

Its convolution is a linear of merged tokens; behind it are a linear of the LLM's width, a layer norm and a gated MLP.
"""

from mmtrain.costs.cost_model import PassDirection, TokenLoad
from mmtrain.costs.part_records import FP32_BYTES, INDEX_BYTES, Gemm
from mmtrain.models.shapes.model_shape import LayerShape


def gemms(layer: LayerShape, rows: int, tp: int) -> tuple[Gemm, ...]:
    """Return the GEMMs with weights that one of `tp` ranks computes in forward for `rows` features.

    Those that may have an adapter come first, and the convolution's is the last one.
    """
    out, mlp = layer.out, layer.dense_mlp
    return (
        Gemm(rows, out, out // tp),
        Gemm(rows, mlp.first_width // tp, out),
        Gemm(rows, out, mlp.ffn // tp),
        Gemm(rows, out // tp, _merged_width(layer)),
    )


def num_parameters(layer: LayerShape, tp: int) -> int:
    """Return the number of parameters that one of `tp` ranks holds, those of the encoder's last norm left out."""
    out, mlp, bias = layer.out, layer.dense_mlp, int(layer.linear_bias)
    of_convolution = out * (_merged_width(layer) + 1)
    divided = of_convolution + out * out + mlp.first_width * (out + bias) + mlp.ffn * out
    return divided // tp + 2 * bias * out + 2 * out  # biases of linears with split inputs, and the inner norm


def saved_bytes(layer: LayerShape, load: TokenLoad, rows: int, element_bytes: int, tp: int) -> int:
    """Return the bytes that one of `tp` ranks keeps from forward to backward.

    These are inputs of both norms and of all linears, the inputs of GELU, and gates and values.
    """
    out, mlp = layer.out, layer.dense_mlp
    of_tokens = load.tokens * sum(layer.norm_widths)
    of_features = rows * (_merged_width(layer) + 3 * out + (out + mlp.first_width + mlp.ffn) // tp)
    statistics = 2 * FP32_BYTES * (load.tokens * len(layer.norm_widths) + rows)
    return element_bytes * (of_tokens + of_features) + statistics + 2 * INDEX_BYTES * load.tokens


def elementwise_elements(layer: LayerShape, load: TokenLoad, rows: int, tp: int) -> int:
    """Return how many numbers norms, the order of tokens, and activations move in forward."""
    mlp = layer.dense_mlp
    of_tokens = 2 * layer.hidden * (1 + len(layer.norm_widths)) * load.tokens
    return of_tokens + 4 * rows * layer.out + rows * (mlp.first_width + mlp.ffn) // tp


def reduced_elements(layer: LayerShape, rows: int, direction: PassDirection) -> int:
    """Return how many numbers tensor parallelism sums over ranks: outputs of two linears, or gradients of inputs."""
    return rows * (2 * layer.out if direction == "forward" else layer.out + _merged_width(layer))


def _merged_width(layer: LayerShape) -> int:
    """Return the features of a row that the convolution reads."""
    return layer.hidden if layer.projector.pools else layer.hidden * layer.projector.joins
