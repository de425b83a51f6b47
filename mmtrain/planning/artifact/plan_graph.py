"""Build the stage graph of a plan, from which programs are built, checked, simulated and executed."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from mmtrain.costs.gradient_buckets import apart_parameters, bucket_starts, reduced_parameters
from mmtrain.models.shapes.model_shape import (
    ModelShape,
    num_pieces,
    unit_offload,
    with_expert_parallelism,
    with_expert_spread,
    with_offload,
    with_recomputed_activations,
)
from mmtrain.planning.artifact.plan import Plan, UnitPlan
from mmtrain.program.ir.graph import LLM, Edge, Stage, StageGraph, StageId, UnitMesh


def planned_shape(plan: Plan, shape: ModelShape) -> ModelShape:
    """Return the model whose blocks treat their activations as plan or recipe say.

    That is which compute their activation functions again, which keep what in host memory, how many replicas hold the
    experts of each, and how unevenly these are loaded.
    """
    again = {name for name, unit in plan.units.items() if unit.recompute_activation_function}
    again |= {unit.name for unit in shape.units if any(layer.recomputes_activation for layer in unit.layers)}
    offload = {unit.name: unit_offload(unit) for unit in shape.units}
    offload |= {name: unit.offload for name, unit in plan.units.items() if unit.offload != "none"}
    shape = with_expert_parallelism(shape, plan.units[LLM].ep)
    if plan.predicted.experts is not None:
        shape = with_expert_spread(shape, plan.predicted.experts.spread)
    return with_recomputed_activations(with_offload(shape, offload), again)


def stage_graph(plan: Plan, shape: ModelShape) -> StageGraph:
    """Build the stage graph of a plan for a model."""
    is_encoder_first = plan.schedule.kind == "encoder_first"
    graph = build_stage_graph(plan.units, plan.schedule.num_microbatches, shape, is_encoder_first)
    if not plan.schedule.pieces:
        return graph
    return split_into_pieces(graph, shape, [name for name, unit in plan.units.items() if unit.sp and unit.tp > 1])


def build_stage_graph(
    units: Mapping[str, UnitPlan],
    num_microbatches: Mapping[str, int],
    shape: ModelShape,
    encoder_first: bool = False,
) -> StageGraph:
    """Build the stage graph of units: stages in data-flow order, with edges inside units and between them.

    Args:
        units: meshes and stages by unit.
        num_microbatches: of a replica in a step, by unit.
        shape: the model.
        encoder_first: whether encoders run before and after the LLM, and again where something in them trains.
    """
    meshes = tuple(
        UnitMesh(
            unit=name,
            tp=unit.tp,
            pp=unit.pp,
            dp=unit.dp,
            ranks=_shared_ranks(unit.ranks),
            num_microbatches=num_microbatches[name],
            vpp=unit.vpp,
            shard=unit.shard,
            keeps_weights=unit.keeps_weights,
            dispatch=unit.dispatch,
            exchange=unit.exchange,
            cp=unit.cp,
            cp_method=unit.cp_method or "ulysses",
            cp_split=unit.cp_split or "auto",
            tp_chunks=unit.tp_chunks,
            ep=unit.ep,
        )
        for name, unit in ((unit_shape.name, units[unit_shape.name]) for unit_shape in shape.units)
    )
    stages = tuple(
        stage
        for mesh in meshes
        for stage in _with_buckets(_stages(mesh, units[mesh.unit], shape), units[mesh.unit], mesh.unit, shape)
    )
    if encoder_first:
        stages = tuple(replace(stage, reruns_forward=_keeps_too_much(stage, shape)) for stage in stages)
    return StageGraph(meshes, stages, tuple(_edges(units, shape)), shape.tied_embeddings, encoder_first)


def _keeps_too_much(stage: Stage, shape: ModelShape) -> bool:
    """Return whether an encoder's stage would keep activations of layers below its last one.

    Where these are frozen, the stage keeps what its projector needs alone, as little as features, and a second forward
    of frozen layers would compute the same again.
    """
    unit = shape.unit(stage.id.unit)
    lo, hi = stage.layers
    return unit.kind == "encoder" and any(layer.trainable for layer in unit.layers[lo : hi - 1])


def split_into_pieces(graph: StageGraph, shape: ModelShape, with_sp: Collection[str]) -> StageGraph:
    """Return the graph with blocks split into pieces, except recomputed blocks, which run again as a whole.

    Args:
        graph: a graph whose segments are layers.
        shape: the model.
        with_sp: units with sequence parallelism.
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
                sp=stage.id.unit in with_sp,
            )
            for stage in graph.stages
        ),
    )


def _stages(mesh: UnitMesh, unit: UnitPlan, shape: ModelShape) -> Iterator[Stage]:
    layers = shape.unit(mesh.unit).layers
    tp_groups = _tp_groups(mesh)
    for stage in unit.stages:
        lo, hi = stage.layers
        yield Stage(
            id=StageId(mesh.unit, stage.stage),
            layers=stage.layers,
            tp_groups=tp_groups[stage.stage % mesh.pp],
            trainable=any(layer.trainable for layer in layers[lo:hi]),
            recompute=frozenset(stage.recompute),
            sp=unit.sp and unit.tp > 1,
        )


@lru_cache(maxsize=256)
def _shared_ranks(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return equal ranks as one object: hundreds of graphs of a search list the same thousands of numbers."""
    return ranks


@lru_cache(maxsize=64)  # of thousands of ranks, listing these is most of the work, and graphs of one mesh share them
def _tp_groups(mesh: UnitMesh) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the TP groups of all replicas by pipeline rank."""
    replicas = range(mesh.num_replicas)
    return tuple(tuple(mesh.tp_group(rank, replica) for replica in replicas) for rank in range(mesh.pp))


def _with_buckets(stages: Iterable[Stage], unit: UnitPlan, name: str, shape: ModelShape) -> Iterator[Stage]:
    """Yield the stages of a unit with the buckets in which replicas reduce its gradients; a U-Net is never cut."""
    if unit.num_replicas == 1 or unit.shard is not None or not shape.unit(name).is_splittable:
        yield from stages
        return
    trained, apart = reduced_parameters(shape, name, unit.tp, unit.pp), apart_parameters(shape, name, unit.tp)
    for stage in stages:
        held, numbers = slice(*stage.layers), (unit.num_replicas, unit.bucket_parameters)
        starts = bucket_starts(trained[held], *numbers, apart[held], unit.ep)
        yield replace(stage, bucket_starts=starts) if len(starts) > 1 else stage


def _edges(units: Mapping[str, UnitPlan], shape: ModelShape) -> Iterator[Edge]:
    for name, unit in units.items():
        for i in range(len(unit.stages) - 1):
            yield Edge(StageId(name, i), StageId(name, i + 1))
    for edge in shape.edges:
        last = StageId(edge.src, len(units[edge.src].stages) - 1)
        entered = next(
            stage.stage for stage in units[edge.dst].stages if stage.layers[0] <= edge.layer < stage.layers[1]
        )
        yield Edge(last, StageId(edge.dst, entered))
