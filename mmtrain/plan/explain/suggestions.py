"""What to change when no plan fits: the smallest change of each kind with which one would."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from mmtrain.costs import Hardware
from mmtrain.plan.artifact.plan import Alternative
from mmtrain.plan.estimate.layer_costs import Pricing, Recompute
from mmtrain.plan.estimate.memory_lower_bound import unit_room
from mmtrain.plan.estimate.time_lower_bound import unit_bound
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.plan.search.layer_partition import arrange, graph_for
from mmtrain.plan.search.mesh_enumeration import Sizing, bounded_sizings

DOUBLINGS = 6  # of the number of ranks
TRIED = 20  # sizes for each change, those that split state and activations most first
LOOKED_AT = 500  # sizes of one number of ranks among which those are sought


def what_would_fit(
    found: Sequence[Sizing],
    losers: Sequence[Alternative],
    pricing: Pricing,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    world_size: int,
) -> list[str]:
    """Changes of one setting with which a plan fits, in words: recompute, sequence parallelism, ranks, memory.

    found: the sizes that were tried on `world_size` ranks; losers: what became of them.
    """
    in_settings = _settings(found, pricing, choices, machine)
    return [*in_settings, *_ranks(found, pricing, choices, machine, world_size), *_memory(losers)]


def _settings(
    found: Sequence[Sizing], pricing: Pricing, choices: Mapping[str, UnitChoices], machine: Hardware
) -> Iterator[str]:
    keep = [unit for unit, again in pricing.recompute.items() if again == "none"]
    for units in (*((unit,) for unit in keep), tuple(keep)):
        again: dict[str, Recompute] = {**pricing.recompute, **dict.fromkeys(units, "all")}
        if units and _fits(found, _anew(pricing, again, pricing.sp), choices, machine):
            yield " and ".join(f"parallel.{unit}.recompute: all" for unit in units)
            break
    possible = [unit.name for unit in pricing.shape.units if unit.kind != "generator"]
    whole = [name for name in possible if max(choices[name].tp) > 1 and not pricing.sp.get(name)]
    sliced = {**pricing.sp, **{name: frozenset(choices[name].tp) - {1} for name in whole}}
    if whole and _fits(
        [s for s in found if _max_tp(s) > 1], _anew(pricing, pricing.recompute, sliced), choices, machine
    ):
        yield " and ".join(f"parallel.{unit}.sp: true" for unit in whole)


def _ranks(
    found: Sequence[Sizing],
    pricing: Pricing,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    world_size: int,
) -> Iterator[str]:
    placements, bound = {sizing.placement for sizing in found}, unit_bound(pricing, choices, machine)
    for count in (world_size * 2**i for i in range(1, DOUBLINGS + 1)):
        every = bounded_sizings(choices, count, bound)
        some = islice((s for _, s in every if s.placement in placements), LOOKED_AT)
        if _fits(list(some), pricing, choices, machine):
            yield f"{count} ranks"
            return


def _memory(losers: Sequence[Alternative]) -> Iterator[str]:
    needs = [loser.peak_memory_gib for loser in losers if loser.peak_memory_gib is not None]
    if needs:
        yield f"ranks of {min(needs):.3g} GiB"


def _fits(found: Sequence[Sizing], pricing: Pricing, choices: Mapping[str, UnitChoices], machine: Hardware) -> bool:
    """Whether one of the sizes fits; the most split ones are tried first, and not all of very many."""
    room = unit_room(pricing)
    hopeful = [
        s for s in found if max(room(n, size, s.paces[n]) for n, size in s.sizes.items()) <= machine.memory_bytes
    ]
    for sizing in islice(sorted(hopeful, key=_most_split), TRIED):
        layout = arrange(sizing, pricing, choices, machine.memory_bytes)
        if layout is None:
            continue
        memory = pricing.memory(graph_for(layout, pricing))
        if all(m.total <= machine.memory_bytes for m in memory.values()):
            return True
    return False


def _most_split(sizing: Sizing) -> tuple[int, ...]:
    """Puts first those whose least split unit is cut into most parts."""
    return tuple(sorted(-size.tp * size.pp for size in sizing.sizes.values()))[::-1]


def _max_tp(sizing: Sizing) -> int:
    return max(size.tp for size in sizing.sizes.values())


def _anew(pricing: Pricing, recompute: Mapping[str, Recompute], sp: Mapping[str, frozenset[int]]) -> Pricing:
    """The same costs under other settings; what was computed for the old ones is forgotten."""
    return replace(pricing, recompute=recompute, sp=sp, _lines={})
