"""Find what to change when no plan fits: for each kind of change, the smallest one with which a plan would fit."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import yaml
from pydantic import ValidationError

from mmtrain.balance import Grouping
from mmtrain.costs import StateBytes, state_bytes
from mmtrain.models.shapes.model_shape import unit_offload, with_offload
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.artifact.plan import Placement
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.memory_fit import fit_memory
from mmtrain.planning.layer_costs.layer_costs import LayerCosts, SpSizes
from mmtrain.planning.layer_costs.layer_partition import anchored_partition, layout_graph, partitioned_layout
from mmtrain.planning.search.mesh_enumeration import replicated_meshes
from mmtrain.planning.search.replicated import enumerate_replicated, fit_replicated, shard_sizes
from mmtrain.planning.search.strategies import possible_assignments
from mmtrain.planning.search.variants import OFFLOAD_MODES
from mmtrain.planning.space.candidate import Candidate, FittedLayout, MeshAssignment, SearchResults
from mmtrain.planning.space.constraints import RecomputeMode, unit_choices
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.planning.space.sample_batches import sample_batches
from mmtrain.program.ir.graph import LLM
from mmtrain.program.schedules.builder import in_flight_microbatches
from mmtrain.recipe.checks.cross_checks import CHECKS
from mmtrain.recipe.raw_tree import KeyPath
from mmtrain.recipe.settings.modalities import dotted_unit
from mmtrain.recipe.settings.schema import Recipe

_SETTING = re.compile(r"\b([a-z_0-9]+(?:\.[a-z_0-9]+)+): ([^ ]+)")


def suggest_changes(evaluator: Evaluator, results: SearchResults) -> list[str]:
    """Return changes of settings, ranks and memory, in words; each alone lets a plan fit.

    results: of a search in which nothing fits.
    """
    assignments = [candidate.assignment for candidate in results.enumerated]
    suggestions = [
        *suggest_replicated_settings(evaluator),
        *_suggest_recompute(evaluator, assignments),
        *_suggest_sequence_parallelism(evaluator, assignments),
        *_suggest_offload(evaluator, assignments),
        *_suggest_bf16_moments(evaluator, assignments),
        *_suggest_shared_sequences(evaluator, assignments),
        *_suggest_ranks(evaluator, assignments),
        *_suggest_memory(results),
        _suggest_seq_len(evaluator, assignments),
    ]
    return [text for text in suggestions if is_allowed(evaluator.problem.recipe, text)]


def is_allowed(recipe: Recipe, suggestion: str) -> bool:
    """Return whether the recipe's own checks accept what a suggestion sets, `key: value` and further ones after `and`.

    Ranks and memory, which no setting of the recipe names, are always allowed.
    """
    settings = _SETTING.findall(suggestion)
    if not settings:
        return True
    tree = recipe.model_dump(mode="json")
    for key, value in settings:
        section: Any = tree
        *sections, name = key.split(".")
        for part in sections:
            section = section[part]
        section[name] = yaml.safe_load(value)
    try:
        changed = Recipe.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError:
        return False
    return not _wrong_settings(changed) - _wrong_settings(recipe)


def _suggest_recompute(evaluator: Evaluator, assignments: Sequence[MeshAssignment]) -> Iterator[str]:
    """Suggest to recompute one unit whose recompute is `none`, or else all of them."""
    recompute = evaluator.layer_costs.recompute
    never = [unit for unit, mode in recompute.items() if mode == "none"]
    for units in _each_and_all(never):
        changed: dict[str, RecomputeMode] = {**recompute, **dict.fromkeys(units, "all")}
        if _fits_anywhere(_with_settings(evaluator, recompute=changed), assignments):
            yield " and ".join(f"parallel.{dotted_unit(unit)}.recompute: all" for unit in units)
            return


def _each_and_all(units: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield each unit alone, then all of them together, if they are several."""
    for unit in units:
        yield (unit,)
    if len(units) > 1:
        yield tuple(units)


def _suggest_sequence_parallelism(evaluator: Evaluator, assignments: Sequence[MeshAssignment]) -> Iterator[str]:
    """Suggest sequence parallelism for all units that can have it and do not."""
    choices, sp = evaluator.problem.choices, evaluator.layer_costs.sp
    possible = [unit.name for unit in evaluator.problem.shape.units if unit.kind != "generator"]
    without = [unit for unit in possible if max(choices[unit].tp) > 1 and not sp.get(unit)]
    changed = {**sp, **{unit: frozenset(choices[unit].tp) - {1} for unit in without}}
    split = [assignment for assignment in assignments if max(mesh.tp for mesh in assignment.meshes.values()) > 1]
    if without and _fits(_with_settings(evaluator, sp=changed), split):
        yield " and ".join(f"parallel.{dotted_unit(unit)}.sp: true" for unit in without)


