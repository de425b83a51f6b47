"""Say whether another plan would be chosen if ranks differed less, or more, than stated (`cluster.time_spread`)."""

from collections.abc import Sequence
from dataclasses import replace

from mmtrain.costs.time_spread import NO_SPREAD, TimeSpread
from mmtrain.planning.artifact.plan import AS_FAST_RATIO, SpreadChoice
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import simulate_layout
from mmtrain.planning.space.candidate import Candidate
from mmtrain.program.simulation.straggler_waits import straggler_waits

MAX_RIVALS_SIMULATED = 3  # under each other spread; a few are within the few percent that it changes


def other_choices(candidates: Sequence[Candidate], evaluator: Evaluator) -> tuple[SpreadChoice, ...]:
    """Return the plans that would be chosen without any spread, and with twice the stated one, where they differ.

    candidates: simulated, the chosen one first. No plan is searched again; only those are simulated whose waits change
    by enough to overtake the chosen one.
    """
    stated = evaluator.problem.hardware.time_spread
    if stated == NO_SPREAD:
        return ()
    spreads = {"no": NO_SPREAD, "twice the": stated.scaled(2)}
    choices = [_other_choice(candidates, evaluator, name, spread) for name, spread in spreads.items()]
    return tuple(choice for choice in choices if choice is not None)


def _other_choice(
    candidates: Sequence[Candidate], evaluator: Evaluator, name: str, spread: TimeSpread
) -> SpreadChoice | None:
    chosen, *others = candidates
    limit_s = chosen.step_time_s * _wait_ratio(chosen, evaluator, spread)
    expected_s = {rival.id: rival.step_time_s * _wait_ratio(rival, evaluator, spread) for rival in others}
    rivals = [rival for rival in others if expected_s[rival.id] * AS_FAST_RATIO < limit_s]
    rivals = sorted(rivals, key=lambda rival: expected_s[rival.id])[:MAX_RIVALS_SIMULATED]
    if not rivals:
        return None
    chosen_s, *rivals_s = (_step_s(candidate, evaluator, spread) for candidate in (chosen, *rivals))
    fastest_s = min(rivals_s)
    if fastest_s * AS_FAST_RATIO > chosen_s:
        return None
    fastest = rivals[rivals_s.index(fastest_s)]
    return SpreadChoice(spread=name, summary=fastest.layout.summary, faster=1 - fastest_s / chosen_s)


def _wait_ratio(candidate: Candidate, evaluator: Evaluator, spread: TimeSpread) -> float:
    """Return by what the step of a candidate changes under another spread, if it is all compute."""
    holds_tp_waits = evaluator.layer_costs.costs.holds_tp_waits

    def ratio_to_mean_rank(of_ranks: TimeSpread) -> float:
        waits = straggler_waits(candidate.graph, of_ranks, costs_hold_tp_waits=holds_tp_waits)
        return max(waits.passes.values()) * waits.groups

    return ratio_to_mean_rank(spread) / ratio_to_mean_rank(evaluator.problem.hardware.time_spread)


def _step_s(candidate: Candidate, evaluator: Evaluator, spread: TimeSpread) -> float:
    hardware = replace(evaluator.problem.hardware, time_spread=spread)
    budget = evaluator.budget.evaluation
    return simulate_layout(candidate.layout, candidate.schedule, evaluator.layer_costs, hardware, budget).step_time_s
