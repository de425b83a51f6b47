"""Every placement and size that the recipe allows, and what their steps take at least."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby, product, takewhile
from operator import or_
from typing import Protocol

from mmtrain.plan.artifact.layout import MeshSize
from mmtrain.plan.artifact.plan import Placement
from mmtrain.plan.estimate.layer_costs import BatchSplit
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.program.ir.graph import LLM

LLM_MICROBATCHES_PER_ENCODER_MICROBATCH = (
    -1,
    -2,
    -4,
)  # -k: an encoder on ranks of its own joins k of the LLM's microbatches to one of its own
MIN_FILL_SHARE_FOR_CHUNKS = (
    0.01  # of a step: what an encoder's pipeline takes to fill, below which chunks are not looked at
)
MAX_RANKS_TO_ENUMERATE_ALL = 8  # ranks up to which every size is looked at
MAX_ASSIGNMENTS_PER_LLM_MESH = 4  # of these, those with the same size of the LLM
MAX_MESHES_PER_RANK_COUNT = (
    20  # sizes of units that share so many ranks, the quickest by their bounds, where there are very many
)


@dataclass(frozen=True)
class MeshAssignment:
    """A placement with the size of every unit's mesh, still uncut.

    In `unified` all units have the same size, and its `pp` is the number of ranks of the one pipeline.
    """

    placement: Placement
    meshes: Mapping[str, MeshSize]
    num_microbatches: Mapping[str, int]  # microbatches of each replica, by unit

    @property
    def paces(self) -> Mapping[str, int]:
        """The same for bounds, which know of units with a pace of their own or that of all on their ranks: else -1."""
        if self.placement != "unified":
            return self.num_microbatches
        return {name: n if n == self.num_microbatches[LLM] else -1 for name, n in self.num_microbatches.items()}

    @property
    def batch_split(self) -> BatchSplit:
        """Data-parallel sizes and microbatches by unit."""
        return tuple((name, size.dp, self.num_microbatches[name]) for name, size in self.meshes.items())

    @property
    def ranks(self) -> int:
        """Ranks that it uses."""
        if self.placement == "unified":
            return next(iter(self.meshes.values())).ranks
        return sum(size.ranks for size in self.meshes.values())

    def __str__(self) -> str:
        merged = {
            name: f" mb{n}" if n != self.num_microbatches[LLM] else "" for name, n in self.num_microbatches.items()
        }
        if self.placement == "unified":
            return f"unified: {next(iter(self.meshes.values()))}" + "".join(
                f", {name}{text}" for name, text in merged.items() if text
            )
        return "disaggregated: " + ", ".join(f"{name} {size}{merged[name]}" for name, size in self.meshes.items())


def has_pipelined_meshes(choices: Mapping[str, UnitChoices], world_size: int, placement: Placement) -> bool:
    """Whether there are `unified` or `disaggregated` sizes of exactly so many ranks; faster than to list them."""
    if placement == "unified":
        return any(True for _ in _unified(choices, world_size))
    if len(choices) == 1:
        return False
    totals = 1
    for unit in choices.values():
        totals = _totals(totals, {size.ranks for size, _ in _sizes(unit, world_size, choices[LLM])})
    return bool(totals >> world_size & 1)


def _totals(totals: int, own: Set[int]) -> int:
    """Numbers of ranks that units may use together, as bits, with one more unit that may use `own`."""
    return reduce(or_, (totals << ranks for ranks in own), 0)


class UnitTimeBound(Protocol):
    """Seconds of a unit of this size with so many microbatches, at least; infinite where it cannot fit into memory."""

    def __call__(self, unit: str, size: MeshSize, count: int, behind: int = 0) -> float:
        """behind: microbatches that are under way in the pipelines after it before the first comes back, at least."""


def mesh_assignments(choices: Mapping[str, UnitChoices], world_size: int) -> Iterator[MeshAssignment]:
    """Every placement and size that uses exactly `world_size` ranks."""
    yield from (assignment for _, assignment in bounded_mesh_assignments(choices, world_size))


def bounded_mesh_assignments(
    choices: Mapping[str, UnitChoices], world_size: int, bound: UnitTimeBound | None = None
) -> Iterator[tuple[float, MeshAssignment]]:
    """Every placement and size that uses exactly `world_size` ranks, with a bound of its step's seconds.

    On more than `MAX_RANKS_TO_ENUMERATE_ALL` ranks, and with a bound: of units on ranks of their own only the meshes
    that look quickest, and none whose bound is infinite; if there are no others the most split ones, so that something
    can be said of them.
    """
    yield from ((0.0 if bound is None else _summed(bound, s), s) for s in _unified(choices, world_size))
    if len(choices) == 1:
        return
    few = bound if world_size > MAX_RANKS_TO_ENUMERATE_ALL else None
    if few is not None:
        apart = _quickest(choices, world_size, few)
    else:
        units = [[(0.0, size, n) for size, n in _sizes(c, world_size, choices[LLM])] for c in choices.values()]
        every = (_disaggregated(choices, chosen) for _, chosen in _together(units, world_size, None))
        apart = [(max(_bounds(bound, s)) if bound else 0.0, s) for s in every if s]
    for least, assignment in apart:
        yield from ((least, one) for one in _interleaved(choices, assignment, _deep(assignment, least, few)))


def _deep(assignment: MeshAssignment, least: float, bound: UnitTimeBound | None) -> Set[str]:
    """Units whose pipelines take a share of the step to fill, which chunks may spare; all units without a bound."""
    if bound is None:
        return assignment.meshes.keys()
    fill = {
        name: (size.pp - 1) * bound(name, size, -1) / assignment.num_microbatches[name]
        for name, size in assignment.meshes.items()
    }
    return {name for name, seconds in fill.items() if seconds > MIN_FILL_SHARE_FOR_CHUNKS * least}


def _bounds(bound: UnitTimeBound, assignment: MeshAssignment) -> list[float]:
    return [bound(name, size, assignment.paces[name]) for name, size in assignment.meshes.items()]


def _quickest(
    choices: Mapping[str, UnitChoices], world_size: int, bound: UnitTimeBound
) -> list[tuple[float, MeshAssignment]]:
    """Of units on ranks of their own the sizes that look quickest.

    For each number of the LLM's replicas in turn, as that decides how large an encoder's microbatches are; and for
    each depth of its pipeline, as that decides how many of them an encoder holds.
    """
    found: list[tuple[float, MeshAssignment]] = []
    for can_fit in (True, False):
        for dp, pp in product(choices[LLM].dp, _doubling(choices[LLM].pp)):
            units = list(_sizes_beside(choices, dp, pp, world_size, bound, can_fit))
            if all(units):
                kept = _together(units, world_size, 4 * MAX_MESHES_PER_RANK_COUNT)
                found += [(b, assignment) for b, chosen in kept if (assignment := _disaggregated(choices, chosen))]
        if found:
            break
    seen = Counter[MeshSize]()
    some: list[tuple[float, MeshAssignment]] = []
    for least, assignment in sorted(found, key=lambda entry: entry[0]):
        seen[assignment.meshes[LLM]] += 1
        if seen[assignment.meshes[LLM]] <= MAX_ASSIGNMENTS_PER_LLM_MESH and len(some) < MAX_MESHES_PER_RANK_COUNT:
            some.append((least, assignment))
    return some


def _doubling(depths: Sequence[int]) -> list[tuple[int, ...]]:
    """Depths in runs of which none is twice as deep as another."""
    return [tuple(run) for _, run in groupby(sorted(depths), key=int.bit_length)]


def _sizes_beside(
    choices: Mapping[str, UnitChoices],
    llm_dp: int,
    llm_pp: tuple[int, ...],
    world_size: int,
    bound: UnitTimeBound,
    can_fit: bool,
) -> Iterator[list["Sized"]]:
    """Each unit's sizes with their bounds and microbatches, beside so many LLM replicas of one of these depths."""
    llm, encoders = choices[LLM], set(takewhile(LLM.__ne__, choices))
    count = llm.batch // llm_dp

    def bounded(unit: UnitChoices, most: int) -> list[Sized]:
        """Those that can fit, or the most split ones first."""
        depth = min(llm_pp) if unit.name in encoders else 0
        sizes = [(size, n if n > 0 else count // -n) for size, n in _sizes(unit, most, llm) if n > 0 or count % -n == 0]
        found = [(bound(unit.name, size, n, depth * n // count), size, n) for size, n in sizes]
        if can_fit:
            return [entry for entry in found if entry[0] < math.inf]
        return sorted(found, key=lambda entry: -entry[1].tp * entry[1].pp)

    own = bounded(replace(llm, dp=(llm_dp,), pp=llm_pp), world_size)
    left = world_size - min((size.ranks for _, size, _ in own), default=world_size)
    for unit in choices.values():
        yield own if unit.name == LLM else bounded(unit, left)


def unit_mesh_sizes(choices: Mapping[str, UnitChoices], unit: str, world_size: int) -> set[MeshSize]:
    """Sizes that a unit may have on some of so many ranks."""
    return {size for size, _ in _sizes(choices[unit], world_size, choices[LLM])}


def assignments_near_shares(
    choices: Mapping[str, UnitChoices], shares: Mapping[str, float], bound: UnitTimeBound
) -> Iterator[list[MeshAssignment]]:
    """Sizes of units on ranks of their own that look quickest, first for numbers of ranks nearest to these shares."""
    world_size, llm = round(sum(shares.values())), choices[LLM]
    bounded = ([(bound(c.name, size, n), size, n) for size, n in _sizes(c, world_size, llm)] for c in choices.values())
    units = [_by_ranks(entry for entry in sizes if entry[0] < math.inf) for sizes in bounded]
    splits = ((*ranks, world_size - sum(ranks)) for ranks in product(*units[:-1]))
    possible = [ranks for ranks in splits if ranks[-1] in units[-1]]
    wanted = [shares[name] for name in choices]
    for ranks in sorted(possible, key=lambda own: (sum(abs(a - b) for a, b in zip(own, wanted, strict=True)), own)):
        sized = [by_ranks[n] for by_ranks, n in zip(units, ranks, strict=True)]
        found = sorted(_together(sized, world_size, MAX_MESHES_PER_RANK_COUNT), key=lambda entry: entry[0])
        yield [assignment for _, chosen in found if (assignment := _disaggregated(choices, chosen))]


def _summed(bound: UnitTimeBound, assignment: MeshAssignment) -> float:
    """All units take turns on the same ranks."""
    return sum(_bounds(bound, assignment))


def _unified(choices: Mapping[str, UnitChoices], world_size: int) -> Iterator[MeshAssignment]:
    names, llm = list(choices), choices[LLM]
    shared = set.intersection(*({(tp, dp) for tp in c.tp for dp in c.dp} for c in choices.values()))
    fewest, most = max(min(c.pp) for c in choices.values()), sum(max(c.pp) for c in choices.values())
    for tp, dp in sorted(shared):
        pp, rest = divmod(world_size, tp * dp)
        if rest == 0 and fewest <= pp <= most:
            for vpp in _chunks(llm, pp, sum(c.layers for c in choices.values()), llm.batch // dp):
                if any(c.fixed_vpp not in (None, vpp) for c in choices.values()):
                    continue  # all go round the ranks together
                if vpp > 1 and len(names) > 1 and any(len(c.pp) == 1 and not c.is_whole for c in choices.values()):
                    continue  # what spans a fixed number of ranks is held for one round over them
                sizes = dict.fromkeys(names, MeshSize(tp, pp, dp, vpp))
                counts = {name: c.fixed_microbatches or llm.batch // dp for name, c in choices.items()}
                yield MeshAssignment("unified", sizes, counts | {LLM: llm.batch // dp})


def _chunks(unit: UnitChoices, pp: int, layers: int, num_microbatches: int) -> Iterator[int]:
    """Chunks of a pipeline rank: with one rank, or fewer microbatches than ranks, more than one only cost."""
    for vpp in unit.vpp:
        if vpp == 1 or (pp * vpp <= layers and (len(unit.vpp) == 1 or 1 < pp <= num_microbatches)):
            yield vpp


def _sizes(unit: UnitChoices, most: int, llm: UnitChoices) -> Iterator[tuple[MeshSize, int]]:
    """Sizes of a unit on ranks of its own, up to `most`, with its microbatches.

    An encoder has those that the recipe fixes; or, as -k, one for k of the LLM's. `_interleaved` gives it chunks.
    """
    for tp, dp, pp in product(unit.tp, unit.dp, unit.pp):
        if tp * dp * pp > most:
            continue
        counts = LLM_MICROBATCHES_PER_ENCODER_MICROBATCH if unit.name != LLM else (llm.batch // dp,)
        if unit.fixed_microbatches and unit.name != LLM:
            counts = (unit.fixed_microbatches,)
        for count in counts:
            for vpp in _chunks(unit, pp, unit.layers, count) if unit.name == LLM else (unit.fixed_vpp or 1,):
                if pp * vpp <= unit.layers:
                    yield MeshSize(tp, pp, dp, vpp), count


Sized = tuple[float, MeshSize, int]


Chosen = tuple[float, tuple[tuple[MeshSize, int], ...]]  # sizes of the first units, and the bound of the slowest


def _together(units: Sequence[Sequence[Sized]], ranks: int, kept: int | None) -> list[Chosen]:
    """Choose a size for every unit so that they use `ranks` in all; the bound is that of the slowest.

    With `kept`, only that many of those that use the same number of ranks go on, the quickest.
    """
    sized: list[dict[int, list[Sized]]] = []
    for sizes in units:
        by_ranks = _by_ranks(sizes)
        if kept is not None:
            by_ranks = {n: sorted(found, key=lambda entry: entry[0])[:kept] for n, found in by_ranks.items()}
        sized.append(by_ranks)
    left = [1]  # what the units that follow may use, as bits
    for by_ranks in reversed(sized[1:]):
        left.append(_totals(left[-1], by_ranks.keys()))
    partial: dict[int, list[Chosen]] = {0: [(0.0, ())]}
    for by_ranks in sized:
        rest = left.pop()
        pairs: dict[int, list[tuple[list[Chosen], list[Sized]]]] = {}
        for used, before in partial.items():
            for own, entries in by_ranks.items():
                if used + own <= ranks and rest >> (ranks - used - own) & 1:
                    pairs.setdefault(used + own, []).append((before, entries))
        partial = {total: _joined(found, kept) for total, found in pairs.items()}
    return partial.get(ranks, [])


def _by_ranks(sizes: Iterable[Sized]) -> dict[int, list[Sized]]:
    found: dict[int, list[Sized]] = {}
    for entry in sizes:
        found.setdefault(entry[1].ranks, []).append(entry)
    return found


def _joined(pairs: Sequence[tuple[list[Chosen], list[Sized]]], kept: int | None) -> list[Chosen]:
    """Each of the first units' sizes with each of the next one's; or the `kept` quickest by bounds, in that order."""
    found: list[Chosen] = []
    if kept is not None:
        pairs = sorted(pairs, key=lambda pair: max(pair[0][0][0], pair[1][0][0]))
    for before, entries in pairs:
        if kept is not None and len(found) == kept and max(before[0][0], entries[0][0]) >= found[-1][0]:
            break  # as are all that follow
        few, some = (before, entries) if kept is None else _beginnings(before, entries, kept)
        found += [(max(bound, b), (*chosen, (size, n))) for bound, chosen in few for b, size, n in some]
        if kept is not None:
            found = sorted(found, key=lambda entry: entry[0])[:kept]
    return found


def _beginnings(before: list[Chosen], entries: list[Sized], kept: int) -> tuple[list[Chosen], list[Sized]]:
    """As much of two lists in order as the `kept` pairs need whose larger bounds are least."""
    a = b = 1
    while a * b < kept and (a < len(before) or b < len(entries)):
        if b == len(entries) or (a < len(before) and before[a][0] <= entries[b][0]):
            a += 1
        else:
            b += 1
    return before[:a], entries[:b]


def _disaggregated(choices: Mapping[str, UnitChoices], chosen: Sequence[tuple[MeshSize, int]]) -> MeshAssignment | None:
    """Give every unit its microbatches; None where an encoder's do not go with the LLM's."""
    sizes = {name: size for name, (size, _) in zip(choices, chosen, strict=True)}
    llm = choices[LLM].batch // sizes[LLM].dp
    counts = {}
    for name, (_, n) in zip(choices, chosen, strict=True):
        if n < 0 and llm % -n:
            return None
        counts[name] = n if n > 0 else llm // -n
    if any(n % llm and llm % n for n in counts.values()):
        return None
    return MeshAssignment("disaggregated", sizes, counts)


def _interleaved(
    choices: Mapping[str, UnitChoices], assignment: MeshAssignment, deep: Set[str]
) -> Iterator[MeshAssignment]:
    """The assignment, and with several chunks of the layers of `deep` encoders on a rank, where blocks divide evenly.

    They fill an encoder's pipeline sooner, which is all that they do: so they are no sizes of their own, among which
    only some are kept.
    """
    options = []
    for name, size in assignment.meshes.items():
        unit, is_open = choices[name], name != LLM and name in deep and 1 < size.pp <= assignment.num_microbatches[name]
        blocks = unit.layers - 2  # between an embedding of media and a projector
        even = [v for v in unit.vpp[1:] if is_open and blocks % (size.pp * v) == 0]
        options.append([size, *(replace(size, vpp=v) for v in even)])
    for sizes in product(*options):
        yield replace(assignment, meshes=dict(zip(assignment.meshes, sizes, strict=True)))


def split_tp_group_of(assignment: MeshAssignment, ranks_per_node: int) -> tuple[int, ...] | None:
    """A tensor-parallel group whose ranks lie on different nodes, if there is one."""
    sizes = [assignment.meshes[LLM]] if assignment.placement == "unified" else list(assignment.meshes.values())
    first = 0
    for size in sizes:
        if ranks_per_node % size.tp or first % size.tp:
            for start in range(first, first + size.ranks, size.tp):
                if start // ranks_per_node != (start + size.tp - 1) // ranks_per_node:
                    return tuple(range(start, start + size.tp))
        first += size.ranks
    return None
