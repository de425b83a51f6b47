"""What more GPUs bring: the best plan for each number of them, side by side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from mmtrain.plan.artifact.layout import Layout
from mmtrain.plan.artifact.plan import Plan
from mmtrain.report.plain_text import DEFAULT_WIDTH, render_text, seconds_text

MIN_ADDED_SHARE = 0.5  # of what a GPU of the smallest cluster does that one more must add


@dataclass(frozen=True)
class ScalingPoint:
    """The best plan for a number of GPUs, or the reason that there is none."""

    gpus: int
    plan: Plan | None
    reason: str


@dataclass(frozen=True)
class ScalingRow:
    """One number of GPUs beside the smallest of the sweep that has a plan."""

    gpus: int
    plan: Plan
    tokens_per_s: float
    efficiency: float  # tokens/s of a GPU over those of a GPU in the smallest
    added: float | None  # tokens/s that each GPU more than in the row before adds, over those of one in the smallest


def scaling_rows(found: Sequence[ScalingPoint]) -> list[ScalingRow]:
    """Rows for the numbers that have a plan, in rising order."""
    rows: list[ScalingRow] = []
    for gpus, plan in ((one.gpus, one.plan) for one in sorted(found, key=lambda one: one.gpus)):
        if plan is None:
            continue
        total = plan.predicted.tokens_per_s_per_gpu * plan.world_size
        base = rows[0].tokens_per_s / rows[0].gpus if rows else total / gpus
        added = (total - rows[-1].tokens_per_s) / (gpus - rows[-1].gpus) / base if rows else None
        rows.append(ScalingRow(gpus, plan, total, total / gpus / base, added))
    return rows


def scaling_verdict(rows: Sequence[ScalingRow]) -> str:
    """The sentence below the table. A number that adds little is passed over where a larger one pays."""
    if len(rows) < 2:
        return "One number of GPUs shows no scaling."
    paying = [rows[0]]
    for row in rows[1:]:
        more = (row.tokens_per_s - paying[-1].tokens_per_s) / (row.gpus - paying[-1].gpus)
        if more >= MIN_ADDED_SHARE * rows[0].tokens_per_s / rows[0].gpus:
            paying.append(row)
    most = paying[-1]
    passed = ", ".join(str(row.gpus) for row in rows if row.gpus < most.gpus and row not in paying)
    told = f"{most.gpus} GPUs pay, {passed} do not. " if passed else ""
    after = next((row for row in rows if row.gpus > most.gpus), None)
    if after is None:
        return told.strip() or "Every step of this sweep pays."
    return (
        f"{told}More than {most.gpus} GPUs do not pay: each of the next {after.gpus - most.gpus} adds "
        f"{max(after.added or 0.0, 0.0):.0%} of what one of the first {rows[0].gpus} does."
    )


def scaling_table(found: Sequence[ScalingPoint], width: int = DEFAULT_WIDTH) -> str:
    """The sweep as text `width` columns wide; numbers without a plan with the reason's first sentence."""
    table = Table(title="Scaling of the same global batch", title_justify="left")
    for column in ("GPUs", "plan", "step", "MFU", "tokens/s/GPU", "efficiency", "added"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    rows = {row.gpus: row for row in scaling_rows(found)}
    for one in sorted(found, key=lambda one: one.gpus):
        if one.gpus not in rows:
            table.add_row(
                str(one.gpus), f"none: {one.reason.splitlines()[0].partition('. ')[0].rstrip('.')}", *["-"] * 5
            )
            continue
        row, p = rows[one.gpus], rows[one.gpus].plan.predicted
        added = "" if row.added is None else f"{row.added:.0%}"
        figures = (seconds_text(p.step_time_s), f"{p.mfu:.1%}", f"{row.tokens_per_s / row.gpus:,.0f}")
        table.add_row(str(row.gpus), layout_text(row.plan), *figures, f"{row.efficiency:.0%}", added)
    sources = sorted({row.plan.predicted.cost_source for row in rows.values()})
    without = next((f" `--set cluster.ranks={one.gpus}` tells more." for one in found if one.plan is None), "")
    told = f"{scaling_verdict(list(rows.values()))} Predicted ({', '.join(sources)}).{without}"
    return render_text(table, told, width=width)


def layout_text(plan: Plan) -> str:
    """A plan in one line, as in the ranking: `disaggregated: vision tp1 pp1 dp8, llm tp4 pp2 vpp3 dp8`."""
    return Layout(plan.placement, plan.units, plan.schedule.num_microbatches).summary


def scaling_json(found: Sequence[ScalingPoint]) -> Iterator[dict[str, Any]]:
    """One mapping for each number of GPUs."""
    rows = {row.gpus: row for row in scaling_rows(found)}
    for one in found:
        row = rows.get(one.gpus)
        if row is None:
            yield {"gpus": one.gpus, "plan": None, "reason": one.reason}
            continue
        yield {
            "gpus": row.gpus,
            "step_time_s": row.plan.predicted.step_time_s,
            "mfu": row.plan.predicted.mfu,
            "tokens_per_s_per_gpu": row.tokens_per_s / row.gpus,
            "efficiency": row.efficiency,
            "added": row.added,
            "plan": row.plan.model_dump(mode="json"),
        }
