"""Sum what logged steps of sharded units dispatched, and how even that made each phase."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmtrain.balance.dispatch.phase_loads import PhaseLoad, mean_phase_loads
from mmtrain.planning.artifact.plan import Plan
from mmtrain.report.metrics_record import steady_steps
from mmtrain.report.plain_text import seconds_text

PHASE_TITLE = "Load of each phase in a step"
PHASE_HEAD = ("phase", "", "tokens of the mean rank", "fullest rank before", "and after balancing")


@dataclass(frozen=True)
class PhaseTotals:
    """Predicted or measured: the load of each phase, and the dispatches, of a mean step."""

    phases: Mapping[str, PhaseLoad]  # by unit
    dispatch_s: float
    step_time_s: float

    @property
    def dispatch_share(self) -> float:
        """Share of the step in which ranks dispatch."""
        return self.dispatch_s / self.step_time_s if self.step_time_s else 0.0

    def to_text(self) -> str:
        """Write `dispatches 2 ms (0.1% of a step); fullest over mean rank, before and after ...: llm 1.37 -> 1.02`."""
        ratios = [
            f"{unit} {before:.2f} -> {after:.2f}"
            for unit, (before, after) in ((unit, load.over_mean) for unit, load in self.phases.items())
        ]
        return (
            f"dispatches {seconds_text(self.dispatch_s)} ({self.dispatch_share:.1%} of a step); "
            f"fullest over mean rank, before and after balancing: {', '.join(ratios)}"
        )


def predicted_phases(plan: Plan) -> PhaseTotals | None:
    """Return what is predicted for a plan; None where units are not sharded, or for files that do not say it."""
    balance = plan.predicted.balance
    if balance is None or balance.phases is None or balance.dispatch_s is None:
        return None
    return PhaseTotals(balance.phases, balance.dispatch_s, plan.predicted.step_time_s)


def measured_phases(metrics: Sequence[Mapping[str, Any]] | None) -> PhaseTotals | None:
    """Return the means over logged steps, without the first one; None where none dispatched the last one's units."""
    steps = [step for step in steady_steps(metrics) if "dispatch" in step]
    if not steps:
        return None
    by_step = [{unit: PhaseLoad(**load) for unit, load in step["dispatch"]["phases"].items()} for step in steps]
    seconds = sum(step["dispatch"]["seconds"] or 0.0 for step in steps) / len(steps)
    step_time_s = sum(step["step_time_s"] or 0.0 for step in steps) / len(steps)
    return PhaseTotals(mean_phase_loads(by_step), seconds, step_time_s)


def phase_rows(plan: Plan, metrics: Sequence[Mapping[str, Any]] | None) -> list[tuple[str, ...]]:
    """Return for each phase a predicted and a measured row, as far as known, in the order of `PHASE_HEAD`."""
    rows: list[tuple[str, ...]] = []
    totals = {"predicted": predicted_phases(plan), "measured": measured_phases(metrics)}
    for unit in plan.units:
        for what, of_steps in totals.items():
            if of_steps is not None and unit in of_steps.phases:
                load = of_steps.phases[unit]
                before, after = load.over_mean
                rows.append(
                    (
                        unit,
                        what,
                        f"{load.mean:,.0f}",
                        f"{load.max_before:,.0f} ({before:.2f}x)",
                        f"{load.max_after:,.0f} ({after:.2f}x)",
                    )
                )
    return rows
