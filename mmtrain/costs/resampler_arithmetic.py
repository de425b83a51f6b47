"""Arithmetic and bytes of a resampler: what `layer_arithmetic` is for all other layers.

Its learned queries are projected once for all items; then each item has them as rows of its own, and they attend to the
item's tokens. Tensor parallelism splits heads, and the inputs of the last linear.
"""

from mmtrain.costs.block_arithmetic import resampled_tokens
from mmtrain.costs.cost_model import PassDirection, TokenLoad
from mmtrain.costs.part_records import FP32_BYTES, INDEX_BYTES, Gemm
from mmtrain.models.shapes.model_shape import LayerShape

_NUM_OWN_NORMS = 2  # of queries and of attention's output; those before them are of the encoder's tokens


def num_features(layer: LayerShape, load: TokenLoad) -> int:
    """Return the number of features for the LLM, which are rows of queries."""
    return load.num_sequences * layer.projector.features_per_item


def gemms(layer: LayerShape, load: TokenLoad, tp: int) -> tuple[Gemm, ...]:
    """Return the GEMMs with weights that one of `tp` ranks computes in forward; the first reads tokens."""
    h, rows = layer.hidden, num_features(layer, load)
    return (
        Gemm(resampled_tokens(layer, load), 2 * h // tp, h),
        Gemm(layer.projector.features_per_item if rows else 0, h // tp, h),
        Gemm(rows, h, h // tp),
        Gemm(rows, layer.out, h // tp),
    )


def num_parameters(layer: LayerShape, tp: int) -> int:
    """Return the number of parameters that one of `tp` ranks holds, those of norms left out."""
    h, out, bias = layer.hidden, layer.out, int(layer.linear_bias)
    divided = 3 * h * (h + bias) + h * h + h * out
    return divided // tp + bias * (h + out) + layer.projector.features_per_item * h


def saved_bytes(layer: LayerShape, load: TokenLoad, element_bytes: int, tp: int, sorts_sequences: bool) -> int:
    """Return the bytes that one of `tp` ranks keeps from forward to backward.

    These are inputs of norms and linears, keys and values, queries of every item, and attention's output.

    sorts_sequences: see `layer_arithmetic.activation_bytes`; then attention's output is kept in both orders.
    """
    h, t, rows = layer.hidden, load.tokens, num_features(layer, load)
    tokens, num_norms = resampled_tokens(layer, load), len(layer.norm_widths) - _NUM_OWN_NORMS
    of_tokens = num_norms * t * h + tokens * (h + 2 * h // tp)
    of_queries = rows * (h + (3 + int(sorts_sequences)) * h // tp) + 2 * layer.projector.features_per_item * h
    statistics = 2 * FP32_BYTES * (num_norms * t + rows) + FP32_BYTES * rows * layer.attention.heads // tp
    return element_bytes * (of_tokens + of_queries) + statistics + 2 * INDEX_BYTES * t


def elementwise_elements(layer: LayerShape, load: TokenLoad, tp: int) -> int:
    """Return how many numbers norms, and copies of queries and of attention's output, move in forward."""
    num_norms = len(layer.norm_widths) - _NUM_OWN_NORMS
    rows = num_features(layer, load)
    return 2 * layer.hidden * (num_norms * load.tokens + rows) + 4 * rows * layer.hidden // tp


def reduced_elements(layer: LayerShape, load: TokenLoad, direction: PassDirection) -> int:
    """Return how many numbers tensor parallelism sums over ranks: outputs of two linears, or gradients of inputs."""
    rows = num_features(layer, load)
    if direction == "forward":
        return rows * (layer.hidden + layer.out)
    return (resampled_tokens(layer, load) + rows) * layer.hidden
