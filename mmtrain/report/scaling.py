"""Compare the best plans for several numbers of GPUs with the same global batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from mmtrain.planning.artifact.layout import Layout
from mmtrain.planning.artifact.plan import Plan
from mmtrain.report.plain_text import DEFAULT_WIDTH, render_text, seconds_text

# An added GPU is worthwhile if it adds at least this share of the throughput of a GPU in the smallest cluster.
MIN_ADDED_SHARE = 0.5


@dataclass(frozen=True)
class ScalingPoint:
    """The best plan for a number of GPUs, or the reason why there is none."""

    gpus: int
    plan: Plan | None
    reason: str


@dataclass(frozen=True)
class ScalingRow:
    """A number of GPUs, compared with the smallest number that has a plan."""

    gpus: int
    plan: Plan
    tokens_per_s: float
    efficiency: float  # tokens/s per GPU, relative to the smallest number
    added: float | None  # tokens/s that each GPU adds to the row before, relative to a GPU of the smallest number


def scaling_rows(points: Sequence[ScalingPoint]) -> list[ScalingRow]:
    """Return a row for each number of GPUs that has a plan, ascending."""
    rows: list[ScalingRow] = []
    for point in sorted(points, key=lambda point: point.gpus):
        if point.plan is None:
            continue
        tokens_per_s = point.plan.predicted.tokens_per_s_per_gpu * point.plan.world_size
        base = rows[0].tokens_per_s / rows[0].gpus if rows else tokens_per_s / point.gpus
        added = None
        if rows:
            added = (tokens_per_s - rows[-1].tokens_per_s) / (point.gpus - rows[-1].gpus) / base
        rows.append(ScalingRow(point.gpus, point.plan, tokens_per_s, tokens_per_s / point.gpus / base, added))
    return rows


def scaling_verdict(rows: Sequence[ScalingRow]) -> str:
    """Write which number of GPUs is the largest worthwhile one.

    A number that adds little is passed over if a larger one is worthwhile: numbers that divide badly make dips.
    """
    if len(rows) < 2:
        return "A single number of GPUs shows no scaling."
    min_tokens_per_gpu = MIN_ADDED_SHARE * rows[0].tokens_per_s / rows[0].gpus
    worthwhile = [rows[0]]
    for row in rows[1:]:
        added_gpus = row.gpus - worthwhile[-1].gpus
        if (row.tokens_per_s - worthwhile[-1].tokens_per_s) / added_gpus >= min_tokens_per_gpu:
            worthwhile.append(row)
    largest = worthwhile[-1]
    passed_over = [str(row.gpus) for row in rows if row.gpus < largest.gpus and row not in worthwhile]
    next_row = next((row for row in rows if row.gpus > largest.gpus), None)
    sentences = []
    if passed_over:
        sentences.append(f"{largest.gpus} GPUs are worthwhile, {', '.join(passed_over)} are not.")
    if next_row is not None:
        sentences.append(
            f"More than {largest.gpus} GPUs are not worthwhile: each of the next {next_row.gpus - largest.gpus} adds "
            f"{max(next_row.added or 0.0, 0.0):.0%} of the throughput of one of the first {rows[0].gpus}."
        )
    if not sentences:
        sentences.append(
            f"All of these sizes are worthwhile: each added GPU brings at least {MIN_ADDED_SHARE:.0%} of the "
            f"throughput of one of the first {rows[0].gpus}."
        )
    return " ".join(sentences)


def scaling_table(points: Sequence[ScalingPoint], width: int = DEFAULT_WIDTH) -> str:
    """Write the comparison as text `width` columns wide; a number without a plan shows why, in one sentence."""
    table = Table(title="Scaling with the same global batch", title_justify="left")
    for column in ("GPUs", "plan", "step", "MFU", "tokens/s/GPU", "efficiency", "added"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    rows = {row.gpus: row for row in scaling_rows(points)}
    for point in sorted(points, key=lambda point: point.gpus):
        row = rows.get(point.gpus)
        if row is None:
            reason = point.reason.splitlines()[0].partition(". ")[0].rstrip(".")
            table.add_row(str(point.gpus), f"none: {reason}", *["-"] * 5)
            continue
        predicted = row.plan.predicted
        table.add_row(
            str(row.gpus),
            layout_text(row.plan),
            seconds_text(predicted.step_time_s),
            f"{predicted.mfu:.1%}",
            f"{row.tokens_per_s / row.gpus:,.0f}",
            f"{row.efficiency:.0%}",
            "" if row.added is None else f"{row.added:.0%}",
        )
    sources = sorted({row.plan.predicted.cost_source for row in rows.values()})
    sentences = [
        scaling_verdict(list(rows.values())),
        "efficiency: tokens/s per GPU relative to the first row; added: tokens/s that each GPU adds to the row above, "
        "relative to a GPU of the first row.",
        f"Predicted ({', '.join(sources)}).",
    ]
    missing = next((point.gpus for point in points if point.plan is None), None)
    if missing is not None:
        sentences.append(f"`--set cluster.ranks={missing}` without --gpus explains what does not fit.")
    return render_text(table, *sentences, width=width)


def layout_text(plan: Plan) -> str:
    """Write a plan in one line: `disaggregated: vision tp1 pp1 dp8, llm tp4 pp2 vpp3 dp8`."""
    is_encoder_first = plan.schedule.kind == "encoder_first"
    return Layout(plan.placement, plan.units, plan.schedule.num_microbatches, is_encoder_first).summary


def scaling_json(points: Sequence[ScalingPoint]) -> Iterator[dict[str, Any]]:
    """Yield one JSON object for each number of GPUs."""
    rows = {row.gpus: row for row in scaling_rows(points)}
    for point in points:
        row = rows.get(point.gpus)
        if row is None:
            yield {"gpus": point.gpus, "plan": None, "reason": point.reason}
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