def _suggest_offload(evaluator: Evaluator, assignments: Sequence[MeshAssignment]) -> Iterator[str]:
    """Suggest to keep activations of one unit in host memory, or of all, where the recipe keeps none there."""
    problem = evaluator.problem
    modes = {unit.name: unit_offload(unit) for unit in problem.shape.units if unit.kind != "generator"}
    without = [
        name for name, mode in modes.items() if mode == "none" and evaluator.layer_costs.recompute[name] != "none"
    ]
    if problem.hardware.host_bytes_per_s is None:
        return
    for units in _each_and_all(without):
        for mode in OFFLOAD_MODES:
            changed = replace(problem, shape=with_offload(problem.shape, {**modes, **dict.fromkeys(units, mode)}))
            if _fits_anywhere(evaluator_of_changed(changed, evaluator), assignments):
                yield " and ".join(f"parallel.{dotted_unit(unit)}.offload: {mode}" for unit in units)
                return


def _suggest_bf16_moments(evaluator: Evaluator, assignments: Sequence[MeshAssignment]) -> Iterator[str]:
    """Suggest moments in bf16 where they are fp32 and may be bf16."""
    if evaluator.problem.recipe.train.optimizer.kind != "adamw":
        return
    smaller = state_bytes(evaluator.problem.precision, "bf16", copies=evaluator.problem.state_bytes.copies)
    is_new = evaluator.layer_costs.state_bytes != smaller
    if is_new and _fits_anywhere(_with_settings(evaluator, state=smaller), assignments):
        yield "train.optimizer.moments: bf16"


def _suggest_ranks(evaluator: Evaluator, assignments: Sequence[MeshAssignment]) -> Iterator[str]:
    """Suggest the smallest power of two times the ranks on which a plan of the same placements fits."""
    problem, budget = evaluator.problem, evaluator.budget
    placements = {assignment.placement for assignment in assignments}
    for doubling in range(1, budget.explanations.max_rank_doublings + 1):
        num_ranks = problem.cluster.num_ranks * 2**doubling
        possible = possible_assignments(evaluator, problem.choices, num_ranks)
        larger = (assignment for assignment in possible if assignment.placement in placements)
        divided = list(islice(larger, budget.explanations.max_meshes_scanned))
        if _fits(evaluator, divided) or replicated_fits_on(evaluator, num_ranks):
            yield f"{num_ranks} ranks"
            return


def _suggest_shared_sequences(evaluator: Evaluator, assignments: Sequence[MeshAssignment]) -> Iterator[str]:
    """Suggest the fewest ranks, a power of two, that must share the LLM's sequences so that a plan fits."""
    problem, budget = evaluator.problem, evaluator.budget
    llm, ranks_per_node = problem.recipe.parallel.llm, problem.hardware.ranks_per_node
    placements = {assignment.placement for assignment in assignments} & {"unified", "disaggregated"}
    for doubling in range(1, problem.cluster.num_ranks.bit_length()):
        cp = 2**doubling
        parallel = problem.recipe.parallel.model_copy(update={"llm": llm.model_copy(update={"cp": cp})})
        recipe = problem.recipe.model_copy(update={"parallel": parallel})
        if cp <= max(problem.choices[LLM].cp) or _wrong_settings(recipe) - _wrong_settings(problem.recipe):
            continue
        choices = unit_choices(recipe, problem.shape, ranks_per_node, budget.meshes)
        possible = possible_assignments(evaluator, choices, problem.cluster.num_ranks)
        sharing = (assignment for assignment in possible if assignment.placement in placements)
        constraints = replace(problem.constraints, choices=choices)
        changed = evaluator_of_changed(replace(problem, recipe=recipe, constraints=constraints), evaluator)
        to_try = list(islice(sharing, budget.explanations.max_meshes_scanned))
        if _fits(evaluator, to_try) or replicated_fits(changed):
            yield f"parallel.llm.cp: {cp}"
            return


def _suggest_memory(results: SearchResults) -> Iterator[str]:
    """Suggest the memory that the candidate nearest to fitting needs."""
    if math.isfinite(results.least_need_gib):
        yield f"ranks with {_rounded_up(results.least_need_gib):.3g} GiB"


