"""The rows of a report's tables as text, shared by the HTML page and the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmtrain.balance.grouping.summary import GroupingScore
from mmtrain.costs.hardware import GIB
from mmtrain.report.comparison import MAX_CRITICAL_PATH_ROWS, critical_path_rows
from mmtrain.report.metrics_record import compact_number
from mmtrain.report.plain_text import memory_text, seconds_text
from mmtrain.report.report_contents import KeyFigure, ReportContents

MAX_MEMORY_ROWS = 16
MIN_FULL_BAR_SHARE = 0.01  # idle time: the longest bar stands for at least this share, so small shares look small
UNBALANCED_METHOD = "random"  # the grouping method that does not balance


def figure_text(figure: KeyFigure, measured: bool) -> str:
    """Write the measured or predicted value with its unit: `97.1 ms`, `41.2 %`."""
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


def critical_path_cells(contents: ReportContents) -> list[tuple[list[str], float]]:
    """Return for each kind of work on the simulated critical path the cells (work, time, share), and the share."""
    rows = [(row.what, row.seconds) for row in critical_path_rows(contents.simulated)]
    total_s = sum(seconds for _, seconds in rows)
    if not total_s:
        return []
    other_rows = rows[MAX_CRITICAL_PATH_ROWS:]
    rows = rows[:MAX_CRITICAL_PATH_ROWS]
    if other_rows:
        rows.append((f"{len(other_rows)} others", sum(seconds for _, seconds in other_rows)))
    return [([what, seconds_text(s), f"{s / total_s:.1%}"], s / total_s) for what, s in rows]


@dataclass(frozen=True)
class MemoryRow:
    """Peak memory in GiB: predicted for a group of ranks (by kind, if known), or measured on the fullest rank."""

    what: str
    gib: float
    kinds: Mapping[str, float]

    @property
    def largest_part(self) -> str:
        """The kind that takes most memory, and its share."""
        if not self.kinds:
            return "-"
        kind = max(self.kinds, key=lambda name: self.kinds[name])
        return f"{kind} {self.kinds[kind] / self.gib:.0%}" if self.gib else kind


def memory_rows(contents: ReportContents) -> list[MemoryRow]:
    """Return a row for each group of ranks, the fullest ones if there are many, and one for the measured peak."""
    predicted = contents.plan.predicted
    rows = [
        MemoryRow(f"rank{'s' * ('-' in ranks)} {ranks}", gib, predicted.memory_kinds_gib.get(ranks, {}))
        for ranks, gib in predicted.peak_memory_gib.items()
    ]
    if len(rows) > MAX_MEMORY_ROWS:
        rows = sorted(rows, key=lambda row: -row.gib)[:MAX_MEMORY_ROWS]
    measured_bytes = max((m["peak_memory_bytes"] for m in contents.metrics or ()), default=None)
    if measured_bytes is not None:
        what = "process" if contents.plan.hardware == "cpu-core" else "fullest rank"
        rows.append(MemoryRow(f"measured, {what}", measured_bytes / GIB, {}))
    reserved_bytes = max((m.get("peak_reserved_bytes") or 0 for m in contents.metrics or ()), default=0)
    if reserved_bytes:
        rows.append(MemoryRow("measured, with the allocator's gaps", reserved_bytes / GIB, {}))
    return rows


def balance_rows(scores: Sequence[GroupingScore], chosen: str) -> tuple[list[str], list[list[str]], str]:
    """Return headings and a row per grouping method, and a note on the gain of the `chosen` one over random batches."""
    units = list(scores[0].dist_ratio)
    head = ["grouping", "fill", *(f"dist {unit}" for unit in units), "max/mean"]
    rows = []
    for score in scores:
        name = f"{score.method} (this recipe)" if score.method == chosen else score.method
        dist_ratios = (f"{score.dist_ratio[unit]:.4f}" for unit in units)
        rows.append([name, f"{score.fill:.3f}", *dist_ratios, f"{score.max_over_mean:.4f}"])
    note = (
        f"{_gain_over_random(scores, chosen)}fill: LLM tokens as a share of what the groups can hold; dist: share of a "
        "step for which a unit's replicas wait for the most loaded one (0 with one replica); max/mean: largest over "
        "mean load, counting the tokens of all units."
    )
    return head, rows, note


def _gain_over_random(scores: Sequence[GroupingScore], chosen: str) -> str:
    """Write what the chosen grouping changes against random batches; empty if one of the two is missing."""
    score_of = {score.method: score for score in scores}
    if chosen == UNBALANCED_METHOD or chosen not in score_of or UNBALANCED_METHOD not in score_of:
        return ""
    before = score_of[UNBALANCED_METHOD]
    after = score_of[chosen]
    changes = [f"fill {before.fill:.3f} to {after.fill:.3f}"]
    for unit, dist_before in before.dist_ratio.items():
        dist_after = after.dist_ratio[unit]
        if dist_before or dist_after:
            changes.append(f"dist {unit} {dist_before:.4f} to {dist_after:.4f}")
    return f"From random batches to this recipe: {', '.join(changes)}. "
