"""What sequence parallelism changes in a layer's time: less element-wise work, and tokens gathered more often."""

from mmtrain.costs.analytic_costs import TP_ALL_REDUCES
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.hardware import ELEMENT_BYTES, Hardware, Precision
from mmtrain.models.model_shape import LayerShape

# Numbers a token's norms and residuals read and write in forward, in widths of the layer (see `analytic`).
_SHARED_OUT = {"vit_block": 10, "decoder_block": 10, "head": 2}
# Products whose input each rank has a slice of: forward gathers it, and a weight's gradient asks for the whole again.
_GATHERED = {"vit_block": 2, "decoder_block": 2, "head": 1}


def sequence_parallel_seconds(
    layer: LayerShape,
    tp: int,
    tokens: int,
    costs: CostModel,
    machine: Hardware,
    precision: Precision,
    *,
    input_grad: bool = True,
) -> float:
    """Seconds by which sequence parallelism lengthens forward and backward of `layer` on a rank of `tp`; may be < 0.

    Each all-reduce around products becomes a reduce-scatter and an all-gather (Korthikanti et al., arXiv 2205.05198),
    none of them hidden behind compute. Between blocks and layers that need whole tokens there is one gather: forward
    before a projector, in backward behind an embedding.
    """
    nbytes = tokens * layer.hidden * ELEMENT_BYTES[precision]
    gather, scatter, reduce = (
        costs.collective(kind, nbytes, tp, True) for kind in ("all_gather", "reduce_scatter", "all_reduce")
    )
    has_backward = layer.trainable or input_grad
    if layer.kind not in _SHARED_OUT:
        return gather if layer.kind == "projector" or has_backward else 0.0
    before, behind = TP_ALL_REDUCES[layer.kind]
    passes = 1 + 2 * has_backward  # a backward moves twice as much
    moved = _SHARED_OUT[layer.kind] * nbytes * passes * (1 - 1 / tp)
    gathers = _GATHERED[layer.kind] * (1 + has_backward * layer.trainable)
    if layer.kind == "head":  # nothing is reduced before its product
        return gathers * gather + has_backward * (scatter - reduce) - moved / machine.memory_bytes_per_s
    reduces = before + behind * has_backward
    again = gathers - _GATHERED[layer.kind]
    return reduces * (scatter + gather - reduce) + again * gather - moved / machine.memory_bytes_per_s
