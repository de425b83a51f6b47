"""Find what to change when no plan fits: for each kind of change, the smallest one with which a plan would fit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from mmtrain.balance import Grouping
from mmtrain.costs import StateBytes, state_bytes
from mmtrain.models.shapes.model_shape import unit_offload, with_offload
from mmtrain.planning.advise.replicated_suggestions import (
    evaluator_of_changed,
    replicated_fits,
    replicated_fits_on,
    suggest_replicated_settings,
)
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.memory_fit import fit_memory
from mmtrain.planning.layer_costs.layer_costs import SpSizes
from mmtrain.planning.layer_costs.layer_partition import anchored_partition, layout_graph, partitioned_layout
from mmtrain.planning.search.mesh_enumeration import bounded_mesh_assignments
from mmtrain.planning.search.variants import OFFLOAD_MODES
from mmtrain.planning.space.candidate import FittedLayout, MeshAssignment, SearchResults
from mmtrain.planning.space.constraints import RecomputeMode, unit_choices
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.planning.space.sample_batches import sample_batches
from mmtrain.program.ir.graph import LLM
from mmtrain.program.schedules.builder import in_flight_microbatches
from mmtrain.recipe.checks.cross_checks import CHECKS
from mmtrain.recipe.raw_tree import KeyPath
from mmtrain.recipe.settings.modalities import dotted_unit
from mmtrain.recipe.settings.schema import Recipe


def suggest_changes(evaluator: Evaluator, results: SearchResults) -> list[str]:
    """Return changes of settings, ranks and memory, in words; each alone lets a plan fit.

    results: of a search in which nothing fits.
    """
    assignments = [candidate.assignment for candidate in results.enumerated]
    return [
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
    """Suggest moments in bf16 where they are fp32."""
    smaller = state_bytes(evaluator.problem.precision, "bf16")
    is_new = evaluator.layer_costs.state_bytes != smaller
    if is_new and _fits_anywhere(_with_settings(evaluator, state=smaller), assignments):
        yield "train.optimizer.moments: bf16"


def _suggest_ranks(evaluator: Evaluator, assignments: Sequence[MeshAssignment]) -> Iterator[str]:
    """Suggest the smallest power of two times the ranks on which a plan of the same placements fits."""
    problem, budget = evaluator.problem, evaluator.budget
    ranks_per_node = problem.hardware.ranks_per_node
    placements = {assignment.placement for assignment in assignments}
    for doubling in range(1, budget.explanations.max_rank_doublings + 1):
        num_ranks = problem.cluster.num_ranks * 2**doubling
        bounded = bounded_mesh_assignments(
            problem.choices, num_ranks, evaluator.time_lower_bound, budget.meshes, ranks_per_node
        )
        larger = (assignment for _, assignment in bounded if assignment.placement in placements)
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
        bounded = bounded_mesh_assignments(
            choices, problem.cluster.num_ranks, evaluator.time_lower_bound, budget.meshes, ranks_per_node
        )
        sharing = (assignment for _, assignment in bounded if assignment.placement in placements)
        if _fits(evaluator, list(islice(sharing, budget.explanations.max_meshes_scanned))):
            yield f"parallel.llm.cp: {cp}"
            return


def _suggest_memory(results: SearchResults) -> Iterator[str]:
    """Suggest the memory that the candidate nearest to fitting needs."""
    needs_gib = [loser.need_gib for loser in results.rejected if loser.need_gib is not None]
    if needs_gib:
        yield f"ranks with {min(needs_gib):.3g} GiB"


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
    grouping = Grouping.of(recipe.data, recipe.train.global_batch)
    old = problem.batches
    batches = sample_batches(old.lengths, grouping, recipe.train.seed)
    batches = replace(batches, ranks_per_node=old.ranks_per_node)
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
