"""How a step is divided over the replicas of each unit, and into how many microbatches."""

from typing import NamedTuple

from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.program.ir.graph import ContextMethod, CutSequences, DispatchMode, StageGraph, UnitMesh


class UnitSplit(NamedTuple):
    """How a unit's part of a step is divided; see `UnitMesh`."""

    unit: str
    dp: int
    num_microbatches: int  # of a replica
    dispatch: DispatchMode | None = None
    cp: int = 1
    cp_method: ContextMethod = "ulysses"
    cp_split: CutSequences = "auto"


BatchSplit = tuple[UnitSplit, ...]  # in the order of the model's units


def batch_split_of(graph: StageGraph) -> BatchSplit:
    """Return the graph's data-parallel degrees and microbatches, in the order of its units."""
    return tuple(unit_split(mesh.unit, mesh, mesh.num_microbatches, mesh.dispatch) for mesh in graph.meshes)


def unit_split(
    unit: str, mesh: MeshSize | UnitMesh, num_microbatches: int, dispatch: DispatchMode | None = None
) -> UnitSplit:
    """Return how the unit's part of a step is divided over a mesh."""
    if mesh.cp == 1:
        return UnitSplit(unit, mesh.dp, num_microbatches, dispatch)
    return UnitSplit(unit, mesh.dp, num_microbatches, dispatch, mesh.cp, mesh.cp_method, mesh.cp_split)


def num_microbatches_of(split: BatchSplit) -> dict[str, int]:
    """Return the microbatches of each replica, by unit."""
    return {entry.unit: entry.num_microbatches for entry in split}
