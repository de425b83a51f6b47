"""Find what to change when no plan fits: for each kind of change, the smallest one with which a plan would fit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from mmtrain.costs import Hardware
from mmtrain.plan.artifact.plan import Alternative
from mmtrain.plan.estimate.layer_costs import LayerCosts, RecomputeMode
from mmtrain.plan.estimate.memory_lower_bound import unit_memory_bound
from mmtrain.plan.estimate.time_lower_bound import unit_time_bound
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.plan.search.layer_partition import anchor_layout, layout_graph
from mmtrain.plan.search.mesh_enumeration import MeshAssignment, bounded_mesh_assignments

MAX_RANK_DOUBLINGS = 6  # larger clusters that are tried: up to 2**6 times the ranks
MAX_MESHES_PER_SUGGESTION = 20  # meshes tried for each change, those first that divide units into most parts
MAX_MESHES_SCANNED = 500  # meshes of one number of ranks from which these are taken


def suggest_changes(
    assignments: Sequence[MeshAssignment],
    rejected: Sequence[Alternative],
    layer_costs: LayerCosts,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    world_size: int,
) -> list[str]:
    """Return changes of recompute, sequence parallelism, ranks and memory, in words; each alone lets a plan fit.

    Args:
        assignments: the mesh assignments that were tried on `world_size` ranks.
        rejected: why their plans do not fit, with the memory that they need.
        layer_costs: costs of the model on the sampled batches.
        choices: the mesh sizes that the recipe allows, by unit.
        machine: the hardware.
        world_size: the number of ranks.
    """
    return [
        *_suggest_recompute(assignments, layer_costs, choices, machine),
        *_suggest_sequence_parallelism(assignments, layer_costs, choices, machine),
        *_suggest_ranks(assignments, layer_costs, choices, machine, world_size),
        *_suggest_memory(rejected),
    ]


def _suggest_recompute(
    assignments: Sequence[MeshAssignment],
    layer_costs: LayerCosts,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
) -> Iterator[str]:
    """Suggest to recompute one unit whose recompute is `none`, or else all of them."""
    keeping = [unit for unit, mode in layer_costs.recompute.items() if mode == "none"]
    for units in (*((unit,) for unit in keeping), tuple(keeping)):
        modes: dict[str, RecomputeMode] = {**layer_costs.recompute, **dict.fromkeys(units, "all")}
        if units and _fits(assignments, _with_settings(layer_costs, modes, layer_costs.sp), choices, machine):
            yield " and ".join(f"parallel.{unit}.recompute: all" for unit in units)
            return


def _suggest_sequence_parallelism(
    assignments: Sequence[MeshAssignment],
    layer_costs: LayerCosts,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
) -> Iterator[str]:
    """Suggest sequence parallelism for all units that can have it and do not."""
    possible = [unit.name for unit in layer_costs.shape.units if unit.kind != "generator"]
    without = [unit for unit in possible if max(choices[unit].tp) > 1 and not layer_costs.sp.get(unit)]
    sp = {**layer_costs.sp, **{unit: frozenset(choices[unit].tp) - {1} for unit in without}}
    with_tp = [assignment for assignment in assignments if max(size.tp for size in assignment.meshes.values()) > 1]
    if without and _fits(with_tp, _with_settings(layer_costs, layer_costs.recompute, sp), choices, machine):
        yield " and ".join(f"parallel.{unit}.sp: true" for unit in without)


def _suggest_ranks(
    assignments: Sequence[MeshAssignment],
    layer_costs: LayerCosts,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    world_size: int,
) -> Iterator[str]:
    """Suggest the smallest power of two times the ranks on which a plan of the same placements fits."""
    placements = {assignment.placement for assignment in assignments}
    bound = unit_time_bound(layer_costs, choices, machine)
    for doublings in range(1, MAX_RANK_DOUBLINGS + 1):
        ranks = world_size * 2**doublings
        larger = (
            assignment
            for _, assignment in bounded_mesh_assignments(choices, ranks, bound)
            if assignment.placement in placements
        )
        if _fits(list(islice(larger, MAX_MESHES_SCANNED)), layer_costs, choices, machine):
            yield f"{ranks} ranks"
            return


def _suggest_memory(rejected: Sequence[Alternative]) -> Iterator[str]:
    """Suggest the memory that the plan nearest to fitting needs."""
    needed_gib = [alternative.peak_memory_gib for alternative in rejected if alternative.peak_memory_gib is not None]
    if needed_gib:
        yield f"ranks with {min(needed_gib):.3g} GiB"


def _fits(
    assignments: Sequence[MeshAssignment],
    layer_costs: LayerCosts,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
) -> bool:
    """Return whether a plan of one of the meshes fits; only the most divided ones are tried."""
    memory_bound = unit_memory_bound(layer_costs)

    def may_fit(assignment: MeshAssignment) -> bool:
        bounds = (memory_bound(unit, size, assignment.paces[unit]) for unit, size in assignment.meshes.items())
        return max(bounds) <= machine.memory_bytes

    ordered = sorted(filter(may_fit, assignments), key=_most_divided_first)
    for assignment in islice(ordered, MAX_MESHES_PER_SUGGESTION):
        layout = anchor_layout(assignment, layer_costs, choices, machine.memory_bytes)
        if layout is None:
            continue
        memory = layer_costs.memory(layout_graph(layout, layer_costs))
        if all(rank.total <= machine.memory_bytes for rank in memory.values()):
            return True
    return False


def _most_divided_first(assignment: MeshAssignment) -> tuple[int, ...]:
    """Return a sort key that puts assignments first whose least divided unit has the most parts."""
    return tuple(sorted(-size.tp * size.pp for size in assignment.meshes.values()))[::-1]


def _with_settings(
    layer_costs: LayerCosts, recompute: Mapping[str, RecomputeMode], sp: Mapping[str, frozenset[int]]
) -> LayerCosts:
    """Return the same costs under other settings, without the cached costs that depend on them."""
    return replace(layer_costs, recompute=recompute, sp=sp, _lines={})
