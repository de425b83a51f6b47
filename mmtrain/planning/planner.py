"""The planner: from a recipe and the lengths of its data to the fastest plan that fits, and why others lost.

Read `plan` first. `formulate.py` builds its problem, `strategies.py` lists how each placement is searched, and
`candidate.py` is the object that all of them hand on.
"""

import math
from collections.abc import Mapping

from mmtrain.costs.hardware import GIB
from mmtrain.errors import PlanError
from mmtrain.planning.advise.baselines import BaselinePlanner, baseline_label, reject_baseline
from mmtrain.planning.advise.finish import best_alternatives, describe_loser, finish_plan, reject_slower
from mmtrain.planning.advise.measured_choice import Baselines, choose_by_measurement
from mmtrain.planning.advise.sharded_baselines import SHARDED_RULES
from mmtrain.planning.advise.spread_choice import other_choices
from mmtrain.planning.advise.suggestions import suggest_changes
from mmtrain.planning.artifact.plan import AS_FAST_RATIO, Alternative, Placement, Plan
from mmtrain.planning.evaluate.evaluator import Evaluator, verify_program
from mmtrain.planning.evaluate.lower_bounds import describe_excluded
from mmtrain.planning.formulate import require_feasible
from mmtrain.planning.search.best_first_search import CUT_SHORT_LABEL
from mmtrain.planning.search.mesh_enumeration import unit_mesh_sizes
from mmtrain.planning.search.strategies import StrategySearches
from mmtrain.planning.search.variants import variants_of, with_expert_ranks, with_faster_activations
from mmtrain.planning.space.budget import DEFAULT_BUDGET, SearchBudget
from mmtrain.planning.space.candidate import EQUAL_STEP_TIME_RATIO, Candidate, Rejected, SearchResults
from mmtrain.planning.space.problem import PlanningProblem, PlanRequest


def plan(problem: PlanningProblem, *, budget: SearchBudget = DEFAULT_BUDGET) -> Plan:
    """Search every allowed placement and return the fastest plan that fits, with the best of those it beat.

    Candidates are simulated on a few global batches of the recipe's own lengths. Pure: the same problem and budget give
    the same plan, unless the request asks to measure.

    Raises:
        PlanError: constraints leave no mesh, or nothing fits into memory; names the binding constraint.
    """
    require_feasible(problem)
    problem, known = with_expert_ranks(problem, budget)
    request = problem.request
    evaluator, results = search_placements(problem, budget, known)
    baseline_planner = BaselinePlanner(evaluator, results.enumerated)
    if request.baseline is not None:
        baseline = baseline_planner.plan_requested(request.baseline)
        planned = reject_for_baseline(results.candidates[0], baseline)
        return finish_plan(baseline, evaluator, [describe_loser(planned, evaluator)])
    request.say("comparing with rules of thumb")
    baselines: Baselines = baseline_planner.plan_all(slowest_shown_by_placement(results, request))
    if request.measure is None:
        results = results.merged(SearchResults(better_baselines(results, baselines)))
    else:
        results, baselines = choose_by_measurement(results, baselines, evaluator, request)
    chosen = results.candidates[0]
    request.say("proving the chosen plan")
    verify_program(chosen, evaluator)  # a failure here is an error of the search
    losers = rank_losers(results, baselines, evaluator)
    num_shown = len(losers) if request.explain or request.measure is not None else request.num_alternatives
    excluded = excluded_by_memory_bound(evaluator, results)
    # If the plan is `replicated`, always list the FSDP and DDP baselines.
    labels = tuple(map(baseline_label, SHARDED_RULES)) if chosen.placement == "replicated" else ()
    labels = (*labels, CUT_SHORT_LABEL)
    alternatives = best_alternatives([*losers, *excluded], num_shown, labels)
    compares_spreads = request.measure is None and request.names_losers
    by_spread = other_choices(results.candidates, evaluator) if compares_spreads else ()
    return finish_plan(chosen, evaluator, alternatives, by_spread)


def search_placements(
    problem: PlanningProblem, budget: SearchBudget, known: Evaluator | None = None
) -> tuple[Evaluator, SearchResults]:
    """Search all placements; return the results with the evaluator that made them.

    known: an evaluator of the problem, where a quick search had one.

    How many searches that takes, each as long as `StrategySearches` needs for the whole problem:

    * 1 where the best plan of the first strategy recomputes no layer;
    * a quick one more where it recomputes some, and the first strategy's twice if the quick one finds activation
      functions that run again over 1% faster;
    * one for each of `variants_of(problem)` where nothing fits, until something does: at most 12 before the error, and
      at most 4 at the default settings.

    Only the last of them goes on to placements that lost.

    Raises:
        PlanError: nothing fits.
    """
    misfits: tuple[Evaluator, SearchResults] | None = None
    for evaluator in variants_of(problem, budget, first=known):
        searches = StrategySearches(evaluator)
        faster = with_faster_activations(evaluator, searches.search(max_strategies=1))
        if faster is not None:
            evaluator = faster  # and what the first search keeps, up to a gigabyte, is freed before the next begins
            searches = StrategySearches(evaluator)
        results = searches.search()
        if results.best is not None:
            return searches.evaluator, searches.with_losers()
        misfits = misfits or (evaluator, results)
    assert misfits is not None, "the first variant is the problem itself"
    raise PlanError(explain_misfit_of_all(*misfits))


