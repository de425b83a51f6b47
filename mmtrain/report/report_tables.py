"""The rows of a report's tables as text, the same on the page and in a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmtrain.balance.summary import GroupingScore
from mmtrain.costs.hardware import GIB
from mmtrain.report.comparison import MAX_CRITICAL_PATH_ROWS, ComparisonRow, critical_path_rows
from mmtrain.report.metrics_record import compact_number
from mmtrain.report.plain_text import memory_text, seconds_text
from mmtrain.report.report_contents import KeyFigure, ReportContents

MAX_MEMORY_ROWS = 16
UNBALANCED_METHOD = "random"  # what training without balancing does


def figure_text(figure: KeyFigure, measured: bool) -> str:
    """A figure with its unit, `97.1 ms` or `41.2 %`."""
    value = figure.measured if measured else figure.predicted
    if value is None:
        return "-"
    if figure.unit == "s":
        return seconds_text(value)
    if figure.unit == "GiB":
        return memory_text(value)
    if figure.unit == "/s":
        return f"{compact_number(value)}/s"
    return f"{value:.3g} {figure.unit}"


def row_cells(row: ComparisonRow, measured: bool) -> list[str]:
    """What, predicted, and where something was measured that and the error."""
    cells = [row.what, f"{row.predicted_s * 1e3:.2f} ms"]
    if measured:
        cells.append("-" if row.measured_s is None else f"{row.measured_s * 1e3:.2f} ms")
        cells.append("-" if row.error is None else f"{row.error:+.1%}")
    return cells


def path_cells(contents: ReportContents) -> list[tuple[list[str], float]]:
    """What the simulated steps wait for, one after another: cells (what, seconds, share) and the share again."""
    found = [(row.what, row.seconds) for row in critical_path_rows(contents.simulated)]
    few, rest = found[:MAX_CRITICAL_PATH_ROWS], found[MAX_CRITICAL_PATH_ROWS:]
    if rest:
        few.append((f"{len(rest)} others", sum(seconds for _, seconds in rest)))
    whole = sum(seconds for _, seconds in found)
    return [([what, seconds_text(s), f"{s / whole:.1%}"], s / whole) for what, s in few if whole]


@dataclass(frozen=True)
class MemoryRow:
    """GiB at the fullest moment: of ranks as predicted, by kind where the plan says, or of a run's fullest rank."""

    what: str
    gib: float
    kinds: Mapping[str, float]

    @property
    def most(self) -> str:
        """The kind that takes most, and its share."""
        if not self.kinds:
            return "-"
        kind = max(self.kinds, key=lambda name: self.kinds[name])
        return f"{kind} {self.kinds[kind] / self.gib:.0%}" if self.gib else kind


def memory_rows(contents: ReportContents) -> list[MemoryRow]:
    """The fullest ranks as predicted, and what the run's fullest took."""
    predicted = contents.plan.predicted
    rows = [
        MemoryRow(f"rank{'s' * ('-' in ranks)} {ranks}", gib, predicted.memory_kinds_gib.get(ranks, {}))
        for ranks, gib in predicted.peak_memory_gib.items()
    ]
    if len(rows) > MAX_MEMORY_ROWS:
        rows = sorted(rows, key=lambda row: -row.gib)[:MAX_MEMORY_ROWS]
    measured = max((m["peak_memory_bytes"] for m in contents.metrics or ()), default=None)
    if measured is not None:
        what = "process" if contents.plan.hardware == "cpu-core" else "fullest rank"
        rows.append(MemoryRow(f"measured, {what}", measured / GIB, {}))
    return rows


def balance_rows(scores: Sequence[GroupingScore], chosen: str) -> tuple[list[str], list[list[str]], str]:
    """Head, rows and a sentence that says what the recipe's grouping gains over random batches."""
    units = list(scores[0].dist_ratio)
    head = ["grouping", "fill", *(f"dist {unit}" for unit in units), "max/mean"]
    rows = []
    for score in scores:
        name = f"{score.method} (this recipe)" if score.method == chosen else score.method
        waits = (f"{score.dist_ratio[unit]:.4f}" for unit in units)
        rows.append([name, f"{score.fill:.3f}", *waits, f"{score.max_over_mean:.4f}"])
    by_name = {score.method: score for score in scores}
    gain = ""
    if chosen in by_name and UNBALANCED_METHOD in by_name and chosen != UNBALANCED_METHOD:
        before, after = by_name[UNBALANCED_METHOD], by_name[chosen]
        changes = [f"fill {before.fill:.3f} to {after.fill:.3f}"]
        pairs = {unit: (before.dist_ratio[unit], after.dist_ratio[unit]) for unit in units}
        changes += [f"dist {unit} {old:.4f} to {new:.4f}" for unit, (old, new) in pairs.items() if old or new]
        gain = f"From random batches to this recipe: {', '.join(changes)}. "
    note = (
        f"{gain}fill: LLM tokens over what groups could hold; dist: share of a step that a unit's replicas wait for "
        "the most loaded one (0 where there is one replica); max/mean: of all units' tokens together."
    )
    return head, rows, note
