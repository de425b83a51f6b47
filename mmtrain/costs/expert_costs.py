"""What ranks that hold the experts of a mixture together exchange in it, and the seconds that this adds to a block."""

from mmtrain.costs.collectives import CollectiveKind, GroupLayout
from mmtrain.costs.cost_model import CostModel, LayerWork
from mmtrain.costs.expert_spread import fullest_rank_load
from mmtrain.models.shapes.layer_shape import LayerShape, MoeMlp

_EXCHANGES = 2  # of a pass: rows go to the ranks of their experts, and come back


def expert_exchange_seconds(work: LayerWork, costs: CostModel, ranks_per_node: int, element_bytes: int) -> float:
    """Return the seconds in which a block waits for rows of other ranks in a pass.

    The ranks lie `work.tp` apart. A rank keeps 1 / ep of its own rows; the one whose experts have most receives most.
    Ranks of a TP group send a share of each row, and gather the rows that arrive, or sum those that go back.
    A block whose activations come back from host memory is not computed again.
    """
    layer, mlp = work.layer, work.layer.mlp
    comes_back = (work.kind, layer.offload) == ("recompute", "all")
    has_pass = work.kind == "forward" or work.has_gradient
    if not isinstance(mlp, MoeMlp) or mlp.ep == 1 or comes_back or not has_pass:
        return 0.0
    group = GroupLayout.strided(mlp.ep, work.tp, ranks_per_node)
    rows = work.load.tokens * mlp.top_k * fullest_rank_load(mlp)
    num_ranks = mlp.column_ranks(layer.hidden, work.tp)
    sent_bytes = rows * layer.hidden // num_ranks * element_bytes * (mlp.ep - 1) / mlp.ep
    on_node_bytes = round(sent_bytes * (group.fewest_per_node - 1) / (mlp.ep - 1))
    exchange_s = _EXCHANGES * costs.all_to_all(on_node_bytes, round(sent_bytes) - on_node_bytes, group)
    if num_ranks == 1:
        return exchange_s
    tp_group, row_bytes = GroupLayout.strided(num_ranks, 1, ranks_per_node), round(rows * layer.hidden * element_bytes)
    kinds: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
    return exchange_s + sum(costs.collective(kind, row_bytes, tp_group) for kind in kinds)


def expert_replicas(layer: LayerShape, num_replicas: int) -> int:
    """Return how many of a unit's replicas hold the same experts of a layer; without experts, all of them."""
    return num_replicas // layer.mlp.ep if isinstance(layer.mlp, MoeMlp) else num_replicas