def better_baselines(results: SearchResults, baselines: Baselines) -> tuple[Candidate, ...]:
    """Return the baselines that beat every searched candidate, or those of their complexity level."""
    fastest_s: dict[int, float] = {}
    for candidate in results.candidates:
        level = candidate.assignment.complexity_level
        fastest_s[level] = min(candidate.step_time_s, fastest_s.get(level, math.inf))
    limit_s = min(fastest_s.values()) * AS_FAST_RATIO
    return tuple(
        baseline
        for baseline in baselines.values()
        if baseline.step_time_s < min(fastest_s.get(baseline.assignment.complexity_level, math.inf), limit_s)
    )


def slowest_shown_by_placement(results: SearchResults, request: PlanRequest) -> Mapping[Placement, float]:
    """Return the step times above which no further candidate of a placement is among the alternatives shown.

    They are the fastest of each placement, then the fastest of all others, see `best_alternatives`. The chosen
    candidate itself is none of them. Placements that are left out have no such limit.
    """
    if request.explain or request.measure is not None:
        return {}
    losers = results.candidates[1:]
    fastest: dict[Placement, float] = {}
    others_s: list[float] = []
    for loser in sorted(losers, key=lambda candidate: candidate.step_time_s):
        if loser.placement in fastest:
            others_s.append(loser.step_time_s)
        else:
            fastest[loser.placement] = loser.step_time_s
    num_others_shown = max(request.num_alternatives - len(fastest), 0)
    if num_others_shown > len(others_s):
        return {}
    last_other_s = others_s[num_others_shown - 1] if num_others_shown else 0.0
    may_win_s = results.fastest_s * AS_FAST_RATIO
    return {placement: max(step_s, last_other_s, may_win_s) for placement, step_s in fastest.items()}


def rank_losers(results: SearchResults, baselines: Baselines, evaluator: Evaluator) -> list[Alternative]:
    """Return a line for every candidate that lost and every slower baseline."""
    chosen, *slower = results.candidates
    limit_s = chosen.step_time_s * EQUAL_STEP_TIME_RATIO
    rejected = [reject_slower(loser, chosen) for loser in slower]
    rejected += results.rejected
    for name, baseline in baselines.items():
        is_in_ranking = baseline.measured_step_s is None and any(baseline is known for known in results.candidates)
        if not is_in_ranking and (baseline.measured_step_s is not None or baseline.step_time_s > limit_s):
            rejected.append(reject_baseline(name, baseline, chosen))
    return [describe_loser(loser, evaluator) for loser in rejected]


def reject_for_baseline(planned: Candidate, baseline: Candidate) -> Rejected:
    """Return what would have been planned beside a baseline that was asked for."""
    ratio = baseline.step_time_s / planned.step_time_s
    return Rejected(planned, f"{ratio:.2f}x faster: what is planned without a baseline")


def excluded_by_memory_bound(evaluator: Evaluator, results: SearchResults) -> list[Alternative]:
    """Return a line for the meshes of each placement that cannot fit, counted, with the least that they need."""
    problem, min_bytes = evaluator.problem, evaluator.memory_lower_bound
    placements = {candidate.placement for candidate in results.enumerated}
    excluded = []
    for unit in problem.choices if "disaggregated" in placements else ():
        meshes = unit_mesh_sizes(problem.choices, unit, problem.cluster.num_ranks, evaluator.budget.meshes)
        bounds = [min_bytes(unit, mesh, None) for mesh in meshes]
        excluded.append(describe_excluded("disaggregated", unit, bounds, evaluator.memory_bytes))
    if "unified" in placements:
        bounds = []
        for assignment in (c.assignment for c in results.enumerated if c.placement == "unified"):
            microbatches = assignment.pipeline_microbatches
            bounds.append(max(min_bytes(unit, mesh, microbatches[unit]) for unit, mesh in assignment.meshes.items()))
        excluded.append(describe_excluded("unified", " and ".join(problem.choices), bounds, evaluator.memory_bytes))
    return [line for line in excluded if line is not None]


def explain_misfit_of_all(evaluator: Evaluator, results: SearchResults) -> str:
    """Return why nothing fits: the closest candidates, what meshes need at least, and changes that would help."""
    problem = evaluator.problem
    by_need = sorted(results.rejected, key=lambda loser: loser.need_gib or math.inf)
    closest = [loser.alternative for loser in by_need[: evaluator.budget.explanations.num_closest]]
    sections = {
        "The closest of those tried": closest,
        "By what ranks hold at least": excluded_by_memory_bound(evaluator, results),
    }
    memory = f"{evaluator.memory_bytes / GIB:.3g} GiB each"
    lines = [f"no plan fits {problem.cluster.num_ranks} ranks of {problem.hardware.name} with {memory}."]
    for heading, losers in sections.items():
        if losers:
            lines += [f"{heading}:", *(f"  {loser.summary}: {loser.reason}" for loser in losers)]
    problem.request.say("nothing fits; trying what would make room")
    lines.append(
        f"Any one of these makes room: {'; '.join(suggest_changes(evaluator, results))}. "
        "If the ranks have more memory than that, correct cluster.memory_gib."
    )
    return "\n".join(lines)
