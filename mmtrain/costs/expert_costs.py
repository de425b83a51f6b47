"""What ranks that hold the experts of a mixture together exchange in it, and the seconds that this adds to a block."""

from dataclasses import replace
from typing import NamedTuple

from mmtrain.costs.collectives import CollectiveKind, GroupLayout
from mmtrain.costs.cost_model import CostModel, LayerWork
from mmtrain.costs.expert_spread import arriving_rows, fullest_rank_load, ranks_of_token
from mmtrain.costs.framework import OWN_RUNTIME, Execution
from mmtrain.models.shapes.layer_shape import LayerShape, MoeMlp

_EXCHANGES = 2  # of a pass: rows go to the ranks of their experts, and come back


class ExpertGroup(NamedTuple):
    """A mixture as a rank of its expert-parallel group sees it."""

    mlp: MoeMlp
    tokens: int  # that the rank routes
    tp: int  # ranks among which every expert is divided
    stride: int  # between the ranks of the group

    @classmethod
    def of(cls, mlp: MoeMlp, tokens: int, tp: int, execution: Execution) -> "ExpertGroup":
        """Return a mixture whose block is divided among `tp` ranks, as `execution` places its experts."""
        if not execution.folds_experts:
            return cls(mlp, tokens, tp, tp)
        return cls(replace(mlp, ep=mlp.ep * tp), -(-tokens // tp), 1, 1)


def expert_exchange_seconds(
    work: LayerWork, costs: CostModel, ranks_per_node: int, element_bytes: int, execution: Execution = OWN_RUNTIME
) -> float:
    """Return the seconds in which a block waits for rows of other ranks in a pass.

    A rank keeps 1 / ep of its own rows; the one whose experts have most receives most. Ranks of a TP group send a share
    of each row, and gather the rows that arrive, or sum those that go back. Labels of rows are not counted: they have
    eight bytes for each expert. A block whose activations come back from host memory is not computed again.
    """
    layer = work.layer
    comes_back = (work.kind, layer.offload) == ("recompute", "all")
    has_pass = work.kind == "forward" or work.has_gradient
    if not isinstance(layer.mlp, MoeMlp) or comes_back or not has_pass:
        return 0.0
    mlp, tokens, tp, stride = ExpertGroup.of(layer.mlp, work.load.tokens, work.tp, execution)
    if mlp.ep == 1:
        return 0.0
    group = GroupLayout.strided(mlp.ep, stride, ranks_per_node)
    num_ranks = mlp.column_ranks(layer.hidden, tp)
    rows, row_bytes = tokens * _rows_of_token(mlp, execution), layer.hidden * element_bytes
    on_node, off_node = _travelling_rows(mlp, group, execution)
    share = tokens * row_bytes / num_ranks
    num_exchanges = _EXCHANGES * execution.mixture_passes(work.direction)
    exchange_s = num_exchanges * costs.all_to_all(round(on_node * share), round(off_node * share), group)
    if num_ranks == 1:
        return exchange_s
    tp_group = GroupLayout.strided(num_ranks, 1, ranks_per_node)
    kinds: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
    return exchange_s + sum(costs.collective(kind, round(rows * row_bytes), tp_group) for kind in kinds)


def _rows_of_token(mlp: MoeMlp, execution: Execution) -> float:
    """Return how many rows arrive for a token of a rank in the mean, at the rank whose experts have most."""
    return mlp.top_k * fullest_rank_load(mlp) if execution.sends_rows == "copies" else arriving_rows(mlp)


def _travelling_rows(mlp: MoeMlp, group: GroupLayout, execution: Execution) -> tuple[float, float]:
    """Return how many rows of a token travel inside a node and between nodes.

    Rows that go to a node once are sent on there by the rank that they reach, which keeps its own.
    """
    rows = _rows_of_token(mlp, execution)
    if execution.sends_rows == "nodes" and group.nodes > 1:
        to_nodes = min(ranks_of_token(mlp, group.nodes) * fullest_rank_load(mlp), float(group.nodes))
        return rows * (1 - 1 / group.fewest_per_node), to_nodes * (1 - 1 / group.nodes)
    on_node = rows * (group.fewest_per_node - 1) / mlp.ep
    return on_node, rows * (mlp.ep - 1) / mlp.ep - on_node


def copied_elements(layer: LayerShape, tokens: int, tp: int, execution: Execution) -> float:
    """Return how many numbers a rank moves in forward, and as many in backward, to copy rows for experts and sum them.

    A copy is read and written, and on its way back again, in the order of rows, before it is read and summed; the sum
    is written twice. So it is for rows that are sent. A weight multiplies what the activation made: it is read and
    written, and made and read again in backward.
    """
    if not isinstance(layer.mlp, MoeMlp):
        return 0.0
    mlp, tokens, tp, _ = ExpertGroup.of(layer.mlp, tokens, tp, execution)
    hidden = layer.hidden
    copies = mlp.top_k * fullest_rank_load(mlp) * hidden
    arriving = arriving_rows(mlp) * hidden
    if execution.fuses_copies:
        # With a copy for each expert it is copied and summed where it comes from; where it arrives it is sorted.
        moved = 6 * copies + 2 * hidden if execution.sends_rows == "copies" else 2 * copies + 2 * arriving
        return tokens * moved
    weighted = 4.5 * mlp.top_k * fullest_rank_load(mlp) * mlp.expert_ffn / tp
    sent = 0.0
    if mlp.ep > 1:
        sent = (5 * ranks_of_token(mlp, mlp.ep) + 3) * hidden / mlp.column_ranks(hidden, tp)
    return tokens * (5 * copies + 3 * arriving + weighted + sent)


def expert_replicas(layer: LayerShape, num_replicas: int) -> int:
    """Return how many of a unit's replicas hold the same experts of a layer; without experts, all of them."""
    return num_replicas // layer.mlp.ep if isinstance(layer.mlp, MoeMlp) else num_replicas
