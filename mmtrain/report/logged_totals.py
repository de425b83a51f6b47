"""Sum logged steps: what sharded units dispatched, how even that made each phase, and what each source contributed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmtrain.balance.dispatch.phase_loads import OffNodeVolume, PhaseLoad, mean_off_node_volumes, mean_phase_loads
from mmtrain.costs.hardware import GIB
from mmtrain.planning.artifact.plan import Plan
from mmtrain.report.metrics_record import compact_number, steady_steps
from mmtrain.report.plain_text import memory_text, seconds_text

PHASE_TITLE = "Load of each phase in a step"
PHASE_HEAD = ("phase", "", "tokens of the mean rank", "fullest rank before", "and after balancing", "to other nodes")
SOURCE_HEAD = ("source", "samples", "LLM tokens", "share of tokens", "first loss", "last loss")


@dataclass(frozen=True)
class PhaseTotals:
    """Predicted or measured: the load of each phase, and the dispatches, of a mean step."""

    phases: Mapping[str, PhaseLoad]  # by unit
    dispatch_s: float
    step_time_s: float
    off_node: Mapping[str, OffNodeVolume] = field(default_factory=dict)  # bytes by unit; empty on one node

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
        text = (
            f"dispatches {seconds_text(self.dispatch_s)} ({self.dispatch_share:.1%} of a step); "
            f"fullest over mean rank, before and after balancing: {', '.join(ratios)}"
        )
        volumes = [f"{unit} {volume_text(volume)}" for unit, volume in self.off_node.items()]
        return f"{text}; features to other nodes: {', '.join(volumes)}" if volumes else text


def volume_text(volume: OffNodeVolume) -> str:
    """Write `1.2 GiB (fullest rank 38 MiB)`."""
    return f"{memory_text(volume.total / GIB)} (fullest rank {memory_text(volume.fullest / GIB)})"


def predicted_phases(plan: Plan) -> PhaseTotals | None:
    """Return what is predicted for a plan; None where units are not sharded, or for files that do not say it."""
    balance = plan.predicted.balance
    if balance is None or balance.phases is None or balance.dispatch_s is None:
        return None
    return PhaseTotals(balance.phases, balance.dispatch_s, plan.predicted.step_time_s, balance.off_node)


def measured_phases(metrics: Sequence[Mapping[str, Any]] | None) -> PhaseTotals | None:
    """Return the means over logged steps, without the first one; None where none dispatched the last one's units."""
    steps = [step for step in steady_steps(metrics) if "dispatch" in step]
    if not steps:
        return None
    by_step = [{unit: PhaseLoad(**load) for unit, load in step["dispatch"]["phases"].items()} for step in steps]
    seconds = sum(step["dispatch"]["seconds"] or 0.0 for step in steps) / len(steps)
    step_time_s = sum(step["step_time_s"] or 0.0 for step in steps) / len(steps)
    volumes = [step["dispatch"].get("off_node", {}) for step in steps]
    off_node = {}
    if all(volumes):
        by_step_of = [{unit: OffNodeVolume(**volume) for unit, volume in of_step.items()} for of_step in volumes]
        off_node = mean_off_node_volumes(by_step_of)
    return PhaseTotals(mean_phase_loads(by_step), seconds, step_time_s, off_node)


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
                        volume_text(of_steps.off_node[unit]) if unit in of_steps.off_node else "-",
                    )
                )
    return rows


@dataclass(frozen=True)
class SourceTotals:
    """One source of samples in the steps of a run."""

    name: str
    samples: int
    tokens: int  # of the LLM
    token_share: float  # of the tokens of all sources
    first_loss: float | None  # mean over its target tokens of the first step that had some
    last_loss: float | None  # likewise of the last step

    def cells(self) -> list[str]:
        """Return the row of a table under `SOURCE_HEAD`."""
        losses = ("-" if loss is None else f"{loss:.4f}" for loss in (self.first_loss, self.last_loss))
        tokens = compact_number(self.tokens)
        return [self.name, f"{self.samples:,}", tokens, f"{self.token_share:.2%}", *losses]


def sum_sources(metrics: Sequence[Mapping[str, Any]]) -> list[SourceTotals]:
    """Sum logged steps, as `StepMetrics.to_json` writes them, by source; empty for a run on one source."""
    of_source: dict[str, list[Mapping[str, Any]]] = {}
    for step in metrics:
        for name, values in step.get("sources", {}).items():
            of_source.setdefault(name, []).append(values)
    all_tokens = sum(values["tokens"] for steps in of_source.values() for values in steps)
    totals = []
    for name, steps in of_source.items():
        losses = [values["loss"] for values in steps if values.get("loss") is not None] or [None]
        tokens = sum(values["tokens"] for values in steps)
        totals.append(
            SourceTotals(
                name=name,
                samples=sum(values["samples"] for values in steps),
                tokens=tokens,
                token_share=tokens / max(all_tokens, 1),
                first_loss=losses[0],
                last_loss=losses[-1],
            )
        )
    return totals


def source_sentences(totals: Sequence[SourceTotals]) -> Iterator[str]:
    """Write a line for each source, for the end of a run's log."""
    for source in totals:
        loss = "" if source.last_loss is None else f", loss {source.first_loss:.4f} to {source.last_loss:.4f}"
        yield (
            f"source {source.name}: {source.token_share:.2%} of the tokens ({compact_number(source.tokens)}), "
            f"{source.samples:,} samples{loss}"
        )