def _rounded_up(value: float) -> float:
    """Return a positive value with three significant digits, none below it: what is named must be enough."""
    unit: float = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / unit) * unit


def _suggest_seq_len(evaluator: Evaluator, assignments: Sequence[MeshAssignment]) -> str:
    """Suggest the longest groups that make room, of half the tokens, a quarter and so on, and of the longest sample's.

    Shorter ones would leave out samples, so nothing below that is tried.
    """
    problem = evaluator.problem
    longest = int(problem.batches.lengths.tokens.max())
    halves = (problem.seq_len >> halvings for halvings in range(1, problem.seq_len.bit_length()))
    lengths = [length for length in halves if length > longest]
    for seq_len in (*lengths, longest) if longest < problem.seq_len else ():
        shorter = _with_seq_len(problem, seq_len)
        if shorter is not None and _fits_anywhere(evaluator_of_changed(shorter, evaluator), assignments):
            tokens = f"{seq_len / problem.seq_len:.2g} of the tokens"
            return f"data.seq_len: {seq_len} (a step of as many groups then has {tokens})"
    return f"perhaps a data.seq_len below {longest}, which leaves out samples that are longer"


def _with_seq_len(problem: PlanningProblem, seq_len: int) -> PlanningProblem | None:
    """Return the problem with groups of at most `seq_len` tokens; None if other settings of the recipe forbid them."""
    data = problem.recipe.data.model_copy(update={"seq_len": seq_len})
    recipe = problem.recipe.model_copy(update={"data": data})
    if _wrong_settings(recipe) - _wrong_settings(problem.recipe):
        return None
    grouping = Grouping.of(recipe.data, recipe.train.num_groups)
    old = problem.batches
    batches = sample_batches(old.lengths, grouping, recipe.train.seed)
    batches = replace(batches, targets=old.targets, ranks_per_node=old.ranks_per_node)
    return replace(problem, recipe=recipe, seq_len=seq_len, batches=batches)


def _wrong_settings(recipe: Recipe) -> set[KeyPath]:
    return {problem.where for check in CHECKS for problem in check(recipe)}


def _fits_anywhere(evaluator: Evaluator, assignments: Sequence[MeshAssignment]) -> bool:
    """Return whether one of the assignments fits, or a candidate of `replicated`, which are not among them."""
    return _fits(evaluator, assignments) or replicated_fits(evaluator)


def _fits(evaluator: Evaluator, assignments: Sequence[MeshAssignment]) -> bool:
    """Return whether one of the assignments fits; of many only the most split ones are tried."""
    layer_costs, choices = evaluator.layer_costs, evaluator.problem.choices
    memory_bytes, budget = evaluator.memory_bytes, evaluator.budget.explanations
    ranks_per_node = evaluator.problem.hardware.ranks_per_node
    may_fit = [
        assignment
        for assignment in assignments
        if assignment.tp_group_across_nodes(ranks_per_node) is None
        and _min_bytes(evaluator, assignment) <= memory_bytes
    ]
    for assignment in islice(sorted(may_fit, key=_most_divided_first), budget.max_meshes_per_suggestion):
        partition = anchored_partition(assignment, layer_costs, choices, memory_bytes)
        if partition is None:
            continue
        layout = partitioned_layout(assignment, layer_costs, partition)
        in_flight = in_flight_microbatches(layout_graph(layout, layer_costs))
        fitted = fit_memory(assignment, partition, layer_costs, memory_bytes, in_flight, evaluator.budget.evaluation)
        if isinstance(fitted, FittedLayout):
            return True
    return False


def _min_bytes(evaluator: Evaluator, assignment: MeshAssignment) -> float:
    """Return the least bytes on the fullest rank."""
    microbatches = assignment.pipeline_microbatches
    return max(evaluator.memory_lower_bound(unit, mesh, microbatches[unit]) for unit, mesh in assignment.meshes.items())


def _most_divided_first(assignment: MeshAssignment) -> tuple[int, ...]:
    """Return a sort key that puts assignments first whose least divided unit has the most parts."""
    return tuple(sorted(-mesh.tp * mesh.pp for mesh in assignment.meshes.values()))[::-1]


def _with_settings(
    evaluator: Evaluator,
    recompute: Mapping[str, RecomputeMode] | None = None,
    sp: SpSizes | None = None,
    state: StateBytes | None = None,
) -> Evaluator:
    """Return an evaluator of the same problem under other settings."""
    layer_costs = evaluator.layer_costs.with_settings(recompute=recompute, sp=sp, state=state)
    return Evaluator(evaluator.problem, evaluator.budget, layer_costs)


