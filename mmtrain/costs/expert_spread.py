"""How unevenly the experts of a mixture are loaded, and what that means for the ranks that hold them."""

import math
from dataclasses import replace
from functools import lru_cache

from mmtrain.costs.time_spread import expected_maximum
from mmtrain.models.shapes.layer_shape import LayerShape, MoeMlp


@lru_cache(maxsize=1 << 10)
def fullest_rank_load(mlp: MoeMlp) -> float:
    """Return the rows of the rank whose experts have most, over the mean of the ranks that hold the experts.

    Loads of experts count as independent normal numbers with the standard deviation `mlp.load_spread`. So those of the
    `k` experts of a rank together deviate by 1 / sqrt(k) of that, and the fullest of `ep` ranks by as many deviations
    as the largest of `ep` normal numbers. A rank has no more than all rows.
    """
    if mlp.ep == 1:
        return 1.0
    deviation = mlp.load_spread / math.sqrt(mlp.held_experts)
    return min(1 + expected_maximum(mlp.ep) * deviation, float(mlp.ep))


def evenly_loaded(layer: LayerShape) -> LayerShape:
    """Return the layer with experts that have equally many tokens; without experts, the same layer."""
    if not isinstance(layer.mlp, MoeMlp) or not layer.mlp.load_spread:
        return layer
    return replace(layer, mlp=replace(layer.mlp, load_spread=0.0))
