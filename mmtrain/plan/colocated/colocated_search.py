"""Search the fastest colocated plans of a recipe: meshes by their time lower bound, then orders by simulation."""

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
VPP_CHOICES = (1, 2, 4)  # model chunks of the LLM on a pipeline rank that are tried
RECOMPUTE_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a stage's layers that are recomputed
_LayoutResult = Layout | Alternative | None  # a layout, or why it cannot run; None: too few layers, not worth a line


@dataclass(frozen=True)
class _ColocatedMeshes:
    """A mesh for every unit, before layers are divided into stages, and a lower bound of the step time."""

    encoders: Mapping[str, MeshSize]
    llm: MeshSize
    bound_s: float

    def __str__(self) -> str:
        return "colocated: " + ", ".join(f"{unit} {size}" for unit, size in [*self.encoders.items(), (LLM, self.llm)])


def search_colocated(
    layer_costs: LayerCosts,
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    world_size: int,
    fastest: float = math.inf,
    progress: Progress | None = None,
) -> SearchResults:
    """Plan and simulate the colocated layouts on `world_size` ranks that may beat `fastest` seconds.

    Layouts are tried in the order of their lower bounds. In each one the encoders' layers are put into the LLM's
    bubbles, and that order is kept if it is faster than the coarse one, which runs encoders before and after the LLM.
    In the fastest few, pieces of layers are then put into the gaps inside the LLM's layers (`tp_bubbles`).

    Where no order fits into memory, the encoders stay closer to the LLM, which then waits for them. Where that does not
    fit either and the recipe leaves it open, layers are recomputed, the encoders' before the LLM's.

    Models without an encoder, or with a unit behind the LLM, have no colocated layouts.
    """
    encoders = {edge.src for edge in layer_costs.shape.edges if edge.dst == LLM}
    if not encoders or {unit.name for unit in layer_costs.shape.units} != encoders | {LLM}:
        return SearchResults((), ())
    candidates: list[Candidate] = []
    rejected: list[Alternative] = []
    fastest_elsewhere = fastest
    levels = _recompute_levels(layer_costs)
    num_simulated = 0
    enumerated = _enumerate_meshes(layer_costs, choices, world_size, overlaps_collectives(machine))
    for meshes in sorted(enumerated, key=lambda m: (m.bound_s, m.llm.pp, m.llm.tp)):
        if meshes.bound_s > fastest * EQUAL_STEP_TIME_RATIO:  # and so are all that follow
            ratio = meshes.bound_s / fastest
            rejected.append(_reject(meshes, f"at least {ratio:.2f}x slower by the lower bound of its compute time"))
            break
        if num_simulated >= MAX_SIMULATED_LAYOUTS:
            break
        if progress is not None:
            progress(num_simulated, MAX_SIMULATED_LAYOUTS)
        layout_at = cache(partial(_layout_at_level, meshes, levels, layer_costs, machine))
        smallest = layout_at(len(levels) - 1)
        result: Candidate | Alternative | None = smallest if isinstance(smallest, Alternative) else None
        for level in _levels_that_may_fit(layout_at, len(levels)) if isinstance(smallest, Layout) else ():
            layout = layout_at(level)
            if isinstance(layout, Layout):
                # The first layout is simulated however slow it is, so that the ranking shows a colocated plan.
                limit = fastest * EQUAL_STEP_TIME_RATIO if candidates else math.inf
                result = _simulate_fastest_order(meshes, layout, layer_costs, machine, limit)
                num_simulated += 1
            else:
                result = layout
            lacks_memory = isinstance(result, Alternative) and result.peak_memory_gib is not None
            if not lacks_memory:
                break  # recomputing more layers only saves memory
        if isinstance(result, Candidate):
            candidates.append(result)
            fastest = min(fastest, result.step_time_s)
        elif result is not None:
            rejected.append(result)
    return SearchResults(fill_tp_bubbles(candidates, layer_costs, machine, fastest_elsewhere), tuple(rejected))


