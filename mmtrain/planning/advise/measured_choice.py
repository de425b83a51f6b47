"""Choose a plan by running it: `plan --measure`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mmtrain.errors import PlanError
from mmtrain.planning.advise.finish import finish_plan
from mmtrain.planning.advise.unit_memory import (
    activation_ratios,
    corrected_evaluator,
    counted_memory_of,
    held_bytes,
)
from mmtrain.planning.artifact.graph_memory import schedule_in_flight
from mmtrain.planning.artifact.plan import StepMeasurement
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.search.cuts_to_measure import cuts_to_measure
from mmtrain.planning.space.candidate import Candidate, FittedLayout, SearchResults
from mmtrain.planning.space.problem import MeasurePlans, PlanRequest

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
    runs.run([*to_run, *baselines.values()])
    measured = [runs.result(candidate) for candidate in to_run]
    rules = {name: runs.result(baseline) for name, baseline in baselines.items()}
    fastest = min([*measured, *rules.values()], key=_measured_s)
    if _measured_s(fastest) == math.inf:
        raise PlanError(f"--measure: none of the {len(measured)} plans predicted to be fastest could be run here")
    losing_rules = {name: rule for name, rule in rules.items() if rule is not fastest and rule not in measured}
    others = sorted((candidate for candidate in measured if candidate is not fastest), key=_measured_s)
    ranked = (*runs.with_less_recomputation(fastest), *others)
    if not request.explain:
        return replace(results, candidates=ranked, rejected=()), losing_rules
    not_run = [c for c in results.candidates if all(c.layout != candidate.layout for candidate in to_run)]
    return replace(results, candidates=(*ranked, *not_run)), losing_rules


@dataclass
class _Runs:
    """Runs plans, each once, and lets their runs correct what is recomputed (OmniBal, arXiv 2407.20761)."""

    evaluator: Evaluator
    measure: MeasurePlans
    runs: list[tuple[Candidate, Candidate]] = field(default_factory=list)  # as asked for, and as run

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Run the candidates in turn; then with more layers recomputed those that ran out of memory.

        Rules of thumb often make the same plan, so one that is known is not run again.
        """
        for candidate in candidates:
            if all(not _is_same(candidate, asked) for asked, _ in self.runs):
                self.runs.append((candidate, candidate))
        steps = self._measure([asked for asked, _ in self.runs])
        self.runs = [(asked, asked.measured(step)) for (asked, _), step in zip(self.runs, steps, strict=True)]
        for share in self.evaluator.budget.reruns.shares_after_misfit:
            self._run_misfits_within(share * self.evaluator.memory_bytes)

    def result(self, candidate: Candidate) -> Candidate:
        """Return a candidate as it was run, with its measured step."""
        return next(as_run for asked, as_run in self.runs if _is_same(candidate, asked))

    def with_less_recomputation(self, candidate: Candidate) -> list[Candidate]:
        """Take recomputation back while runs leave room for it; return all that were tried, fastest first."""
        tried = [candidate]
        for _ in range(self.evaluator.budget.reruns.max_take_backs):
            last = tried[-1]
            larger = self._as_large_as_runs_allow(last, tried[-2] if len(tried) > 1 else None)
            if larger is None or larger.layout == last.layout:
                break
            tried += self._run_beside(last, [larger])
            if _measured_s(tried[-1]) > _measured_s(last):
                break
        return sorted(tried, key=_measured_s)

    def _as_large_as_runs_allow(self, last: Candidate, before: Candidate | None) -> Candidate | None:
        """Return a candidate with the recomputation that its ranks need by what they held; None where none is saved.

        After one run, what is counted for a rank is multiplied by what that rank held beside it. After two runs that
        recompute differently, activations of each unit are corrected first, if the runs tell the units apart.
        """
        if last.memory_ratio is None or not _recomputes(last):
            return None
        ratio_by_rank = last.ratio_by_rank or dict.fromkeys(last.memory, last.memory_ratio)
        ratios = None if before is None else activation_ratios(before, last, self.evaluator)
        if ratios is not None:
            corrected = corrected_evaluator(self.evaluator, ratios)
            counted = counted_memory_of(last, corrected)
            by_rank = {rank: nbytes / counted[rank].total for rank, nbytes in held_bytes(last).items()}
            return self._refitted(last, self.evaluator.memory_bytes, by_rank, corrected)
        if min(ratio_by_rank.values()) >= 1:
            return None
        return self._refitted(last, self.evaluator.memory_bytes, ratio_by_rank)

    def _run_misfits_within(self, memory_bytes: float) -> None:
        """Run what ran out of memory with the recomputation that less memory asks for."""
        smaller: dict[int, Candidate] = {}
        for number, (asked, as_run) in enumerate(self.runs):
            refitted = self._refitted(asked, memory_bytes) if as_run.is_out_of_memory else None
            if refitted is not None and refitted.layout != as_run.layout:
                smaller[number] = refitted
        if not smaller:
            return
        fastest = min((as_run for _, as_run in self.runs), key=_measured_s)
        for number, as_run in zip(smaller, self._run_beside(fastest, [*smaller.values()]), strict=True):
            self.runs[number] = (self.runs[number][0], as_run)

    def _run_beside(self, reference: Candidate, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Run candidates in turn with one that was run before, so that what changed since ranks none of them.

        Their steps are given as if the reference took as long as before.
        """
        if math.isinf(_measured_s(reference)):
            return [c.measured(step) for c, step in zip(candidates, self._measure(candidates), strict=True)]
        again, *steps = self._measure([reference, *candidates])
        change = 1.0 if math.isinf(again.seconds) else _measured_s(reference) / again.seconds
        steps = [replace(step, seconds=step.seconds * change) for step in steps]
        return [candidate.measured(step) for candidate, step in zip(candidates, steps, strict=True)]

    def _measure(self, candidates: Sequence[Candidate]) -> Sequence[StepMeasurement]:
        return self.measure([finish_plan(candidate, self.evaluator) for candidate in candidates])

    def _refitted(
        self,
        candidate: Candidate,
        memory_bytes: float,
        ratio_by_rank: Mapping[int, float] | None = None,
        counting: Evaluator | None = None,
    ) -> Candidate | None:
        """Return the candidate with the recomputation that so much memory asks for, simulated; None where none fits.

        A schedule that was made for a layout stays with it. ratio_by_rank: what ranks hold beside what `counting`
        counts, by default the evaluator of the search, which counts the result in any case.
        """
        if candidate.explicit_schedule is not None:
            return None
        assert candidate.partition is not None
        in_flight = schedule_in_flight(candidate.fitted_graph, candidate.schedule)
        start = Candidate(candidate.id, candidate.assignment).partitioned(candidate.partition)
        fitted = (counting or self.evaluator).fit(start, in_flight, memory_bytes, ratio_by_rank)
        if not isinstance(fitted, Candidate):
            return None
        if counting is not None:
            memory = counted_memory_of(fitted, self.evaluator)
            fitted = fitted.fitted(FittedLayout(fitted.layout, fitted.fitted_graph, memory))
        return self.evaluator.simulate(fitted)


def _is_same(first: Candidate, second: Candidate) -> bool:
    return first.layout == second.layout and first.schedule == second.schedule


def _recomputes(candidate: Candidate) -> bool:
    return any(stage.recompute for stage in candidate.graph.stages)


def _measured_s(candidate: Candidate) -> float:
    assert candidate.measured_step_s is not None
    return candidate.measured_step_s
