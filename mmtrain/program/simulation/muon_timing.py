"""How long the ranks of a program move and orthogonalize matrices for Muon, at the end of a step."""

from collections import Counter

from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.hardware import Precision
from mmtrain.costs.muon_costs import MuonGroup
from mmtrain.models.shapes.model_shape import ModelShape
from mmtrain.program.ir.graph import StageGraph


def muon_seconds(
    graph: StageGraph, shape: ModelShape, costs: CostModel, precision: Precision, ranks_per_node: int
) -> dict[int, float]:
    """Return the seconds of one rank of each stage: other replicas and TP ranks do the same."""
    seconds: dict[int, float] = {}
    for stage in graph.stages:
        layers = shape.unit(stage.id.unit).layers
        mesh = graph.mesh(stage.id.unit)
        group = MuonGroup(mesh.tp, mesh.shard or mesh.num_replicas, mesh.ep, ranks_per_node)
        held = Counter(layers[index] for index in range(*stage.layers))
        rank = stage.tp_groups[0][0]
        of_stage = sum(number * group.seconds(layer, costs, precision) for layer, number in held.items())
        seconds[rank] = seconds.get(rank, 0.0) + of_stage
    return seconds
