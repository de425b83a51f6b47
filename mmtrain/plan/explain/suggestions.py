"""What to change when no plan fits: the smallest change of each kind with which one would."""

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

MAX_RANK_DOUBLINGS = 6  # of the number of ranks
MAX_MESHES_PER_SUGGESTION = 20  # sizes for each change, those that split state and activations most first
MAX_MESHES_SCANNED = 500  # sizes of one number of ranks among which those are sought


def suggest_changes(
    found: Sequence[MeshAssignment],
    losers: Sequence[Alternative],
    layer_costs: LayerCosts,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    world_size: int,
) -> list[str]:
    """Changes of one setting with which a plan fits, in words: recompute, sequence parallelism, ranks, memory.

    found: the sizes that were tried on `world_size` ranks; losers: what became of them.
    """
    in_settings = _settings(found, layer_costs, choices, machine)
    return [*in_settings, *_ranks(found, layer_costs, choices, machine, world_size), *_memory(losers)]


def _settings(
    found: Sequence[MeshAssignment], layer_costs: LayerCosts, choices: Mapping[str, UnitChoices], machine: Hardware
) -> Iterator[str]:
    keep = [unit for unit, again in layer_costs.recompute.items() if again == "none"]
    for units in (*((unit,) for unit in keep), tuple(keep)):
        again: dict[str, RecomputeMode] = {**layer_costs.recompute, **dict.fromkeys(units, "all")}
        if units and _fits(found, _anew(layer_costs, again, layer_costs.sp), choices, machine):
            yield " and ".join(f"parallel.{unit}.recompute: all" for unit in units)
            break
    possible = [unit.name for unit in layer_costs.shape.units if unit.kind != "generator"]
    whole = [name for name in possible if max(choices[name].tp) > 1 and not layer_costs.sp.get(name)]
    sliced = {**layer_costs.sp, **{name: frozenset(choices[name].tp) - {1} for name in whole}}
    if whole and _fits(
        [s for s in found if _max_tp(s) > 1], _anew(layer_costs, layer_costs.recompute, sliced), choices, machine
    ):
        yield " and ".join(f"parallel.{unit}.sp: true" for unit in whole)


def _ranks(
    found: Sequence[MeshAssignment],
    layer_costs: LayerCosts,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    world_size: int,
) -> Iterator[str]:
    placements, bound = {assignment.placement for assignment in found}, unit_time_bound(layer_costs, choices, machine)
    for count in (world_size * 2**i for i in range(1, MAX_RANK_DOUBLINGS + 1)):
        every = bounded_mesh_assignments(choices, count, bound)
        some = islice((s for _, s in every if s.placement in placements), MAX_MESHES_SCANNED)
        if _fits(list(some), layer_costs, choices, machine):
            yield f"{count} ranks"
            return


def _memory(losers: Sequence[Alternative]) -> Iterator[str]:
    needs = [loser.peak_memory_gib for loser in losers if loser.peak_memory_gib is not None]
    if needs:
        yield f"ranks of {min(needs):.3g} GiB"


def _fits(
    found: Sequence[MeshAssignment], layer_costs: LayerCosts, choices: Mapping[str, UnitChoices], machine: Hardware
) -> bool:
    """Whether one of the sizes fits; the most split ones are tried first, and not all of very many."""
    room = unit_memory_bound(layer_costs)
    hopeful = [
        s for s in found if max(room(n, size, s.paces[n]) for n, size in s.meshes.items()) <= machine.memory_bytes
    ]
    for assignment in islice(sorted(hopeful, key=_most_split), MAX_MESHES_PER_SUGGESTION):
        layout = anchor_layout(assignment, layer_costs, choices, machine.memory_bytes)
        if layout is None:
            continue
        memory = layer_costs.memory(layout_graph(layout, layer_costs))
        if all(m.total <= machine.memory_bytes for m in memory.values()):
            return True
    return False


def _most_split(assignment: MeshAssignment) -> tuple[int, ...]:
    """Puts first those whose least split unit is cut into most parts."""
    return tuple(sorted(-size.tp * size.pp for size in assignment.meshes.values()))[::-1]


def _max_tp(assignment: MeshAssignment) -> int:
    return max(size.tp for size in assignment.meshes.values())


def _anew(
    layer_costs: LayerCosts, recompute: Mapping[str, RecomputeMode], sp: Mapping[str, frozenset[int]]
) -> LayerCosts:
    """The same costs under other settings; what was computed for the old ones is forgotten."""
    return replace(layer_costs, recompute=recompute, sp=sp, _lines={})
