"""From a plan to its stage graph: placement in one picture, for builders, checker, simulator and executor."""

from collections.abc import Iterator, Mapping

from mmtrain.models.shape import ModelShape
from mmtrain.plan.plan import Plan, UnitPlan
from mmtrain.program.graph import Edge, Stage, StageGraph, StageId, UnitMesh


def stage_graph(plan: Plan, shape: ModelShape) -> StageGraph:
    """Lay the model's units out as the plan says."""
    return graph_of(plan.units, plan.schedule.num_microbatches, shape)


def graph_of(units: Mapping[str, UnitPlan], num_microbatches: Mapping[str, int], shape: ModelShape) -> StageGraph:
    """Stages in data-flow order, chained inside their unit and joined to other units where the model says."""
    meshes = tuple(
        UnitMesh(name, u.tp, u.pp, u.dp, u.ranks, num_microbatches[name], u.vpp)
        for name, u in ((s.name, units[s.name]) for s in shape.units)
    )
    stages = tuple(stage for mesh in meshes for stage in _stages(mesh, units[mesh.unit], shape))
    return StageGraph(meshes, stages, tuple(_edges(units, shape)), shape.tied_embeddings)


def _stages(mesh: UnitMesh, unit: UnitPlan, shape: ModelShape) -> Iterator[Stage]:
    layers = shape.unit(mesh.unit).layers
    for s in unit.stages:
        lo, hi = s.layers
        yield Stage(
            id=StageId(mesh.unit, s.stage),
            layers=s.layers,
            lanes=tuple(mesh.lane(s.stage, replica) for replica in range(mesh.dp)),
            trainable=any(layer.trainable for layer in layers[lo:hi]),
            recompute=frozenset(s.recompute),
        )


def _edges(units: Mapping[str, UnitPlan], shape: ModelShape) -> Iterator[Edge]:
    for name, unit in units.items():
        for i in range(len(unit.stages) - 1):
            yield Edge(StageId(name, i), StageId(name, i + 1))
    for edge in shape.edges:
        last = StageId(edge.src, len(units[edge.src].stages) - 1)
        entered = next(s.stage for s in units[edge.dst].stages if s.layers[0] <= edge.layer < s.layers[1])
        yield Edge(last, StageId(edge.dst, entered))