def has_colocated_meshes(choices: Mapping[str, UnitChoices], world_size: int) -> bool:
    """Return whether some meshes of all units are colocated on exactly `world_size` ranks."""
    if len(choices) < 2:
        return False
    meshes = (encoders for llm in llm_mesh_sizes(choices, world_size) for encoders in encoder_mesh_sizes(choices, llm))
    return next(meshes, None) is not None


def _enumerate_meshes(
    layer_costs: LayerCosts, choices: Mapping[str, UnitChoices], world_size: int, overlaps: bool
) -> Iterator[_ColocatedMeshes]:
    """Return all meshes with their bounds; `overlaps` is whether ranks compute while they communicate."""
    known: dict[tuple[str, int], float] = {}
    for llm_size in llm_mesh_sizes(choices, world_size):
        for llm in _with_chunks(llm_size, choices[LLM]):
            for encoders in encoder_mesh_sizes(choices, llm_size):
                yield _ColocatedMeshes(encoders, llm, _step_time_bound(layer_costs, encoders, llm, known, overlaps))


def _with_chunks(size: MeshSize, unit: UnitChoices) -> Iterator[MeshSize]:
    """Return the mesh with the recipe's vpp, or else with each of `VPP_CHOICES` for which there are enough layers."""
    for vpp in VPP_CHOICES if unit.fixed_vpp is None else (unit.fixed_vpp,):
        if vpp == 1 or (size.pp > 1 and size.pp * vpp <= unit.layers):
            yield replace(size, vpp=vpp)


def _step_time_bound(
    layer_costs: LayerCosts,
    encoders: Mapping[str, MeshSize],
    llm: MeshSize,
    known: dict[tuple[str, int], float],
    overlaps: bool,
) -> float:
    """Return a lower bound of the step time in seconds, for microbatches of mean cost and without messages.

    It is the time of the LLM's pipeline alone, or of the work of a rank if that is longer.

    Args:
        layer_costs: costs of the model on the sampled batches.
        encoders: meshes of the encoders.
        llm: mesh of the LLM.
        known: filled here. By encoder and tp, rank-seconds of its work over all replicas; they are computed once, since
            they hardly depend on how items are shared out. For the LLM, the share of its time in which it computes.
        overlaps: a rank computes for one unit while it communicates for another, so only compute is counted.
    """
    sizes = {unit.name: llm if unit.name == LLM else encoders[unit.name] for unit in layer_costs.shape.units}
    split = layer_costs.batch_split({unit: size.dp for unit, size in sizes.items()})
    num_microbatches = num_microbatches_of(split)
    for unit, size in encoders.items():
        if (unit, size.tp) not in known:
            unit_s = float(layer_costs.unit_costs(unit, size.tp, split).seconds.sum())
            share = compute_share(layer_costs, unit, size.tp, split) if overlaps else 1.0
            known[unit, size.tp] = unit_s / size.pp * num_microbatches[unit] * size.ranks * share
    forward_and_backward = layer_costs.unit_times(LLM, llm.tp, split).mean[:, [FORWARD, BACKWARD]]
    llm_work_s = forward_and_backward.sum() / llm.pp * num_microbatches[LLM]
    llm_alone_s = llm_work_s * (1 + (llm.pp - 1) / llm.vpp / num_microbatches[LLM])
    if overlaps:
        if (LLM, llm.tp) not in known:
            known[LLM, llm.tp] = compute_share(layer_costs, LLM, llm.tp, split)
        llm_work_s *= known[LLM, llm.tp]
    encoder_work_s = sum(known[unit, size.tp] / size.ranks for unit, size in encoders.items())
    return float(max(llm_alone_s, llm_work_s + encoder_work_s))


