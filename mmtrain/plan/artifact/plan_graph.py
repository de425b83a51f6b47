"""From a plan to its stage graph: placement in one picture, for builders, checker, simulator and executor."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from mmtrain.models.model_shape import ModelShape, num_pieces
from mmtrain.plan.artifact.plan import Plan, UnitPlan
from mmtrain.program.ir.graph import Edge, Stage, StageGraph, StageId, UnitMesh


def stage_graph(plan: Plan, shape: ModelShape) -> StageGraph:
    """Lay the model's units out as the plan says."""
    graph = build_stage_graph(plan.units, plan.schedule.num_microbatches, shape)
    if not plan.schedule.pieces:
        return graph
    return split_into_pieces(graph, shape, [name for name, unit in plan.units.items() if unit.sp and unit.tp > 1])


def build_stage_graph(
    units: Mapping[str, UnitPlan], num_microbatches: Mapping[str, int], shape: ModelShape
) -> StageGraph:
    """Stages in data-flow order, chained inside their unit and joined to other units where the model says."""
    meshes = tuple(
        UnitMesh(name, u.tp, u.pp, u.dp, u.ranks, num_microbatches[name], u.vpp)
        for name, u in ((s.name, units[s.name]) for s in shape.units)
    )
    stages = tuple(stage for mesh in meshes for stage in _stages(mesh, units[mesh.unit], shape))
    return StageGraph(meshes, stages, tuple(_edges(units, shape)), shape.tied_embeddings)


def split_into_pieces(graph: StageGraph, shape: ModelShape, sliced: Collection[str]) -> StageGraph:
    """The graph with blocks cut into pieces, but for those that are recomputed: they are run again as a whole.

    sliced: units with sequence parallelism.
    """
    return replace(
        graph,
        stages=tuple(
            replace(
                stage,
                pieces=tuple(
                    1 if i in stage.recompute else num_pieces(shape.unit(stage.id.unit).layers[i].kind)
                    for i in range(*stage.layers)
                ),
                sp=stage.id.unit in sliced,
            )
            for stage in graph.stages
        ),
    )


def _stages(mesh: UnitMesh, unit: UnitPlan, shape: ModelShape) -> Iterator[Stage]:
    layers = shape.unit(mesh.unit).layers
    for s in unit.stages:
        lo, hi = s.layers
        yield Stage(
            id=StageId(mesh.unit, s.stage),
            layers=s.layers,
            tp_groups=tuple(mesh.tp_group(s.stage, replica) for replica in range(mesh.dp)),
            trainable=any(layer.trainable for layer in layers[lo:hi]),
            recompute=frozenset(s.recompute),
            sp=unit.sp and unit.tp > 1,
        )


def _edges(units: Mapping[str, UnitPlan], shape: ModelShape) -> Iterator[Edge]:
    for name, unit in units.items():
        for i in range(len(unit.stages) - 1):
            yield Edge(StageId(name, i), StageId(name, i + 1))
    for edge in shape.edges:
        last = StageId(edge.src, len(units[edge.src].stages) - 1)
        entered = next(s.stage for s in units[edge.dst].stages if s.layers[0] <= edge.layer < s.layers[1])
        yield Edge(last, StageId(edge.dst, entered))
