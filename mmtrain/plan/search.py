"""Which layouts there are, and which of them is fastest: best-first, with a bound that no schedule can beat."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mmtrain.costs import Hardware, RankMemory, parameters, upstream_trains
from mmtrain.costs.hardware import ELEMENT_BYTES, GIB
from mmtrain.plan.constraints import UnitChoices
from mmtrain.plan.cut import Sizing, arrange, graph_for
from mmtrain.plan.layout import Layout, MeshSize, split_lane
from mmtrain.plan.plan import Alternative
from mmtrain.plan.pricing import Pricing, StageSeconds, sizes_of
from mmtrain.program.actions import Collective, Compute, Forward, Send
from mmtrain.program.builder import build_1f1b
from mmtrain.program.graph import Microbatch, StageGraph, StageId
from mmtrain.program.loads import StepLoads
from mmtrain.program.lower import lower
from mmtrain.program.simulate import simulate
from mmtrain.program.timing import ModelTiming, Transport

SAME = 1.001  # step times within this factor count as equal; the simpler layout then wins


@dataclass(frozen=True)
class Judged:
    """A layout that fits, with what the simulator says of it on the drawn batches (means)."""

    layout: Layout
    graph: StageGraph
    step_time_s: float
    bubbles: Mapping[str, float]  # kind -> share of all rank-seconds
    memory: Mapping[int, RankMemory]  # ranks of the first replica
    busiest: StageId
    busiest_share: float  # of the step that its ranks work on it

    @property
    def peak_bytes(self) -> float:
        """Bytes on the fullest rank."""
        return max(m.total for m in self.memory.values())


@dataclass(frozen=True)
class Outcome:
    """Everything the search learned."""

    judged: tuple[Judged, ...]  # the chosen one first, then by step time
    losers: tuple[Alternative, ...]  # those never simulated, with the reason


def sizings(choices: Mapping[str, UnitChoices], world_size: int) -> Iterator[Sizing]:
    """Every placement and size that uses exactly `world_size` ranks."""
    names = list(choices)
    shared = set.intersection(*({(tp, dp) for tp in c.tp for dp in c.dp} for c in choices.values()))
    num_layers = sum(max(c.pp) for c in choices.values())
    for tp, dp in sorted(shared):
        pp, rest = divmod(world_size, tp * dp)
        if rest == 0 and 1 <= pp <= num_layers:
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
    candidates: list[Sizing],
    pricing: Pricing,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    at_least: int,
) -> Outcome:
    """Simulate layouts in the order of their lower bounds until no other can be faster than the best one found.

    At least `at_least` are simulated if so many fit, so that the ranking has figures to show.
    """
    queue, losers = _bounded(candidates, pricing, choices, machine)
    judged: list[Judged] = []
    for bound, _, sizing, layout, busiest in queue:
        best = min((j.step_time_s for j in judged), default=float("inf"))
        if bound > best * SAME and len(judged) >= at_least:
            losers.append(_lost(sizing, f"at least {bound / best:.2f}x slower: {busiest} cannot be done sooner"))
            continue
        fitting = _within_memory(sizing, layout, pricing, choices, machine)
        if isinstance(fitting, Alternative):
            losers.append(fitting)
        else:
            judged.append(judge(fitting, pricing, machine))
    return Outcome(tuple(_ranked(judged)), tuple(losers))


def _bounded(
    candidates: list[Sizing], pricing: Pricing, choices: Mapping[str, UnitChoices], machine: Hardware
) -> tuple[list[tuple[float, int, Sizing, Layout, StageId]], list[Alternative]]:
    """Cut every candidate; those that can be, by rising lower bound on their step, and the others."""
    losers: list[Alternative] = []
    queue: list[tuple[float, int, Sizing, Layout, StageId]] = []
    for place, sizing in enumerate(candidates):
        layout = arrange(sizing, pricing, choices)
        if layout is None:
            losers.append(_lost(sizing, "its layers cannot be cut into so many stages under parallel.*.pp"))
        elif lane := split_lane(layout.units, machine.ranks_per_node):
            losers.append(_lost(sizing, f"the tensor-parallel group of ranks {lane} lies on two nodes"))
        else:
            bound, busiest = pricing.step_bound(graph_for(layout, pricing))
            queue.append((bound, place, sizing, layout, busiest))
    return sorted(queue, key=lambda entry: entry[:2]), losers


def judge(layout: Layout, pricing: Pricing, machine: Hardware) -> Judged:
    """Simulate the layout's program on every drawn batch."""
    graph = graph_for(layout, pricing)
    program = lower(build_1f1b(graph))  # the chosen one is checked as well, see `story`
    seconds = {s.id: pricing.stage_seconds(graph, s.id) for s in graph.stages}
    timings = [
        DrawnTiming(model_timing(graph, pricing, loads, machine), seconds, batch)
        for batch, loads in enumerate(pricing.loads(sizes_of(graph)))
    ]
    lines = [simulate(program, timing, graph.num_groups) for timing in timings]
    step_time = sum(t.step_time_s for t in lines) / len(lines)
    shares = [t.bubble_shares() for t in lines]
    busy = {sid: float(s.busy.max(axis=1).mean()) for sid, s in seconds.items()}
    busiest = max(busy, key=lambda sid: busy[sid])
    return Judged(
        layout,
        graph,
        step_time,
        {kind: sum(s[kind] for s in shares) / len(shares) for kind in shares[0]},
        pricing.memory(graph),
        busiest,
        busy[busiest] / step_time if step_time else 0.0,
    )