def _recompute_levels(layer_costs: LayerCosts) -> list[dict[str, float]]:
    """Return shares of layers to recompute, by unit whose recompute is `auto`: of the encoders first, then the LLM."""
    free = [unit for unit, mode in layer_costs.recompute.items() if mode == "auto"]
    encoders = [{unit: share for unit in free if unit != LLM} for share in RECOMPUTE_SHARES]
    return encoders + [encoders[-1] | {LLM: share} for share in RECOMPUTE_SHARES[1:] if LLM in free]


def _levels_that_may_fit(layout_at: Callable[[int], _LayoutResult], num_levels: int) -> range:
    """Return the levels under which some order may fit; recomputing more never needs more memory."""
    first = bisect_left(range(num_levels), True, key=lambda level: isinstance(layout_at(level), Layout))
    return range(first, num_levels)


def _layout_at_level(
    meshes: _ColocatedMeshes,
    levels: Sequence[Mapping[str, float]],
    layer_costs: LayerCosts,
    machine: Hardware,
    level: int,
) -> _LayoutResult:
    """Return the layout of these meshes at a level of recomputing, or why no order of it can run."""
    layout = colocated_layout(layer_costs, meshes.encoders, meshes.llm, levels[level])
    if layout is None:
        return None
    tp_group = split_tp_group(layout.units, machine.ranks_per_node)
    if tp_group is not None:
        return _reject(meshes, f"the tensor-parallel group of ranks {tp_group} lies on two nodes")
    graph = layout_graph(layout, layer_costs)
    min_memory = layer_costs.memory(graph, min_in_flight(graph))
    if max(memory.total for memory in min_memory.values()) > machine.memory_bytes:
        return _reject_for_memory(meshes, layer_costs, min_memory, machine)
    return layout


def _simulate_fastest_order(
    meshes: _ColocatedMeshes, layout: Layout, layer_costs: LayerCosts, machine: Hardware, limit_s: float
) -> Candidate | Alternative:
    """Return the faster of the planned and the coarse order that fit.

    Or return why: no order fits, or the LLM alone takes longer than `limit_s`.
    """
    graph = layout_graph(layout, layer_costs)
    llm_alone = simulate_llm_alone(graph, layer_costs, machine)
    if llm_alone.step_time_s > limit_s:
        recomputes = any(unit.num_recomputed for unit in layout.units.values())
        cause = " when layers are recomputed to fit" if recomputes else ""
        ratio = llm_alone.step_time_s / limit_s
        return _reject(meshes, f"at least {ratio:.2f}x slower: the LLM alone takes that long{cause}")
    counts = dict(layout.num_microbatches)
    fitting: list[SchedulePlan] = []
    coarse = SchedulePlan(kind="coarse", num_microbatches=counts)
    for max_ahead in max_ahead_choices(meshes.llm.pp):
        order = plan_encoder_order(graph, layer_costs, machine, max_ahead=max_ahead, llm_alone=llm_alone)
        planned = SchedulePlan(kind="explicit", num_microbatches=counts, order=order)
        for schedule in (planned, coarse) if max_ahead is None else (planned,):
            memory = schedule_memory(graph, schedule, layer_costs)
            if max(m.total for m in memory.values()) <= machine.memory_bytes:
                fitting.append(schedule)
        if fitting:
            simulated = [evaluate_layout(layout, layer_costs, machine, schedule) for schedule in fitting]
            return min(simulated, key=lambda candidate: candidate.step_time_s)
    return _reject_for_memory(meshes, layer_costs, memory, machine)


def _reject(meshes: _ColocatedMeshes, reason: str, peak_gib: float | None = None) -> Alternative:
    return Alternative(
        summary=str(meshes), placement="colocated", step_time_s=None, peak_memory_gib=peak_gib, reason=reason
    )


def _reject_for_memory(
    meshes: _ColocatedMeshes, layer_costs: LayerCosts, memory: Mapping[int, RankMemory], machine: Hardware
) -> Alternative:
    misfit = explain_misfit(layer_costs, memory, machine)
    return _reject(meshes, misfit.reason, misfit.need_gib)
