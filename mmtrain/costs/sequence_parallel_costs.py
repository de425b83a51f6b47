"""How sequence parallelism changes a layer's time: less element-wise work, and more gathers of tokens."""

from mmtrain.costs.analytic_costs import TP_ALL_REDUCES
from mmtrain.costs.cost_model import CostModel, TokenLoad
from mmtrain.costs.hardware import ELEMENT_BYTES, Hardware, Precision
from mmtrain.costs.layer_arithmetic import needed_gradients
from mmtrain.models.model_shape import LayerShape

# By kind: how many numbers norms and residuals move for a token in forward, in widths of the layer (see
# `layer_arithmetic.elementwise_elements`). Sequence parallelism divides this work among the ranks.
_DIVIDED_WIDTHS = {"vit_block": 10, "decoder_block": 10, "head": 2}
_POST_NORM_WIDTHS = 4  # of a block whose outputs of attention and MLP are normalized
# By kind: GEMMs of whose input each rank holds a slice; forward gathers it, and the weight's gradient once more.
_NUM_GATHERED = {"vit_block": 2, "decoder_block": 2, "head": 1}


def sequence_parallel_seconds(
    layer: LayerShape,
    tp: int,
    load: TokenLoad,
    costs: CostModel,
    machine: Hardware,
    precision: Precision,
    *,
    input_grad: bool = True,
) -> float:
    """Return by how many seconds sequence parallelism lengthens forward and backward of `layer`; may be negative.

    Each all-reduce around GEMMs becomes a reduce-scatter and an all-gather (Korthikanti et al., arXiv 2205.05198),
    which do not overlap with compute. Between blocks and layers that need all tokens there is one gather: in forward
    before a projector, in backward after an embedding.
    """
    width = layer.hidden
    if layer.kind not in _DIVIDED_WIDTHS:  # at both ends, what travels beside the hidden states is gathered too
        width = max(layer.in_width, layer.out_width) if layer.kind == "embedding" else layer.in_width
    row_bytes = width * ELEMENT_BYTES[precision]
    nbytes = load.tokens * row_bytes
    # Without sequence parallelism the head computes only tokens with a target; its shards are of all tokens.
    whole_bytes = load.num_targets * row_bytes if layer.kind == "head" else nbytes
    gather = costs.collective("all_gather", nbytes, tp, True)
    scatter = costs.collective("reduce_scatter", nbytes, tp, True)
    reduce = costs.collective("all_reduce", whole_bytes, tp, True)
    has_backward = layer.trainable or input_grad
    if layer.kind not in _DIVIDED_WIDTHS:
        return gather if layer.kind == "projector" or has_backward else 0.0
    forward_reduces, backward_reduces = TP_ALL_REDUCES[layer.kind]
    passes = 1 + 2 * has_backward  # a backward moves twice as much as a forward
    widths = _DIVIDED_WIDTHS[layer.kind] + (_POST_NORM_WIDTHS if layer.post_norms else 0)
    moved = widths * passes * (whole_bytes - nbytes / tp)  # less than without
    gathers = _NUM_GATHERED[layer.kind] * (1 + has_backward * needed_gradients(layer, input_grad)[0])
    if layer.kind == "head":  # its forward has no all-reduce
        return gathers * gather + has_backward * (scatter - reduce) - moved / machine.memory_bytes_per_s
    reduces = forward_reduces + backward_reduces * has_backward
    again = gathers - _NUM_GATHERED[layer.kind]
    return reduces * (scatter + gather - reduce) + again * gather - moved / machine.memory_bytes_per_s
