"""Every placement and size that the recipe allows, and what their steps take at least."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from operator import or_

from mmtrain.plan.constraints import UnitChoices
from mmtrain.plan.layout import MeshSize
from mmtrain.plan.plan import Placement
from mmtrain.plan.pricing import Spread
from mmtrain.program.graph import LLM

MERGED = (-1, -2, -4)  # -k: an encoder on ranks of its own joins k of the LLM's microbatches to one of its own
WORTH = 0.01  # of a step: what an encoder's pipeline takes to fill, below which chunks are not looked at
ALL_SIZES = 8  # ranks up to which every size is looked at
KEPT = 16  # sizes of units that share so many ranks, the quickest by their bounds, where there are very many


@dataclass(frozen=True)
class Sizing:
    """A placement with the size of every unit's mesh, still uncut.

    In `unified` all units have the same size, and its `pp` is the number of ranks of the one pipeline.
    """

    placement: Placement
    sizes: Mapping[str, MeshSize]
    counts: Mapping[str, int]  # microbatches of each replica, by unit

    @property
    def spread(self) -> Spread:
        """Data-parallel sizes and microbatches by unit."""
        return tuple((name, size.dp, self.counts[name]) for name, size in self.sizes.items())

    @property
    def ranks(self) -> int:
        """Ranks that it uses."""
        if self.placement == "unified":
            return next(iter(self.sizes.values())).ranks
        return sum(size.ranks for size in self.sizes.values())

    def __str__(self) -> str:
        merged = {name: f" mb{n}" if n != self.counts[LLM] else "" for name, n in self.counts.items()}
        if self.placement == "unified":
            return f"unified: {next(iter(self.sizes.values()))}" + "".join(
                f", {name}{text}" for name, text in merged.items() if text
            )
        return "disaggregated: " + ", ".join(f"{name} {size}{merged[name]}" for name, size in self.sizes.items())


def adds_up(choices: Mapping[str, UnitChoices], world_size: int, placement: Placement) -> bool:
    """Whether there are `unified` or `disaggregated` sizes of exactly so many ranks; faster than to list them."""
    if placement == "unified":
        return any(True for _ in _unified(choices, world_size))
    if len(choices) == 1:
        return False
    totals = 1  # bit n: the units so far may use n ranks
    for unit in choices.values():
        own = {size.ranks for size, _ in _sizes(unit, world_size, choices[LLM])}
        totals = reduce(or_, (totals << ranks for ranks in own), 0)
    return bool(totals >> world_size & 1)


UnitBound = Callable[[str, MeshSize, int], float]  # seconds of a unit of this size with so many microbatches, at least


def sizings(choices: Mapping[str, UnitChoices], world_size: int) -> Iterator[Sizing]:
    """Every placement and size that uses exactly `world_size` ranks."""
    yield from (sizing for _, sizing in bounded_sizings(choices, world_size))


def bounded_sizings(
    choices: Mapping[str, UnitChoices], world_size: int, bound: UnitBound | None = None
) -> Iterator[tuple[float, Sizing]]:
    """Every placement and size that uses exactly `world_size` ranks, with a bound of its step's seconds.

    On more than `ALL_SIZES` ranks, and with a bound: of units on ranks of their own only the sizes that look quickest,
    and none whose bound is infinite; if all of a unit are, its most split ones, so that something can be said of them.
    """
    few = bound is not None and world_size > ALL_SIZES
    yield from ((0.0 if bound is None else _summed(bound, s), s) for s in _unified(choices, world_size))
    if len(choices) == 1:
        return
    llm, units = choices[LLM], []
    for c in choices.values():
        sizes = _sizes(c, world_size, llm)
        units.append([(bound(c.name, size, n) if bound else 0.0, size, n) for size, n in sizes])
    if few:
        units = [_bounded(sizes) for sizes in units]
    for least, chosen in _together(units, world_size, KEPT if few else None):
        if sizing := _disaggregated(choices, chosen):
            deep = _deep(sizing, least, bound if few else None)
            yield from ((least, one) for one in _interleaved(choices, sizing, deep))


def _deep(sizing: Sizing, least: float, bound: UnitBound | None) -> Set[str]:
    """Units whose pipelines take a share of the step to fill, which chunks may spare; all units without a bound."""
    if bound is None:
        return sizing.sizes.keys()
    fill = {name: (size.pp - 1) * bound(name, size, -1) / sizing.counts[name] for name, size in sizing.sizes.items()}
    return {name for name, seconds in fill.items() if seconds > WORTH * least}


def _bounded(sizes: Sequence["Sized"]) -> list["Sized"]:
    """Those that have a bound, or without any the most split ones first."""
    finite = [entry for entry in sizes if entry[0] < math.inf]
    return finite or sorted(sizes, key=lambda entry: -entry[1].tp * entry[1].pp)


def sizes_alone(choices: Mapping[str, UnitChoices], unit: str, world_size: int) -> set[MeshSize]:
    """Sizes that a unit may have on some of so many ranks."""
    return {size for size, _ in _sizes(choices[unit], world_size, choices[LLM])}


def in_shares(
    choices: Mapping[str, UnitChoices], shares: Mapping[str, float], bound: UnitBound
) -> Iterator[list[Sizing]]:
    """Sizes of units on ranks of their own that look quickest, first for numbers of ranks nearest to these shares."""
    world_size, llm = round(sum(shares.values())), choices[LLM]
    units: list[dict[int, list[Sized]]] = []
    for c in choices.values():
        by_ranks: dict[int, list[Sized]] = {}
        for size, n in _sizes(c, world_size, llm):
            if (least := bound(c.name, size, n)) < math.inf:
                by_ranks.setdefault(size.ranks, []).append((least, size, n))
        units.append(by_ranks)
    splits = ((*ranks, world_size - sum(ranks)) for ranks in product(*units[:-1]))
    possible = [ranks for ranks in splits if ranks[-1] in units[-1]]
    wanted = [shares[name] for name in choices]
    for ranks in sorted(possible, key=lambda own: (sum(abs(a - b) for a, b in zip(own, wanted, strict=True)), own)):
        sized = [by_ranks[n] for by_ranks, n in zip(units, ranks, strict=True)]
        found = sorted(_together(sized, world_size, KEPT), key=lambda entry: entry[0])
        yield [sizing for _, chosen in found if (sizing := _disaggregated(choices, chosen))]


def _summed(bound: UnitBound, sizing: Sizing) -> float:
    """All units take turns on the same ranks."""
    return sum(bound(name, size, sizing.counts[name]) for name, size in sizing.sizes.items())


def _unified(choices: Mapping[str, UnitChoices], world_size: int) -> Iterator[Sizing]:
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
                yield Sizing("unified", sizes, counts | {LLM: llm.batch // dp})


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
        counts = MERGED if unit.name != LLM else (llm.batch // dp,)
        if unit.fixed_microbatches and unit.name != LLM:
            counts = (unit.fixed_microbatches,)
        for count in counts:
            for vpp in _chunks(unit, pp, unit.layers, count) if unit.name == LLM else (unit.fixed_vpp or 1,):
                if pp * vpp <= unit.layers:
                    yield MeshSize(tp, pp, dp, vpp), count


Sized = tuple[float, MeshSize, int]


def _together(
    units: Sequence[Sequence[Sized]], ranks: int, kept: int | None
) -> list[tuple[float, tuple[tuple[MeshSize, int], ...]]]:
    """Choose a size for every unit so that they use `ranks` in all; the bound is that of the slowest.

    With `kept`, only that many of those that use the same number of ranks go on.
    """
    partial: dict[int, list[tuple[float, tuple[tuple[MeshSize, int], ...]]]] = {0: [(0.0, ())]}
    for at, sizes in enumerate(units):
        is_last = at == len(units) - 1
        by_ranks: dict[int, list[Sized]] = {}
        for entry in sizes:
            by_ranks.setdefault(entry[1].ranks, []).append(entry)
        joined: dict[int, list[tuple[float, tuple[tuple[MeshSize, int], ...]]]] = {}
        for used, before in partial.items():
            for own, entries in by_ranks.items():
                total = used + own
                if total > ranks or (is_last and total != ranks):
                    continue
                joined.setdefault(total, []).extend(
                    (max(bound, b), (*chosen, (size, n))) for bound, chosen in before for b, size, n in entries
                )
        partial = joined
        if kept is not None:
            partial = {n: sorted(found, key=lambda entry: entry[0])[:kept] for n, found in joined.items()}
    return partial.get(ranks, [])


def _disaggregated(choices: Mapping[str, UnitChoices], chosen: Sequence[tuple[MeshSize, int]]) -> Sizing | None:
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
    return Sizing("disaggregated", sizes, counts)


def _interleaved(choices: Mapping[str, UnitChoices], sizing: Sizing, deep: Set[str]) -> Iterator[Sizing]:
    """The sizing, and with several chunks of the layers of `deep` encoders on a rank, where blocks share out evenly.

    They fill an encoder's pipeline sooner, which is all that they do: so they are no sizes of their own, among which
    only some are kept.
    """
    options = []
    for name, size in sizing.sizes.items():
        unit, is_open = choices[name], name != LLM and name in deep and 1 < size.pp <= sizing.counts[name]
        blocks = unit.layers - 2  # between an embedding of media and a projector
        even = [v for v in unit.vpp[1:] if is_open and blocks % (size.pp * v) == 0]
        options.append([size, *(replace(size, vpp=v) for v in even)])
    for sizes in product(*options):
        yield replace(sizing, sizes=dict(zip(sizing.sizes, sizes, strict=True)))


def split_lane_of(sizing: Sizing, ranks_per_node: int) -> tuple[int, ...] | None:
    """A tensor-parallel group whose ranks lie on different nodes, if there is one."""
    sizes = [sizing.sizes[LLM]] if sizing.placement == "unified" else list(sizing.sizes.values())
    first = 0
    for size in sizes:
        if ranks_per_node % size.tp or first % size.tp:
            for lane in range(first, first + size.ranks, size.tp):
                if lane // ranks_per_node != (lane + size.tp - 1) // ranks_per_node:
                    return tuple(range(lane, lane + size.tp))
        first += size.ranks
    return None
