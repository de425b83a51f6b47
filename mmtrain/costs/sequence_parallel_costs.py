"""How sequence parallelism changes a layer's time: less element-wise work, and more gathers of tokens."""

from mmtrain.costs.analytic_costs import REDUCED_BESIDE_WEIGHT_GRADIENT, TP_ALL_REDUCES, gemm_seconds
from mmtrain.costs.collectives import GroupLayout
from mmtrain.costs.cost_model import CostModel, TokenLoad
from mmtrain.costs.hardware import ELEMENT_BYTES, Hardware, Precision
from mmtrain.costs.layer_arithmetic import gemms as layer_gemms
from mmtrain.costs.layer_arithmetic import needed_gradients
from mmtrain.models.shapes.model_shape import LayerShape

# By kind: how many numbers norms and residuals move for a token in forward, in widths of the layer (see
# `layer_arithmetic.elementwise_elements`). Sequence parallelism divides this work among the ranks.
_DIVIDED_WIDTHS = {"vit_block": 10, "decoder_block": 10, "head": 2}
_POST_NORM_WIDTHS = 4  # of a block whose outputs of attention and MLP are normalized


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

    Each all-reduce around GEMMs becomes a reduce-scatter and an all-gather (Korthikanti et al., arXiv 2205.05198).
    What overlaps is what the runtime overlaps (`models.megatron.tp_linear`): in backward of a block's QKV and first
    MLP linear the reduction runs beside the GEMM of the weight's gradient, with and without sequence parallelism,
    and the input is gathered once more beside the GEMM of its gradient. All other gathers and reductions wait.
    Between blocks and layers that need all tokens there is one gather: in forward before a projector, in backward
    after an embedding.
    """
    width = layer.hidden
    if layer.kind not in _DIVIDED_WIDTHS:  # at both ends, what travels beside the hidden states is gathered too
        width = max(layer.in_width, layer.out_width) if layer.kind == "embedding" else layer.in_width
    row_bytes = width * ELEMENT_BYTES[precision]
    nbytes = load.tokens * row_bytes
    # Without sequence parallelism the head computes only tokens with a target; its shards are of all tokens.
    whole_bytes = load.num_targets * row_bytes if layer.kind == "head" else nbytes
    gather = costs.collective("all_gather", nbytes, GroupLayout(tp))
    scatter = costs.collective("reduce_scatter", nbytes, GroupLayout(tp))
    reduce = costs.collective("all_reduce", whole_bytes, GroupLayout(tp))
    has_backward = layer.trainable or input_grad
    if layer.kind not in _DIVIDED_WIDTHS:
        return gather if layer.kind == "projector" or has_backward else 0.0
    passes = 1 + 2 * has_backward  # a backward moves twice as much as a forward
    widths = _DIVIDED_WIDTHS[layer.kind] + (_POST_NORM_WIDTHS if layer.post_norms else 0)
    moved = widths * passes * (whole_bytes - nbytes / tp)  # less than without
    saved_s = moved / machine.moved_bytes_per_s
    weight_grad = needed_gradients(layer, input_grad)[0]
    if layer.kind == "head":  # its forward has no all-reduce
        gathers = 1 + has_backward * weight_grad
        return gathers * gather + has_backward * (scatter - reduce) - saved_s
    added_s = TP_ALL_REDUCES[layer.kind][0] * (scatter + gather - reduce)
    if has_backward:
        gemms = layer_gemms(layer, load, tp)
        for i in REDUCED_BESIDE_WEIGHT_GRADIENT[layer.kind]:
            gemm_s = gemm_seconds(machine, precision, gemms[i]) if weight_grad else 0.0
            added_s += machine.overlapped(scatter, gemm_s) + gather - machine.overlapped(reduce, gemm_s)
            # The weight's gradient needs the tokens of all ranks, which arrive beside the GEMM of the input's gradient.
            added_s += machine.overlapped(gather, gemm_s) * weight_grad
    return added_s - saved_s
