"""The planner's story: from a recipe and the lengths of its data to the fastest plan that fits, and why."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice

from mmtrain.balance import Grouping, SampleLengths
from mmtrain.costs import Hardware, RankMemory, costs_for, machine_for, precision_for
from mmtrain.costs.hardware import GIB
from mmtrain.errors import PlanError
from mmtrain.models.model_shape import build_model_shape as model_shape
from mmtrain.plan.artifact.data_drift import summarize_data
from mmtrain.plan.artifact.plan import Alternative, Placement, Plan, Prediction
from mmtrain.plan.colocated.colocated_search import search_colocated
from mmtrain.plan.colocated.encoder_order import scheduling_efficiency
from mmtrain.plan.estimate.evaluate import Candidate
from mmtrain.plan.estimate.layer_costs import LayerCosts, batch_split_of
from mmtrain.plan.estimate.memory_lower_bound import rejected_by_memory_bound, unit_memory_bound
from mmtrain.plan.estimate.sample_batches import sample_batches
from mmtrain.plan.estimate.time_lower_bound import unit_time_bound
from mmtrain.plan.explain.baselines import BaselinePlanner, baseline_alternative
from mmtrain.plan.explain.infeasible import explain_infeasible, has_meshes
from mmtrain.plan.explain.suggestions import suggest_changes
from mmtrain.plan.explain.why_slower import explain_measured_slower, explain_slower
from mmtrain.plan.replicated.replicated_step import ReplicatedPredictor
from mmtrain.plan.search.best_first_search import (
    EQUAL_STEP_TIME_RATIO,
    Progress,
    SearchResults,
    best_first_search,
    merge_results,
)
from mmtrain.plan.search.constraints import UnitChoices, encoder_microbatches, unit_choices
from mmtrain.plan.search.mesh_enumeration import MeshAssignment, bounded_mesh_assignments
from mmtrain.plan.search.sequence_parallel import with_sequence_parallelism
from mmtrain.program import StageId, build_program
from mmtrain.recipe.schema import Recipe

PERCENT = 100
CLOSEST = 3  # plans that are named where none fits


def plan(
    recipe: Recipe,
    lengths: SampleLengths,
    *,
    world_size: int,
    hardware: str,
    recipe_sha256: str,
    top: int = 5,
    explain: bool = False,
    progress: Progress | None = None,
    measure: Callable[[Plan], float] | None = None,
    baseline: str | None = None,
) -> Plan:
    """Choose the fastest plan that uses `world_size` ranks of `hardware` (a preset's name) and fits their memory.

    Every placement and mesh size the recipe allows is cut into stages, held against the memory limit, and simulated
    on a few global batches of the recipe's own lengths; `top` losers are kept with the reason they lost, or all to
    `explain`. With `parallel.max_gpus` it may use fewer ranks. Pure: the same arguments give the same plan. progress:
    told how many candidates are settled, of how many. measure: seconds of a step as run; the `top` plans predicted to
    be fastest are then ranked by it. OmniBal (arXiv 2407.20761) measures several layer partitions of one mesh; these
    plans are the best partitions of different meshes. baseline: the plan that this rule of thumb makes
    instead (`baselines.BASELINES`), beside the one that would have been chosen.

    Raises:
        PlanError: constraints contradict each other or the cluster, or nothing fits into memory.
    """
    machine = machine_for(recipe, hardware)
    layer_costs, choices = prepared(recipe, lengths, machine)
    found = _found(recipe, layer_costs, choices, machine, world_size, top, progress)
    about = PlanMetadata(recipe, recipe_sha256, found.layer_costs, machine)
    folklore = BaselinePlanner(found.candidates, found.layer_costs, choices, machine)
    if baseline is not None:
        asked = folklore.plan_requested(baseline)
        return about.plan(asked, (_planned_instead(found.outcome.candidates[0], asked),))
    full = not explain and len(found.outcome.candidates) > top  # of losers that are faster than slow rules
    max_step_s = found.outcome.candidates[top].step_time_s if full else math.inf
    rules = folklore.plan_all(max_step_s) if measure is None else {}
    outcome = merge_results(
        found.outcome, SearchResults(tuple(j for j in rules.values() if j.step_time_s < found.outcome.fastest), ())
    )
    judged, seconds = (
        rank_by_measurement(outcome.candidates, top, about, measure) if measure else (outcome.candidates, {})
    )
    chosen, *slower = judged
    build_program(
        chosen.graph, kind=chosen.schedule.kind, order=chosen.schedule.order
    )  # refuses what the runtime could not run to its end
    losers = [*(_slower(j, chosen, seconds) for j in slower), *outcome.rejected]
    losers += [
        baseline_alternative(n, j, chosen.step_time_s)
        for n, j in rules.items()
        if j.step_time_s > chosen.step_time_s * EQUAL_STEP_TIME_RATIO
    ]
    if recipe.parallel.placement == "auto" and world_size > 1:
        phases = ReplicatedPredictor(
            layer_costs.shape, layer_costs.costs, layer_costs.precision, layer_costs.batches, machine, world_size
        )
        losers.append(phases.alternative(chosen.step_time_s))
    return about.plan(chosen, shown([*losers, *found.left_out], len(losers) if explain else top))


def prepared(recipe: Recipe, lengths: SampleLengths, machine: Hardware) -> tuple[LayerCosts, dict[str, UnitChoices]]:
    """What the search asks: costs of the model's layers on drawn batches, and the sizes that the recipe allows.

    Raises PlanError for settings that contradict each other or the model, and for data without samples.
    """
    shape, precision = model_shape(recipe), precision_for(recipe, machine)
    choices = unit_choices(recipe, shape, machine.ranks_per_node)
    layer_costs = LayerCosts(
        shape,
        costs_for(machine, precision, recipe.cluster.costs),
        precision,
        sample_batches(lengths, Grouping.of(recipe.data, recipe.train.global_batch), recipe.train.seed),
        recipe.data.seq_len,
        {name: getattr(recipe.parallel, name).recompute for name in choices},
        encoder_microbatches(recipe, shape),
    )
    return layer_costs, choices


@dataclass(frozen=True)
class _Found:
    """What the search found, and what it rests on."""

    layer_costs: LayerCosts
    candidates: list[tuple[float, MeshAssignment]]
    outcome: SearchResults
    left_out: list[Alternative]  # sizes that cannot fit, counted


def _found(
    recipe: Recipe,
    layer_costs: LayerCosts,
    choices: dict[str, UnitChoices],
    machine: Hardware,
    world_size: int,
    top: int,
    progress: Progress | None,
) -> _Found:
    """The best of all placements, with sequence parallelism where it costs no time, or where nothing fits without.

    Raises PlanError if nothing fits.
    """
    slicing = {name: getattr(recipe.parallel, name).sp for name in choices}
    layer_costs = with_sequence_parallelism(layer_costs, slicing, choices, machine)
    candidates, outcome = _searched(recipe, layer_costs, choices, machine, world_size, top, progress)
    sliced = with_sequence_parallelism(layer_costs, slicing, choices, machine, at_any_price=True)
    if not outcome.candidates and sliced.sp != layer_costs.sp:  # memory demands it
        layer_costs = sliced
        candidates, outcome = _searched(recipe, layer_costs, choices, machine, world_size, top, progress)
    searched = [assignment for _, assignment in candidates]
    left_out = rejected_by_memory_bound(choices, world_size, searched, unit_memory_bound(layer_costs), machine)
    if not outcome.candidates:
        changes = suggest_changes(searched, outcome.rejected, layer_costs, choices, machine, world_size)
        raise PlanError(_nothing_fits(outcome.rejected, left_out, machine, world_size, changes))
    return _Found(layer_costs, candidates, outcome, left_out)


def _searched(
    recipe: Recipe,
    layer_costs: LayerCosts,
    choices: dict[str, UnitChoices],
    machine: Hardware,
    world_size: int,
    top: int,
    progress: Progress | None,
) -> tuple[list[tuple[float, MeshAssignment]], SearchResults]:
    """The sizes of `unified` and `disaggregated`, and what was found of all placements."""
    counts = rank_counts(recipe, choices, world_size)
    if not counts:
        placements, most = placements_of(recipe, choices), min(world_size, recipe.parallel.max_gpus or world_size)
        free = partial(unit_choices, shape=layer_costs.shape, ranks_per_node=machine.ranks_per_node)
        raise PlanError(explain_infeasible(recipe, choices, most, placements, free))
    bound = unit_time_bound(layer_costs, choices, machine)
    candidates = [
        (least, assignment)
        for count in counts
        for least, assignment in bounded_mesh_assignments(choices, count, bound)
        if recipe.parallel.placement in ("auto", assignment.placement)
    ]
    colocated = counts if recipe.parallel.placement in ("auto", "colocated") else []
    first, *others = _parts(progress, 1 + len(colocated))
    outcome = best_first_search(candidates, layer_costs, choices, machine, at_least=top + 1, progress=first)
    rest = (
        search_colocated(layer_costs, choices, machine, n, outcome.fastest, other)
        for n, other in zip(colocated, others, strict=True)
    )
    outcome = merge_results(outcome, *rest)
    if (last := [first, *others][-1]) is not None:
        last(1, 1)
    return candidates, outcome


def _parts(progress: Progress | None, count: int) -> "list[Progress | None]":
    """The progress of each of several searches as that of all, which count as equally long."""
    if progress is None:
        return [None] * count
    told = progress

    def part(number: int) -> Progress:
        return lambda done, total: told(round(PERCENT * (number + done / max(total, 1))), PERCENT * count)

    return [part(number) for number in range(count)]


@dataclass(frozen=True)
class PlanMetadata:
    """What a plan says beside its layout."""

    recipe: Recipe
    recipe_sha256: str
    layer_costs: LayerCosts
    machine: Hardware

    def plan(self, chosen: Candidate, alternatives: tuple[Alternative, ...] = ()) -> Plan:
        """The saved artefact of a layout."""
        world_size = chosen.graph.world_size
        return Plan(
            recipe_sha256=self.recipe_sha256,
            hardware=self.machine.name,
            world_size=world_size,
            precision=self.layer_costs.precision,
            placement=chosen.layout.placement,
            units=dict(chosen.layout.units),
            schedule=chosen.schedule,
            data=summarize_data(self.layer_costs.batches.lengths),
            predicted=predict(chosen, self.layer_costs, self.machine, world_size),
            alternatives=alternatives,
        )


def rank_by_measurement(
    judged: Sequence[Candidate], top: int, about: PlanMetadata, measure: Callable[[Plan], float]
) -> tuple[list[Candidate], dict[int, float]]:
    """The layouts with the first `top` of them in the order of what their steps take, and that by `id`.

    A layout that could not be run takes for ever.
    """
    seconds = {id(j): measure(about.plan(j)) for j in judged[:top]}
    first = sorted(judged[:top], key=lambda j: seconds[id(j)])
    if math.isinf(seconds[id(first[0])]):
        raise PlanError(f"--measure: none of the {len(first)} plans predicted to be fastest could be run here")
    return [*first, *judged[top:]], seconds


def shown(losers: Sequence[Alternative], top: int) -> tuple[Alternative, ...]:
    """The `top` best losers, fastest first, those never simulated last; of each placement at least one if it can be."""
    ranked = sorted(losers, key=lambda a: math.inf if a.step_time_s is None else a.step_time_s)
    placements = [a.placement for a in ranked]
    first = [placements.index(p) == i for i, p in enumerate(placements)]
    kept = sorted(range(len(ranked)), key=lambda i: not first[i])[:top]
    return tuple(ranked[i] for i in sorted(kept))


def placements_of(recipe: Recipe, choices: Mapping[str, UnitChoices]) -> tuple[Placement, ...]:
    """The placements that are searched."""
    if recipe.parallel.placement != "auto":
        return (recipe.parallel.placement,)
    return ("unified", "disaggregated", "colocated") if len(choices) > 1 else ("unified",)


def rank_counts(recipe: Recipe, choices: Mapping[str, UnitChoices], world_size: int) -> list[int]:
    """Numbers of ranks that sizes make up: all ranks, or with `parallel.max_gpus` some that are at most so many."""
    limit, placements = recipe.parallel.max_gpus, placements_of(recipe, choices)

    def possible(count: int) -> bool:
        return any(has_meshes(choices, count, placement) for placement in placements)

    if limit is None:
        return [world_size] if possible(world_size) else []
    most = min(world_size, limit)
    return [*filter(possible, rank_counts_to_try(most))] or [*islice(filter(possible, range(most, 0, -1)), 1)]


def rank_counts_to_try(most: int) -> list[int]:
    """Numbers of ranks worth trying where fewer than `most` will do: eight, in steps of a sixteenth."""
    step = max(1, most // 16)
    return list(range(most, 0, -step))[:8]


def predict(chosen: Candidate, layer_costs: LayerCosts, machine: Hardware, world_size: int) -> Prediction:
    """What the run will see, if the costs are right."""
    memory = _memory_by_ranks(chosen)
    rank_seconds = chosen.step_time_s * world_size
    return Prediction(
        step_time_s=chosen.step_time_s,
        mfu=layer_costs.model_flops(batch_split_of(chosen.graph))
        / (rank_seconds * machine.peak_flops(layer_costs.precision)),
        tokens_per_s_per_gpu=layer_costs.tokens() / rank_seconds,
        peak_memory_gib={ranks: round(held.total / GIB, 4) for ranks, held in memory.items()},
        memory_kinds_gib={
            ranks: {kind: round(held_bytes / GIB, 4) for kind, held_bytes in held.by_kind().items()}
            for ranks, held in memory.items()
        },
        bubbles=dict(chosen.bubbles),
        cost_source=layer_costs.costs.source,
        scheduling_efficiency=scheduling_efficiency(chosen, layer_costs, machine),
    )


def _memory_by_ranks(chosen: Candidate) -> dict[str, RankMemory]:
    """What is held, by range of ranks that hold the same stages; every rank is in one range."""
    held: defaultdict[int, tuple[StageId, ...]] = defaultdict(tuple)
    for stage in chosen.graph.stages:
        for rank in chain.from_iterable(stage.tp_groups):
            held[rank] += (stage.id,)
    of_stages = {held[rank]: memory for rank, memory in chosen.memory.items()}
    found = {}
    for stages, same in groupby(sorted(held), key=lambda rank: held[rank]):
        ranks = list(same)
        name = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
        found[name] = of_stages[stages]
    return found


def _slower(loser: Candidate, chosen: Candidate, seconds: Mapping[int, float]) -> Alternative:
    """One line on a plan that fits but is not the fastest; seconds: of those that were measured, by `id`."""
    if id(loser) in seconds:
        reason = explain_measured_slower(loser, chosen, seconds[id(loser)] / seconds[id(chosen)])
    elif loser.step_time_s <= chosen.step_time_s * EQUAL_STEP_TIME_RATIO:
        reason = "as fast, but with more pipeline ranks, chunks or tensor parallelism"
    else:
        reason = explain_slower(loser, chosen)
    return Alternative(
        summary=loser.layout.summary,
        placement=loser.layout.placement,
        step_time_s=loser.step_time_s,
        peak_memory_gib=round(loser.peak_bytes / GIB, 4),
        reason=reason,
    )


def _planned_instead(planned: Candidate, asked: Candidate) -> Alternative:
    """What a baseline that was asked for stands beside."""
    return Alternative(
        summary=planned.layout.summary,
        placement=planned.layout.placement,
        step_time_s=planned.step_time_s,
        peak_memory_gib=round(planned.peak_bytes / GIB, 4),
        reason=f"{asked.step_time_s / planned.step_time_s:.2f}x faster: what is planned without a baseline",
    )


def _nothing_fits(
    tried: Sequence[Alternative],
    left_out: Sequence[Alternative],
    machine: Hardware,
    world_size: int,
    changes: Sequence[str],
) -> str:
    closest = sorted(tried, key=lambda a: a.peak_memory_gib or float("inf"))[:CLOSEST]
    parts = {"The closest of those tried": closest, "By what ranks hold at least": left_out}
    lines = [
        "\n  ".join([f"{heading}:", *(f"{a.summary}: {a.reason}" for a in losers)])
        for heading, losers in parts.items()
        if losers
    ]
    return "\n".join(
        [
            f"no plan fits {world_size} ranks of {machine.name} with {machine.memory_bytes / GIB:.3g} GiB each.",
            *lines,
            f"Any one of these makes room: {'; '.join((*changes, 'perhaps a lower data.seq_len'))}. "
            "If the ranks have more memory than that, correct cluster.memory_gib.",
        ]
    )
