"""Choose a plan by running it: `plan --measure`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mmtrain.errors import PlanError
from mmtrain.plan.candidate import Candidate, SearchResults
from mmtrain.plan.estimate.evaluator import Evaluator
from mmtrain.plan.finish import finish_plan
from mmtrain.plan.problem import MeasureStep, PlanRequest
from mmtrain.plan.search.cuts_to_measure import cuts_to_measure

Baselines = Mapping[str, Candidate]  # simulated, by the name of their rule


def choose_by_measurement(
    results: SearchResults, baselines: Baselines, evaluator: Evaluator, request: PlanRequest
) -> tuple[SearchResults, Baselines]:
    """Run the plans predicted fastest, and what rules of thumb make; return both with their measured steps.

    The results are ordered by measured steps: sizes and layer partitions compete (`cuts_to_measure`), and a baseline
    that was run faster than all of them leads. What was not run is left out, unless every loser is asked for.

    Raises:
        PlanError: none of the plans could be run.
    """
    assert request.measure is not None
    to_run = cuts_to_measure(results, evaluator, request.num_alternatives, request.num_measured)
    runs = _Runs(evaluator, request.measure)
    measured = [runs.measured(candidate) for candidate in to_run]
    rules = {name: runs.measured(baseline) for name, baseline in baselines.items()}
    ranked = sorted([*measured, *rules.values()], key=_measured_s)
    if _measured_s(ranked[0]) == math.inf:
        raise PlanError(f"--measure: none of the {len(measured)} plans predicted to be fastest could be run here")
    leaders = ranked[:1] if ranked[0] not in measured else []
    losing_rules = {name: rule for name, rule in rules.items() if rule not in leaders and rule not in measured}
    ranked = [*leaders, *sorted(measured, key=_measured_s)]
    if not request.explain:
        return replace(results, candidates=tuple(ranked), rejected=()), losing_rules
    not_run = [c for c in results.candidates if all(c.layout != candidate.layout for candidate in to_run)]
    return replace(results, candidates=(*ranked, *not_run)), losing_rules


@dataclass
class _Runs:
    """What was run so far: rules of thumb often make the same plan."""

    evaluator: Evaluator
    measure: MeasureStep
    known: list[Candidate] = field(default_factory=list)

    def measured(self, candidate: Candidate) -> Candidate:
        for known in self.known:
            if known.layout == candidate.layout and known.schedule == candidate.schedule:
                return known
        self.known.append(candidate.measured(self.measure(finish_plan(candidate, self.evaluator))))
        return self.known[-1]


def _measured_s(candidate: Candidate) -> float:
    assert candidate.measured_step_s is not None
    return candidate.measured_step_s