def model_timing(graph: StageGraph, pricing: Pricing, loads: StepLoads, machine: Hardware) -> ModelTiming:
    """What the simulator asks, for one batch."""
    return ModelTiming(
        graph,
        pricing.shape,
        pricing.costs,
        loads,
        upstream_trains(pricing.shape),
        parameters,
        ELEMENT_BYTES[pricing.precision],
        machine.ranks_per_node,
    )


@dataclass(frozen=True)
class DrawnTiming:
    """`ModelTiming` for one of the drawn batches, whose compute was priced before for all candidates at once."""

    model: ModelTiming
    seconds: Mapping[StageId, StageSeconds]
    batch: int

    def compute(self, action: Compute) -> float:
        """Seconds of a forward or backward."""
        stage = self.seconds[action.stage]
        grid = stage.forward if isinstance(action, Forward) else stage.backward
        return float(grid[self.batch, action.mb.replica, action.mb.index])

    def message(self, sender: int, action: Send) -> Transport:
        """As `ModelTiming` says."""
        return self.model.message(sender, action)

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> Transport:
        """As `ModelTiming` says."""
        return self.model.collective(rank, action, group)

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        """Not asked of a candidate: its memory was held against the limit before (`Pricing.memory`)."""
        return 0


def _within_memory(
    sizing: Sizing, layout: Layout, pricing: Pricing, choices: Mapping[str, UnitChoices], machine: Hardware
) -> Layout | Alternative:
    """The layout, or one cut anew so that it fits, or why none does."""
    memory = pricing.memory(graph_for(layout, pricing))
    if _fits(memory, machine):
        return layout
    again = arrange(sizing, pricing, choices, machine.memory_bytes)
    if again is not None and _fits(pricing.memory(graph_for(again, pricing)), machine):
        return again
    rank = max(memory, key=lambda r: memory[r].total)
    need, limit, binding = memory[rank].total / GIB, machine.memory_bytes / GIB, memory[rank].binding
    share = memory[rank].by_kind()[binding] / GIB
    reason = f"does not fit: rank {rank} needs {need:.1f} of {limit:.1f} GiB, most of it {binding} ({share:.1f} GiB)"
    return _lost(sizing, reason, need)


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
