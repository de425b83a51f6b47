"""The fastest colocated plans of a recipe: sizes by what they take at least, then orders, held to the simulator."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from mmtrain.costs import Hardware, RankMemory
from mmtrain.plan.artifact.layout import Layout, MeshSize, split_tp_group
from mmtrain.plan.artifact.plan import Alternative, SchedulePlan
from mmtrain.plan.colocated.colocated_layouts import colocated_layout, encoder_mesh_sizes, llm_mesh_sizes
from mmtrain.plan.colocated.encoder_order import max_ahead_choices, plan_encoder_order
from mmtrain.plan.colocated.llm_alone import min_in_flight, simulate_llm_alone
from mmtrain.plan.colocated.stage_kernels import compute_share
from mmtrain.plan.colocated.tp_bubbles import fill_tp_bubbles, overlaps_collectives
from mmtrain.plan.estimate.evaluate import Candidate, evaluate_layout, schedule_memory
from mmtrain.plan.estimate.layer_costs import BACKWARD, FORWARD, LayerCosts, num_microbatches_of
from mmtrain.plan.estimate.memory_fit import explain_misfit
from mmtrain.plan.search.best_first_search import EQUAL_STEP_TIME_RATIO, Progress, SearchResults
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.plan.search.layer_partition import layout_graph
from mmtrain.program.ir.graph import LLM

MAX_SIMULATED_LAYOUTS = 8  # layouts whose orders are planned and simulated
_Found = Layout | Alternative | None  # what could be laid out, or why not; None: nothing worth telling
RECOMPUTE_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a stage's layers that are recomputed


@dataclass(frozen=True)
class _ColocatedMeshes:
    """Sizes of all units, uncut, and seconds that their step takes at least."""

    encoders: Mapping[str, MeshSize]
    llm: MeshSize
    bound: float

    def __str__(self) -> str:
        return "colocated: " + ", ".join(f"{n} {size}" for n, size in [*self.encoders.items(), (LLM, self.llm)])


def search_colocated(
    layer_costs: LayerCosts,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    world_size: int,
    fastest: float = math.inf,
    progress: Progress | None = None,
) -> SearchResults:
    """Plan and simulate the colocated layouts on `world_size` ranks that may beat `fastest` seconds.

    Layouts are tried in the order of what they take at least: the LLM its pipeline, a rank its share of all work. Of
    each, the encoders' layers are put into the LLM's bubbles, and the order is kept if it is faster than the coarse
    one; of the fastest few, pieces of layers are put into the gaps inside the LLM's layers (see `colocated_fine`).
    Where no order fits into memory, the encoders are kept closer to the LLM, at the price of making it wait. Where
    nothing fits otherwise and the recipe leaves it open, layers are recomputed, encoders' before the LLM's.
    Models with a unit behind the LLM have no colocated layouts here, nor those without one before it.
    """
    encoders = {edge.src for edge in layer_costs.shape.edges if edge.dst == LLM}
    if not encoders or {unit.name for unit in layer_costs.shape.units} != encoders | {LLM}:
        return SearchResults((), ())
    judged: list[Candidate] = []
    losers: list[Alternative] = []
    levels, tried, others = _recomputed(layer_costs), 0, fastest
    every = _enumerate_meshes(layer_costs, choices, world_size, overlaps_collectives(machine))
    for sizes in sorted(every, key=lambda s: (s.bound, s.llm.pp, s.llm.tp)):
        if sizes.bound > fastest * EQUAL_STEP_TIME_RATIO:  # as is all that follows
            losers.append(_lost(sizes, f"at least {sizes.bound / fastest:.2f}x slower: its work cannot be done sooner"))
            break
        if tried >= MAX_SIMULATED_LAYOUTS:
            break
        if progress is not None:
            progress(tried, MAX_SIMULATED_LAYOUTS)
        at = cache(partial(_at_level, sizes, levels, layer_costs, machine))
        smallest = at(len(levels) - 1)
        found: Candidate | Alternative | None = smallest if isinstance(smallest, Alternative) else None
        for level in _enough(at, len(levels)) if isinstance(smallest, Layout) else ():
            layout = at(level)
            limit = fastest * EQUAL_STEP_TIME_RATIO if judged else math.inf  # one is simulated, for the ranking
            found = _judged(sizes, layout, layer_costs, machine, limit) if isinstance(layout, Layout) else layout
            tried += isinstance(layout, Layout)
            if not isinstance(found, Alternative) or found.peak_memory_gib is None:
                break  # recomputing more would make room, which is not what it lacks
        if isinstance(found, Candidate):
            judged.append(found)
            fastest = min(fastest, found.step_time_s)
        elif found is not None:
            losers.append(found)
    return SearchResults(fill_tp_bubbles(judged, layer_costs, machine, others), tuple(losers))


def has_colocated_meshes(choices: Mapping[str, UnitChoices], world_size: int) -> bool:
    """Whether there are colocated sizes on so many ranks."""
    if len(choices) < 2:
        return False
    meshes = (encoders for llm in llm_mesh_sizes(choices, world_size) for encoders in encoder_mesh_sizes(choices, llm))
    return next(meshes, None) is not None


def _enumerate_meshes(
    layer_costs: LayerCosts, choices: Mapping[str, UnitChoices], world_size: int, beside: bool
) -> Iterator[_ColocatedMeshes]:
    work: dict[tuple[str, int], float] = {}
    for one in llm_mesh_sizes(choices, world_size):
        for llm in _with_chunks(one, choices[LLM]):
            for encoders in encoder_mesh_sizes(choices, one):
                yield _ColocatedMeshes(encoders, llm, _bound(layer_costs, encoders, llm, work, beside))


def _with_chunks(size: MeshSize, unit: UnitChoices) -> Iterator[MeshSize]:
    """The size with one, two and four chunks a rank where layers are enough, or as many as the recipe says."""
    tried = (1, 2, 4) if unit.fixed_vpp is None else (unit.fixed_vpp,)
    yield from (replace(size, vpp=v) for v in tried if v == 1 or (size.pp > 1 and size.pp * v <= unit.layers))


def _bound(
    layer_costs: LayerCosts,
    encoders: Mapping[str, MeshSize],
    llm: MeshSize,
    work: dict[tuple[str, int], float],
    beside: bool,
) -> float:
    """Seconds of the LLM's pipeline by itself, or of a rank's work if that is more; mean microbatches, no messages.

    work: rank-seconds of an encoder with a tp, over all its replicas; known from the first sizes that are asked for, as
    how its items are shared out hardly changes it. beside: one unit's collectives may run beside another's compute.
    """
    sizes = {unit.name: llm if unit.name == LLM else encoders[unit.name] for unit in layer_costs.shape.units}
    spread = layer_costs.batch_split({name: size.dp for name, size in sizes.items()})
    count = num_microbatches_of(spread)

    def of_rank(name: str) -> float:
        return float(layer_costs.unit_costs(name, sizes[name].tp, spread).seconds.sum()) / sizes[name].pp * count[name]

    for name, size in encoders.items():
        if (name, size.tp) not in work:
            share = compute_share(layer_costs, name, size.tp, spread) if beside else 1.0
            work[name, size.tp] = of_rank(name) * size.ranks * share
    one = layer_costs.unit_times(LLM, llm.tp, spread).mean[:, [FORWARD, BACKWARD]].sum() / llm.pp * count[LLM]
    alone = one * (1 + (llm.pp - 1) / llm.vpp / count[LLM])
    if beside and (LLM, llm.tp) not in work:
        work[LLM, llm.tp] = compute_share(layer_costs, LLM, llm.tp, spread)
    one *= work[LLM, llm.tp] if beside else 1.0
    return float(max(alone, one + sum(work[name, size.tp] / size.ranks for name, size in encoders.items())))


def _recomputed(layer_costs: LayerCosts) -> list[dict[str, float]]:
    """Shares of layers to recompute where the recipe leaves it open: more and more of the encoders', then the LLM's."""
    free = [unit for unit, wanted in layer_costs.recompute.items() if wanted == "auto"]
    encoders = [{unit: share for unit in free if unit != LLM} for share in RECOMPUTE_SHARES]
    return encoders + [encoders[-1] | {LLM: share} for share in RECOMPUTE_SHARES[1:] if LLM in free]


def _enough(at: Callable[[int], _Found], num_levels: int) -> range:
    """The levels from the first on under which some order can run; more recomputing never needs more memory."""
    return range(bisect_left(range(num_levels), True, key=lambda level: isinstance(at(level), Layout)), num_levels)


def _at_level(
    sizes: _ColocatedMeshes,
    levels: Sequence[Mapping[str, float]],
    layer_costs: LayerCosts,
    machine: Hardware,
    level: int,
) -> _Found:
    return _layout(sizes, levels[level], layer_costs, machine)


def _layout(
    sizes: _ColocatedMeshes, recompute: Mapping[str, float], layer_costs: LayerCosts, machine: Hardware
) -> _Found:
    """The sizes as a layout, or why no order of it can run; None if the layers are too few."""
    layout = colocated_layout(layer_costs, sizes.encoders, sizes.llm, recompute)
    if layout is None:
        return None
    if tp_group := split_tp_group(layout.units, machine.ranks_per_node):
        return _lost(sizes, f"the tensor-parallel group of ranks {tp_group} lies on two nodes")
    graph = layout_graph(layout, layer_costs)
    least = layer_costs.memory(graph, min_in_flight(graph))
    if max(memory.total for memory in least.values()) > machine.memory_bytes:
        return _too_large(sizes, layer_costs, least, machine)
    return layout


def _judged(
    sizes: _ColocatedMeshes, layout: Layout, layer_costs: LayerCosts, machine: Hardware, limit: float
) -> Candidate | Alternative:
    """The faster of planned and coarse order that fits, or why none does, or that the LLM by itself takes too long."""
    graph = layout_graph(layout, layer_costs)
    alone = simulate_llm_alone(graph, layer_costs, machine)
    if alone.step_time_s > limit:
        again = (
            " with the layers recomputed that memory demands"
            if any(unit.num_recomputed for unit in layout.units.values())
            else ""
        )
        return _lost(sizes, f"at least {alone.step_time_s / limit:.2f}x slower: its LLM cannot be done sooner{again}")
    counts = dict(layout.num_microbatches)
    fitting: list[SchedulePlan] = []
    coarse = SchedulePlan(kind="coarse", num_microbatches=counts)
    for max_ahead in max_ahead_choices(sizes.llm.pp):
        order = plan_encoder_order(graph, layer_costs, machine, max_ahead=max_ahead, llm_alone=alone)
        planned = SchedulePlan(kind="explicit", num_microbatches=counts, order=order)
        for schedule in (planned, coarse) if max_ahead is None else (planned,):
            memory = schedule_memory(graph, schedule, layer_costs)
            if max(m.total for m in memory.values()) <= machine.memory_bytes:
                fitting.append(schedule)
        if fitting:
            tried = [evaluate_layout(layout, layer_costs, machine, schedule) for schedule in fitting]
            return min(tried, key=lambda one: one.step_time_s)
    return _too_large(sizes, layer_costs, memory, machine)


def _lost(sizes: _ColocatedMeshes, reason: str, peak_gib: float | None = None) -> Alternative:
    return Alternative(
        summary=str(sizes), placement="colocated", step_time_s=None, peak_memory_gib=peak_gib, reason=reason
    )


def _too_large(
    sizes: _ColocatedMeshes, layer_costs: LayerCosts, memory: Mapping[int, RankMemory], machine: Hardware
) -> Alternative:
    found = explain_misfit(layer_costs, memory, machine)
    return _lost(sizes, found.reason, found.need_gib)
