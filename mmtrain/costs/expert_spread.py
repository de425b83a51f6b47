"""How unevenly the experts of a mixture are loaded, and what that means for the ranks that hold them."""

import math
from dataclasses import replace
from functools import lru_cache

from mmtrain.costs.time_spread import expected_maximum
from mmtrain.models.shapes.layer_shape import LayerShape, MoeMlp


@lru_cache(maxsize=1 << 10)
def ranks_of_token(mlp: MoeMlp, num_ranks: int) -> float:
    """Return on how many of `num_ranks`, which hold consecutive experts, a token has any of its experts in the mean.

    Experts count as equally likely. Those of a token are drawn without replacement from the groups that its router may
    choose from, which are drawn likewise: if s experts of a rank are among the n of these groups, the rank has none of
    the token's k with probability C(n - s, k) / C(n, k).
    """
    groups, chosen, held = mlp.router.groups, mlp.router.top_groups, mlp.experts // num_ranks
    size = mlp.experts // groups
    candidates = chosen * size
    expected = 0.0
    for first in range(0, mlp.experts, held):
        # (groups chosen, experts of the rank in them) -> in how many ways
        ways = {(0, 0): 1}
        for group in range(groups):
            shared = max(0, min(first + held, (group + 1) * size) - max(first, group * size))
            more: dict[tuple[int, int], int] = {}
            for (num_chosen, experts), count in ways.items():
                for key in ((num_chosen, experts), (num_chosen + 1, experts + shared)):
                    more[key] = more.get(key, 0) + count
            ways = {key: count for key, count in more.items() if key[0] <= chosen}
        for (num_chosen, experts), count in ways.items():
            if num_chosen == chosen:
                none = math.comb(candidates - experts, mlp.top_k) / math.comb(candidates, mlp.top_k)
                expected += count / math.comb(groups, chosen) * (1 - none)
    return expected


def arriving_rows(mlp: MoeMlp) -> float:
    """Return how many rows arrive for a token of a rank in the mean, at the rank whose experts have most."""
    return min(ranks_of_token(mlp, mlp.ep) * fullest_rank_load(mlp), float(mlp.ep))


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
