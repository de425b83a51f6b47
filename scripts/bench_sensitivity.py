"""Print how the choice of a placement depends on the constants of the costs: the best plan of each, under changed ones.

    python -m scripts.bench_sensitivity [RECIPE...] [--ratios 0.8 1.25]   # recipes of recipes/whatif; all by default
    python -m scripts.bench_sensitivity qwen2_vl_7b --anew                # search again under each change, too

A row holds one plan beside the chosen one: how many times as long its step is with the costs as stated, and with one
constant at so many times that; the spread of the ranks' times at 0 and 2 times. Without --anew no plan is searched
again: layouts, recomputation and orders stay. A cell in bold is over 1% faster than the chosen plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mmtrain.planning.advise.baselines import BaselinePlanner
from mmtrain.planning.artifact.plan import AS_FAST_RATIO
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import simulate_layout
from mmtrain.planning.planner import search_placements
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.candidate import Candidate
from mmtrain.planning.space.problem import PlanningProblem
from scripts.measurements import arguments, start
from scripts.perturbed_costs import (
    COST_CONSTANTS,
    LARGEST_CHANGE,
    SPREAD_PERTURBATIONS,
    Perturbation,
    perturbed_costs,
    perturbed_hardware,
)
from scripts.whatif_problems import WHAT_IF_FOLDER, whatif_problem

NO_RECIPES = ("common",)  # what others extend


@dataclass(frozen=True)
class Row:
    """A plan beside the chosen one."""

    name: str
    stated: float  # its step over the chosen one's
    changed: tuple[float, ...]  # the same under each perturbation


def main() -> None:
    """Print a Markdown table with the rows of each recipe."""
    parser = arguments(__doc__)
    parser.add_argument("recipes", nargs="*", help="names of recipes/whatif")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.8, 1.25])
    parser.add_argument("--anew", action="store_true", help="search again under each change")
    options = parser.parse_args()
    names = options.recipes or sorted(
        path.stem for path in WHAT_IF_FOLDER.glob("*.yaml") if path.stem not in NO_RECIPES
    )
    perturbations = [Perturbation(constant, ratio) for constant in COST_CONSTANTS for ratio in options.ratios]
    perturbations += SPREAD_PERTURBATIONS
    report = start("What the choice of a plan is sensitive to", options)
    report.table("recipe", "plan", "as stated", *map(str, perturbations))
    for name in names:
        problem = whatif_problem(name)
        candidates, evaluator = search(problem)
        chosen = candidates[0]
        layout = chosen.layout.summary
        plan = f"{problem.cluster.num_ranks} {problem.hardware.name}: {layout}"
        report.row(f"`{name}`", plan, f"{chosen.step_time_s:.3g} s")
        for row in rows(candidates, evaluator, perturbations):
            report.row("", row.name, *map(_cell, [row.stated, *row.changed]))
        for perturbation in perturbations if options.anew else ():
            report.row("", f"searched anew, {perturbation}", searched_anew(problem, perturbation))


def rows(candidates: Sequence[Candidate], evaluator: Evaluator, perturbations: Sequence[Perturbation]) -> Iterator[Row]:
    """Yield the plans beside the chosen one, each with its steps over the chosen one's."""
    chosen, *beside = compared_plans(candidates, evaluator)
    chosen_steps, *steps_beside = simulate_again([chosen, *beside], evaluator, perturbations)
    for candidate, steps in zip(beside, steps_beside, strict=True):
        changed = tuple(step / chosen_step for step, chosen_step in zip(steps, chosen_steps, strict=True))
        yield Row(candidate.layout.summary, candidate.step_time_s / chosen.step_time_s, changed)


def compared_plans(candidates: Sequence[Candidate], evaluator: Evaluator) -> list[Candidate]:
    """Return the chosen plan, the next one of its placement with other degrees of parallelism, and the best of others.

    The next one must be near: beyond the largest change it does not win.
    """
    chosen = candidates[0]
    alike = [c for c in candidates if c.placement == chosen.placement and _degrees(c) != _degrees(chosen)]
    near = [rival for rival in alike[:1] if rival.step_time_s <= LARGEST_CHANGE * chosen.step_time_s]
    return [chosen, *near, *(best for best in _first_by_placement(candidates) if best.placement != chosen.placement)]


def simulate_again(
    candidates: Sequence[Candidate], evaluator: Evaluator, perturbations: Sequence[Perturbation]
) -> list[list[float]]:
    """Return the step of each candidate under each perturbation, mean over the sampled batches."""
    costs = [perturbed_costs(evaluator.problem.costs, perturbation) for perturbation in perturbations]
    stated, budget = evaluator.problem.hardware, evaluator.budget.evaluation
    changed = [
        (evaluator.layer_costs.with_settings(costs=of_costs), perturbed_hardware(stated, perturbation))
        for of_costs, perturbation in zip(costs, perturbations, strict=True)
    ]
    steps = []
    for candidate in candidates:
        simulations = (
            simulate_layout(candidate.layout, candidate.schedule, layer_costs, hardware, budget)
            for layer_costs, hardware in changed
        )
        steps.append([simulation.step_time_s for simulation in simulations])
    return steps


def _degrees(candidate: Candidate) -> list[tuple[str, int, int, int, int | None]]:
    """Return what its units' ranks do; candidates that differ only in chunks or microbatches are alike."""
    units = candidate.layout.units
    return [(name, unit.tp, unit.pp, unit.dp, unit.shard) for name, unit in units.items()]


def searched_anew(problem: PlanningProblem, perturbation: Perturbation) -> str:
    """Return the best step of each placement where the whole search runs under the perturbation."""
    candidates, _ = search(_changed(problem, perturbation))
    bests = _first_by_placement(candidates)
    return "; ".join(f"{best.layout.summary} {best.step_time_s / candidates[0].step_time_s:.3f}" for best in bests)


def search(problem: PlanningProblem) -> tuple[Sequence[Candidate], Evaluator]:
    """Return what `plan` ranks: simulated candidates, with rules of thumb where they are faster."""
    evaluator, results = search_placements(problem, DEFAULT_BUDGET)
    limits_s = dict.fromkeys(problem.constraints.placements, results.fastest_s)
    rules = BaselinePlanner(evaluator, results.enumerated).plan_all(max_step_s=limits_s)
    faster = [rule for rule in rules.values() if rule.step_time_s < results.fastest_s]
    fastest = replace(results, candidates=tuple(faster), rejected=(), enumerated=())
    return results.merged(fastest).candidates, evaluator


def _changed(problem: PlanningProblem, perturbation: Perturbation) -> PlanningProblem:
    """Return the problem on hardware of the same name with one constant changed."""
    hardware = replace(perturbed_hardware(problem.hardware, perturbation), name=problem.hardware.name)
    cluster = replace(problem.cluster, hardware=hardware)
    return replace(problem, cluster=cluster, costs=perturbed_costs(problem.costs, perturbation))


def _first_by_placement(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the best candidate of each placement, fastest first."""
    best: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.step_time_s):
        best.setdefault(candidate.placement, candidate)
    return list(best.values())


def _cell(ratio: float) -> str:
    return f"**{ratio:.3f}**" if ratio * AS_FAST_RATIO < 1 else f"{ratio:.3f}"


if __name__ == "__main__":
    main()
