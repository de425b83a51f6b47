"""Choose a plan by running it: `plan --measure`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mmtrain.errors import PlanError
from mmtrain.planning.advise.finish import finish_plan
from mmtrain.planning.artifact.graph_memory import schedule_in_flight
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.search.cuts_to_measure import cuts_to_measure
from mmtrain.planning.space.candidate import Candidate, SearchResults
from mmtrain.planning.space.problem import MeasureStep, PlanRequest

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
    runs_here = _Runs(evaluator, request.measure)
    measured = [runs_here.run(candidate) for candidate in to_run]
    rules = {name: runs_here.run(baseline) for name, baseline in baselines.items()}
    fastest = min([*measured, *rules.values()], key=_measured_s)
    if _measured_s(fastest) == math.inf:
        raise PlanError(f"--measure: none of the {len(measured)} plans predicted to be fastest could be run here")
    losing_rules = {name: rule for name, rule in rules.items() if rule is not fastest and rule not in measured}
    others = sorted((candidate for candidate in measured if candidate is not fastest), key=_measured_s)
    ranked = (*runs_here.with_less_recomputation(fastest), *others)
    if not request.explain:
        return replace(results, candidates=ranked, rejected=()), losing_rules
    not_run = [c for c in results.candidates if all(c.layout != candidate.layout for candidate in to_run)]
    return replace(results, candidates=(*ranked, *not_run)), losing_rules


@dataclass
class _Runs:
    """Runs plans, each once, and lets their runs correct what is recomputed (OmniBal, arXiv 2407.20761)."""

    evaluator: Evaluator
    measure: MeasureStep
    runs: list[tuple[Candidate, Candidate]] = field(default_factory=list)  # as asked for, and as run

    def run(self, candidate: Candidate) -> Candidate:
        """Return the candidate with its measured step; with more layers recomputed where memory ran out.

        Rules of thumb often make the same plan, so one that is known is not run again.
        """
        for asked, known in self.runs:
            if asked.layout == candidate.layout and asked.schedule == candidate.schedule:
                return known
        measured, is_out_of_memory = self._run(candidate)
        for share in self.evaluator.budget.reruns.shares_after_misfit:
            if not is_out_of_memory:
                break
            smaller = self._refitted(candidate, share * self.evaluator.memory_bytes)
            if smaller is not None and smaller.layout != candidate.layout:
                measured, is_out_of_memory = self._run(smaller)
        self.runs.append((candidate, measured))
        return measured

    def with_less_recomputation(self, candidate: Candidate) -> list[Candidate]:
        """Take recomputation back while runs leave room for it; return all that were tried, fastest first."""
        tried = [candidate]
        for _ in range(self.evaluator.budget.reruns.max_take_backs):
            last = tried[-1]
            if last.memory_ratio is None or last.memory_ratio >= 1 or not _recomputes(last):
                break
            larger = self._refitted(last, self.evaluator.memory_bytes / last.memory_ratio)
            if larger is None or larger.layout == last.layout:
                break
            tried.append(self._run(larger)[0])
            if _measured_s(tried[-1]) > _measured_s(last):
                break
        return sorted(tried, key=_measured_s)

    def _run(self, candidate: Candidate) -> tuple[Candidate, bool]:
        step = self.measure(finish_plan(candidate, self.evaluator))
        return candidate.measured(step.seconds, step.memory_ratio), step.is_out_of_memory

    def _refitted(self, candidate: Candidate, memory_bytes: float) -> Candidate | None:
        """Return the candidate with the recomputation that so much memory asks for, simulated; None where none fits.

        A schedule that was made for a layout stays with it.
        """
        if candidate.explicit_schedule is not None:
            return None
        assert candidate.partition is not None
        in_flight = schedule_in_flight(candidate.fitted_graph, candidate.schedule)
        start = Candidate(candidate.id, candidate.assignment).partitioned(candidate.partition)
        fitted = self.evaluator.fit(start, in_flight, memory_bytes)
        return self.evaluator.simulate(fitted) if isinstance(fitted, Candidate) else None


def _recomputes(candidate: Candidate) -> bool:
    return any(stage.recompute for stage in candidate.graph.stages)


def _measured_s(candidate: Candidate) -> float:
    assert candidate.measured_step_s is not None
    return candidate.measured_step_s
