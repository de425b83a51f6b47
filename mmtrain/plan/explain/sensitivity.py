"""Simulate the chosen plan and its closest rivals again under changed constants of the cost model.

Nothing is searched anew: layouts, recomputation and orders stay as they are, so that a rival, or the chosen plan, might
do a little better if it were planned for the changed constant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from mmtrain.costs.perturbed_costs import LARGEST_CHANGE, PERTURBATIONS, Perturbation, perturbed_costs
from mmtrain.plan.artifact.choice_sensitivity import ComparedPlan, PerturbedRanking, PerturbedStep, Sensitivity
from mmtrain.plan.budget import SensitivityBudget
from mmtrain.plan.candidate import Candidate
from mmtrain.plan.estimate.evaluator import Evaluator
from mmtrain.plan.estimate.layer_costs import LayerCosts
from mmtrain.plan.estimate.layout_simulation import RetimedLayout


def choice_sensitivity(candidates: Sequence[Candidate], evaluator: Evaluator) -> Sensitivity:
    """Return the steps of the chosen plan and of its closest rivals, with each constant of the costs changed.

    candidates: simulated; the chosen one first, then by step time.

    Raises:
        TypeError: the cost model has no constants to change, see `perturbed_costs`.
    """
    rivals = closest_rivals(candidates, evaluator)
    return simulate_again([candidates[0], *rivals], evaluator, PERTURBATIONS if rivals else ())


def simulate_again(
    candidates: Sequence[Candidate], evaluator: Evaluator, perturbations: Sequence[Perturbation]
) -> Sensitivity:
    """Return the steps of simulated candidates, the chosen one first, under each perturbation.

    All of them are simulated on the first sampled batch. Where one comes near the chosen plan or ahead of it, both are
    simulated on all batches.
    """
    retimed = [_RetimedCandidate.of(candidate, evaluator) for candidate in candidates] if perturbations else []
    margin = evaluator.budget.sensitivity.first_batch_margin
    described = tuple(
        ComparedPlan(summary=c.layout.summary, placement=c.placement, step_time_s=c.step_time_s) for c in candidates
    )
    rankings = tuple(_rank(retimed, evaluator, perturbation, margin) for perturbation in perturbations)
    return Sensitivity(plans=described, rankings=rankings)


def closest_rivals(candidates: Sequence[Candidate], evaluator: Evaluator) -> list[Candidate]:
    """Return the plans that might be faster than the chosen one if the costs are off, by step time.

    They are the best plan of each other placement, and of the chosen placement the best one with other degrees of
    parallelism, as far as they lie within the band of the cost model. A change of one constant changes the ratio of two
    steps by at most `LARGEST_CHANGE`, so nothing beyond that can win.
    """
    chosen, *slower = candidates
    budget: SensitivityBudget = evaluator.budget.sensitivity
    band = min(evaluator.problem.hardware.expected_ratio, LARGEST_CHANGE)
    rivals: dict[str, Candidate] = {}
    for candidate in slower:
        is_near = candidate.step_time_s <= band * chosen.step_time_s
        is_alike = candidate.placement == chosen.placement and _degrees(candidate) == _degrees(chosen)
        if is_near and not is_alike:
            rivals.setdefault(candidate.placement, candidate)
    return sorted(rivals.values(), key=lambda rival: rival.step_time_s)[: budget.max_rivals]


def _degrees(candidate: Candidate) -> list[tuple[str, int, int, int, int | None]]:
    """Return what its units' ranks do; candidates that differ only in chunks or microbatches are alike."""
    units = candidate.layout.units
    return [(name, unit.tp, unit.pp, unit.dp, unit.shard) for name, unit in units.items()]


@dataclass(frozen=True)
class _RetimedCandidate:
    """A candidate with its program."""

    candidate: Candidate
    retimed: RetimedLayout

    @classmethod
    def of(cls, candidate: Candidate, evaluator: Evaluator) -> "_RetimedCandidate":
        """Write the program of a simulated candidate."""
        hardware, budget = evaluator.problem.hardware, evaluator.budget.evaluation
        layout, schedule, programs = candidate.layout, candidate.schedule, evaluator.lowered_programs
        return cls(candidate, RetimedLayout.of(layout, schedule, evaluator.layer_costs, hardware, budget, programs))

    def scaled(self, layer_costs: LayerCosts) -> PerturbedStep:
        """Return the step by what changes on the first sampled batch."""
        [first_s] = self.retimed.step_seconds(layer_costs, num_batches=1)
        ratio = first_s / self.candidate.first_batch_step_s
        return PerturbedStep(step_time_s=ratio * self.candidate.step_time_s, from_first_batch=True)

    def simulated(self, layer_costs: LayerCosts) -> PerturbedStep:
        """Return the step, mean over the sampled batches."""
        return PerturbedStep(step_time_s=fmean(self.retimed.step_seconds(layer_costs)), from_first_batch=False)


def _rank(
    retimed: Sequence[_RetimedCandidate], evaluator: Evaluator, perturbation: Perturbation, margin: float
) -> PerturbedRanking:
    """Return the steps of all plans with one constant changed."""
    costs = perturbed_costs(evaluator.problem.costs, perturbation)
    layer_costs = evaluator.layer_costs.with_settings(costs=costs)
    steps = [candidate.scaled(layer_costs) for candidate in retimed]
    limit_s = margin * steps[0].step_time_s
    near = [number for number, step in enumerate(steps) if step.step_time_s <= limit_s]
    if len(near) > 1:  # not the chosen plan alone
        for number in near:
            steps[number] = retimed[number].simulated(layer_costs)
    return PerturbedRanking(constant=perturbation.constant, ratio=perturbation.ratio, steps=tuple(steps))
