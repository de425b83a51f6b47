"""Which layouts there are, and which of them is fastest: best-first, with bounds that no simulation can beat."""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mmtrain.costs import Hardware, RankMemory
from mmtrain.costs.hardware import GIB
from mmtrain.plan.bounds import work_bound
from mmtrain.plan.constraints import UnitChoices
from mmtrain.plan.cut import Sizing, arrange, graph_for
from mmtrain.plan.judge import Judged, judge, tight_bound
from mmtrain.plan.layout import Layout, MeshSize, split_lane
from mmtrain.plan.plan import Alternative
from mmtrain.plan.pricing import Pricing
from mmtrain.program.graph import StageGraph, StageId

Progress = Callable[[int, int], None]  # done, total
SAME = 1.001  # step times within this factor count as equal; the simpler layout then wins


@dataclass(frozen=True)
class Candidate:
    """A layout that has not been simulated."""

    sizing: Sizing
    layout: Layout
    graph: StageGraph
    bound: float  # seconds its step takes at least
    busiest: StageId  # whose rank asks for them


@dataclass(frozen=True)
class Outcome:
    """Everything the search learned."""

    judged: tuple[Judged, ...]  # the chosen one first, then by step time
    losers: tuple[Alternative, ...]  # those never simulated, with the reason


def sizings(choices: Mapping[str, UnitChoices], world_size: int) -> Iterator[Sizing]:
    """Every placement and size that uses exactly `world_size` ranks."""
    names = list(choices)
    shared = set.intersection(*({(tp, dp) for tp in c.tp for dp in c.dp} for c in choices.values()))
    fewest, most = max(min(c.pp) for c in choices.values()), sum(max(c.pp) for c in choices.values())
    for tp, dp in sorted(shared):
        pp, rest = divmod(world_size, tp * dp)
        if rest == 0 and fewest <= pp <= most:
            yield Sizing("unified", dict.fromkeys(names, MeshSize(tp, pp, dp)))
    if len(names) > 1:
        yield from (Sizing("disaggregated", sizes) for sizes in _split(list(choices.values()), world_size))


def _split(choices: list[UnitChoices], ranks: int) -> Iterator[dict[str, MeshSize]]:
    """Give every unit ranks of its own, `ranks` in all."""
    first, *others = choices
    if not others:
        yield from ({first.name: size} for size in first.sizes(ranks))
        return
    for own in range(1, ranks - len(others) + 1):
        for size in first.sizes(own):
            yield from ({first.name: size, **rest} for rest in _split(others, ranks - own))


def search(
    sizings: Sequence[Sizing],
    pricing: Pricing,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    at_least: int,
    progress: Progress | None = None,
) -> Outcome:
    """Simulate layouts in the order of their lower bounds until no other can be faster than the best one found.

    A candidate is first bounded by its work, then, when its turn comes, by its schedule without communication, and
    simulated when it is still first. At least `at_least` are, if so many fit, so that the ranking has figures to show.
    """
    total = 2 * len(sizings)  # each is cut, then judged or dismissed
    candidates, losers = _cut_all(_told(sizings, total, progress), pricing, choices, machine)
    queue = [(c.bound, place, False) for place, c in enumerate(candidates)]
    heapq.heapify(queue)
    judged: list[Judged] = []
    while queue:
        if progress is not None:
            progress(total - len(queue), total)
        bound, place, is_tight = heapq.heappop(queue)
        candidate = candidates[place]
        best = min((j.step_time_s for j in judged), default=math.inf)
        if bound > best * SAME and len(judged) >= at_least:
            slower = f"at least {bound / best:.2f}x slower: {candidate.busiest} cannot be done sooner"
            losers.append(_lost(candidate.sizing, slower))
        elif not is_tight:
            heapq.heappush(queue, (max(bound, tight_bound(candidate.graph, pricing, machine)), place, True))
        else:
            fitting = _within_memory(candidate, pricing, choices, machine)
            if isinstance(fitting, Alternative):
                losers.append(fitting)
            else:
                judged.append(judge(fitting, pricing, machine))
    return Outcome(tuple(_ranked(judged)), tuple(losers))


def joined(*outcomes: Outcome) -> Outcome:
    """What several searches learned, ranked together."""
    return Outcome(
        tuple(_ranked([j for outcome in outcomes for j in outcome.judged])),
        tuple(loser for outcome in outcomes for loser in outcome.losers),
    )


def _told(sizings: Sequence[Sizing], total: int, progress: Progress | None) -> Iterator[Sizing]:
    for done, sizing in enumerate(sizings):
        if progress is not None:
            progress(done, total)
        yield sizing


def _cut_all(
    sizings: Iterable[Sizing], pricing: Pricing, choices: Mapping[str, UnitChoices], machine: Hardware
) -> tuple[list[Candidate], list[Alternative]]:
    """Cut every candidate into stages; also return those that cannot be."""
    losers: list[Alternative] = []
    candidates: list[Candidate] = []
    for sizing in sizings:
        layout = arrange(sizing, pricing, choices)
        if layout is None:
            losers.append(_lost(sizing, "its layers cannot be cut into so many stages under parallel.*.pp"))
        elif lane := split_lane(layout.units, machine.ranks_per_node):
            losers.append(_lost(sizing, f"the tensor-parallel group of ranks {lane} lies on two nodes"))
        else:
            graph = graph_for(layout, pricing)
            candidates.append(Candidate(sizing, layout, graph, *work_bound(graph, pricing.stage_seconds(graph))))
    return candidates, losers


def _within_memory(
    candidate: Candidate, pricing: Pricing, choices: Mapping[str, UnitChoices], machine: Hardware
) -> Layout | Alternative:
    """The layout, or one cut anew so that it fits, or why none does."""
    memory = pricing.memory(candidate.graph)
    if _fits(memory, machine):
        return candidate.layout
    again = arrange(candidate.sizing, pricing, choices, machine.memory_bytes)
    if again is not None and _fits(pricing.memory(graph_for(again, pricing)), machine):
        return again
    rank = max(memory, key=lambda r: memory[r].total)
    need, limit, binding = memory[rank].total / GIB, machine.memory_bytes / GIB, memory[rank].binding
    share = memory[rank].by_kind()[binding] / GIB
    reason = f"does not fit: rank {rank} needs {need:.1f} of {limit:.1f} GiB, most of it {binding} ({share:.1f} GiB)"
    return _lost(candidate.sizing, reason, need)


def _fits(memory: Mapping[int, RankMemory], machine: Hardware) -> bool:
    return all(m.total <= machine.memory_bytes for m in memory.values())


def _lost(sizing: Sizing, reason: str, peak_gib: float | None = None) -> Alternative:
    return Alternative(
        summary=str(sizing), placement=sizing.placement, step_time_s=None, peak_memory_gib=peak_gib, reason=reason
    )


def _ranked(judged: list[Judged]) -> list[Judged]:
    """Fastest first; of those as fast as the fastest, the simplest is chosen and leads."""
    ordered = sorted(judged, key=lambda j: (j.step_time_s, j.layout.complexity))
    if not ordered:
        return []
    equal = [j for j in ordered if j.step_time_s <= ordered[0].step_time_s * SAME]
    chosen = min(equal, key=lambda j: (j.layout.complexity, j.step_time_s))
    return [chosen, *(j for j in ordered if j is not chosen)]
