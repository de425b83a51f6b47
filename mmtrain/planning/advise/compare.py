"""Put a layout of the user into the ranking of a plan, with the split of where its step is longer."""

import math

from mmtrain.planning.advise.why_slower import slower_text
from mmtrain.planning.artifact.layout import Layout
from mmtrain.planning.artifact.plan import AS_FAST_RATIO, Alternative, Plan

MIN_SHOWN_SHARE = 0.005  # of the chosen step: smaller differences are left out of the split


def with_compared(chosen: Plan, compared: Plan, label: str) -> Plan:
    """Return the faster of two plans for one recipe, with the other among its alternatives.

    label: what the ranking calls the compared one.
    """
    ratio = compared.predicted.step_time_s / chosen.predicted.step_time_s
    if ratio < 1 / AS_FAST_RATIO:
        reason = f"{slower_text(1 / ratio)} than {label}: {explain_split(chosen, compared)}"
        return _ranked(compared, (*chosen.alternatives, _alternative(chosen, "the search's plan", reason)))
    reason = f"{slower_text(ratio)}: {explain_split(compared, chosen)}"
    return _ranked(chosen, (*chosen.alternatives, _alternative(compared, label, reason)))


def with_misfit(chosen: Plan, label: str, reason: str) -> Plan:
    """Return the plan with a compared layout that has no plan among its alternatives."""
    misfit = Alternative(summary=label, placement="unified", step_time_s=None, peak_memory_gib=None, reason=reason)
    return _ranked(chosen, (*chosen.alternatives, misfit))


def explain_split(slower: Plan, faster: Plan) -> str:
    """Say where one plan takes longer than another: `+0.61 s pp_warmup, -0.02 s computing`."""
    seconds, reference = _seconds_by_kind(slower), _seconds_by_kind(faster)
    growth_s = {kind: seconds.get(kind, 0.0) - reference.get(kind, 0.0) for kind in {**seconds, **reference}}
    smallest_s = MIN_SHOWN_SHARE * faster.predicted.step_time_s
    shown = [(kind, grown_s) for kind, grown_s in growth_s.items() if abs(grown_s) >= smallest_s]
    shown.sort(key=lambda item: -item[1])
    return ", ".join(f"{grown_s:+.3g} s {kind}" for kind, grown_s in shown) or "no part of the step differs"


def _seconds_by_kind(plan: Plan) -> dict[str, float]:
    """Divide a plan's step into the seconds that its ranks compute on average, and those that they idle, by kind."""
    predicted = plan.predicted
    computing = {"computing": (1 - sum(predicted.bubbles.values())) * predicted.step_time_s}
    return computing | {kind: share * predicted.step_time_s for kind, share in predicted.bubbles.items()}


def _alternative(plan: Plan, label: str, reason: str) -> Alternative:
    layout = Layout(plan.placement, plan.units, plan.schedule.num_microbatches)
    return Alternative(
        summary=f"{label}, {layout.summary}",
        placement=plan.placement,
        step_time_s=plan.predicted.step_time_s,
        peak_memory_gib=max(plan.predicted.peak_memory_gib.values(), default=None),
        reason=reason,
        balance=plan.predicted.balance,
    )


def _ranked(plan: Plan, alternatives: tuple[Alternative, ...]) -> Plan:
    by_time = sorted(alternatives, key=lambda other: math.inf if other.step_time_s is None else other.step_time_s)
    return plan.model_copy(update={"alternatives": tuple(by_time)})