PLACEMENT: Placement = "replicated"


def replicated_fits(evaluator: Evaluator) -> bool:
    """Return whether a candidate of `replicated` fits, if the problem has any; the largest shards are tried."""
    if PLACEMENT not in evaluator.problem.constraints.placements:
        return False
    alternatives = enumerate_replicated(evaluator.problem, evaluator)
    candidates = [candidate for numbers in alternatives for candidate in numbers]
    largest_first = sorted(candidates, key=lambda candidate: candidate.assignment.shard or 0, reverse=True)
    to_try = islice(largest_first, evaluator.budget.explanations.max_meshes_per_suggestion)
    return any(isinstance(fit_replicated(candidate, evaluator), Candidate) for candidate in to_try)


def replicated_fits_on(evaluator: Evaluator, num_ranks: int) -> bool:
    """Return whether a candidate of `replicated` would fit on `num_ranks` ranks."""
    cluster = replace(evaluator.problem.cluster, num_ranks=num_ranks, rank_counts=(num_ranks,))
    larger = replace(evaluator.problem, cluster=cluster)
    return replicated_fits(Evaluator(larger, evaluator.budget, evaluator.layer_costs))


def suggest_replicated_settings(evaluator: Evaluator) -> Iterator[str]:
    """Suggest other values of settings that only `replicated` has, where the recipe fixes them.

    For each setting it is the first value with which a plan fits: the smallest larger shard, the fewest more
    mini-batches of an encoder, the exchange that holds less, and the other schedule.
    """
    problem = evaluator.problem
    if PLACEMENT not in problem.constraints.placements:
        return
    parallel = problem.recipe.parallel
    values: dict[str, list[object]] = {}
    if isinstance(parallel.shard, int):
        per_node = problem.hardware.ranks_per_node
        sizes = {
            size
            for mesh in _llm_meshes(problem)
            for size in shard_sizes(mesh.num_replicas, max(per_node // mesh.tp, 1))
        }
        values["shard"] = [size for size in sorted(sizes) if size > parallel.shard]
    if parallel.zero < 3:
        values["zero"] = [zero for zero in (2, 3) if zero > parallel.zero]
    if parallel.exchange == "all_gather":
        values["exchange"] = ["all_to_all"]
    if parallel.schedule != "auto":
        values["schedule"] = ["1f1b" if parallel.schedule == "encoder_first" else "encoder_first"]
    for setting, candidates in values.items():
        for value in candidates:
            if replicated_fits(evaluator_of_changed(_with_parallel(problem, **{setting: value}), evaluator)):
                yield f"parallel.{setting}: {value} (the recipe fixes {getattr(parallel, setting)})"
                break
    yield from _suggest_mini_batches(evaluator)


def _suggest_mini_batches(evaluator: Evaluator) -> Iterator[str]:
    """Suggest more, and so smaller, mini-batches of encoders whose number the recipe fixes."""
    problem = evaluator.problem
    fixed = problem.constraints.encoder_microbatches
    num_llm = problem.recipe.train.num_groups // max((mesh.dp for mesh in _llm_meshes(problem)), default=1)
    for unit, number in fixed.items():
        for more in range(number + 1, num_llm + 1):
            if num_llm % more:
                continue
            constraints = replace(problem.constraints, encoder_microbatches={**fixed, unit: more})
            if replicated_fits(evaluator_of_changed(replace(problem, constraints=constraints), evaluator)):
                yield f"parallel.{dotted_unit(unit)}.num_microbatches: {more} (the recipe fixes {number})"
                break


def _llm_meshes(problem: PlanningProblem) -> list[MeshSize]:
    """Return the LLM's meshes in `replicated` on the largest number of ranks."""
    return [meshes[LLM] for meshes in replicated_meshes(problem.choices, max(problem.cluster.rank_counts))]


def _with_parallel(problem: PlanningProblem, **settings: object) -> PlanningProblem:
    """Return the problem under other settings of `parallel`."""
    recipe = problem.recipe
    parallel = recipe.parallel.model_copy(update=settings)
    return replace(problem, recipe=recipe.model_copy(update={"parallel": parallel}))


def evaluator_of_changed(problem: PlanningProblem, evaluator: Evaluator) -> Evaluator:
    """Return an evaluator of a changed problem, with the budget of another one and its way to split tokens."""
    layer_costs = LayerCosts(problem, evaluator.layer_costs.sp, evaluator.budget, evaluator.layer_costs.chunks)
    return Evaluator(problem, evaluator.budget, layer_costs)
