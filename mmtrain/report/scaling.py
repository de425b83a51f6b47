"""Compare the best plans for several numbers of GPUs with the same global batch, and choose one within a limit."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from mmtrain.errors import PlanError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_change import plan_layout
from mmtrain.recipe.settings.parallel_settings import ClusterSettings
from mmtrain.report.plain_text import DEFAULT_WIDTH, render_text, seconds_text
from mmtrain.report.run_cost import RunCost, number_text

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


@dataclass(frozen=True)
class LimitedRun:
    """All steps of a recipe on one of several numbers of GPUs, and what they may take. None: no such limit."""

    num_steps: int
    cluster: ClusterSettings  # its price
    max_days: float | None = None
    max_money: float | None = None  # in the currency of the price

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit at all."""
        return self.max_days is not None or self.max_money is not None

    @property
    def limits_text(self) -> str:
        """The limits in words: `within 7 days and for at most 20,000`."""
        days = None if self.max_days is None else f"within {self.max_days:g} days"
        money = None if self.max_money is None else f"for at most {self.max_money:,.10g}"
        return " and ".join(limit for limit in (days, money) if limit is not None)

    def cost(self, row: "ScalingRow") -> RunCost:
        """Return the cost of all steps; GPUs that the plan does not use count."""
        run_s = self.num_steps * row.plan.predicted.step_time_s
        return RunCost.of_seconds(self.cluster, self.num_steps, run_s, row.gpus)

    def meets_days(self, row: "ScalingRow") -> bool:
        """Return whether the steps end in time."""
        return self.max_days is None or self.cost(row).days <= self.max_days

    def meets_money(self, row: "ScalingRow") -> bool:
        """Return whether the steps cost little enough."""
        money = self.cost(row).money
        return self.max_money is None or (money is not None and money <= self.max_money)


def choose_size(rows: Sequence[ScalingRow], run: LimitedRun) -> ScalingRow | None:
    """Return the cheapest number of GPUs that ends in time or, without a limit on days, the fastest for the money.

    None: no number meets the limits, or there are none.
    """
    within = [row for row in rows if run.meets_days(row) and run.meets_money(row)]
    if not within or not run.is_limited:
        return None
    return _cheapest(within, run) if run.max_days is not None else _fastest(within, run)


def choice_text(rows: Sequence[ScalingRow], run: LimitedRun) -> str:
    """Write which number of GPUs is chosen within the limits and why, and what its neighbours would take and cost.

    Raises:
        PlanError: no number meets the limits; names the nearest.
    """
    chosen = choose_size(rows, run)
    if chosen is None:
        raise PlanError(_explain_no_size(rows, run))
    kind = "cheapest" if run.max_days is not None else "fastest"
    sentences = [
        f"Chosen: {_size_text(chosen, run)}, the {kind} of these numbers that runs {run.num_steps:,} steps "
        f"{run.limits_text}."
    ]
    place = rows.index(chosen)
    neighbors = [*rows[max(place - 1, 0) : place], *rows[place + 1 : place + 2]]
    if neighbors:
        sentences.append(f"Its neighbors: {'; '.join(_size_text(row, run) for row in neighbors)}.")
    return " ".join(sentences)


def _cheapest(rows: Sequence[ScalingRow], run: LimitedRun) -> ScalingRow:
    return min(rows, key=lambda row: (run.cost(row).gpu_hours, row.gpus))


def _fastest(rows: Sequence[ScalingRow], run: LimitedRun) -> ScalingRow:
    return min(rows, key=lambda row: (run.cost(row).hours, row.gpus))


def _explain_no_size(rows: Sequence[ScalingRow], run: LimitedRun) -> str:
    """Name the sizes that miss the limits by least."""
    in_time = [row for row in rows if run.meets_days(row)]
    for_money = [row for row in rows if run.meets_money(row)]
    nearest: list[tuple[str, ScalingRow]] = []
    if in_time and for_money:
        nearest += [("cheapest in time", _cheapest(in_time, run)), ("fastest for the money", _fastest(for_money, run))]
    if not in_time:
        nearest.append(("fastest", _fastest(rows, run)))
    if not for_money:
        nearest.append(("cheapest", _cheapest(rows, run)))
    nearest_text = "; ".join(f"{_size_text(row, run)}, the {kind}" for kind, row in nearest)
    return (
        f"none of {', '.join(str(row.gpus) for row in rows)} GPUs runs {run.num_steps:,} steps {run.limits_text}: "
        f"nearest: {nearest_text}. Raise the limit, lower train.steps, or try other numbers with --gpus"
    )


def _size_text(row: ScalingRow, run: LimitedRun) -> str:
    """Write `64 GPUs take 6.2 days (9,520 GPU-hours, 23,800 in money)`."""
    cost = run.cost(row)
    verb = "GPU takes" if row.gpus == 1 else "GPUs take"
    money = "" if cost.money is None else f", {number_text(cost.money)} in money"
    return f"{row.gpus} {verb} {_days_text(cost)} ({number_text(cost.gpu_hours)} GPU-hours{money})"


def _days_text(cost: RunCost) -> str:
    return f"{cost.days:.3g} days" if cost.days >= 1 else f"{cost.hours:.3g} h"


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


def scaling_table(points: Sequence[ScalingPoint], width: int = DEFAULT_WIDTH, run: LimitedRun | None = None) -> str:
    """Write the comparison as text `width` columns wide; a number without a plan shows why, in one sentence.

    run: also show what all steps take and cost.
    """
    table = Table(title="Scaling with the same global batch", title_justify="left")
    of_run = () if run is None else ("run", "GPU-hours", *(("money",) if run.cluster.price_per_gpu_hour else ()))
    columns = ("GPUs", "plan", "step", "MFU", "tokens/s/GPU", "efficiency", "added", *of_run)
    for column in columns:
        table.add_column(column, justify="left" if column == "plan" else "right")
    rows = {row.gpus: row for row in scaling_rows(points)}
    for point in sorted(points, key=lambda point: point.gpus):
        row = rows.get(point.gpus)
        if row is None:
            reason = point.reason.splitlines()[0].partition(". ")[0].rstrip(".")
            table.add_row(str(point.gpus), f"none: {reason}", *["-"] * (len(columns) - 2))
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
            *(() if run is None else _cost_cells(run.cost(row))),
        )
    sources = sorted({row.plan.predicted.cost_source for row in rows.values()})
    sentences = [
        scaling_verdict(list(rows.values())),
        "efficiency: tokens/s per GPU relative to the first row; added: tokens/s that each GPU adds to the row above, "
        "relative to a GPU of the first row.",
        f"Predicted ({', '.join(sources)}).",
    ]
    if run is not None:
        sentences.append(f"run: {run.num_steps:,} steps, without starts, checkpoints and validation.")
    missing = next((point.gpus for point in points if point.plan is None), None)
    if missing is not None:
        sentences.append(f"`--set cluster.ranks={missing}` without --gpus explains what does not fit.")
    return render_text(table, *sentences, width=width)


def _cost_cells(cost: RunCost) -> tuple[str, ...]:
    money = () if cost.money is None else (number_text(cost.money),)
    return _days_text(cost), number_text(cost.gpu_hours), *money


def layout_text(plan: Plan) -> str:
    """Write a plan in one line: `disaggregated: vision tp1 pp1 dp8, llm tp4 pp2 vpp3 dp8`."""
    return plan_layout(plan).summary


def scaling_json(points: Sequence[ScalingPoint], run: LimitedRun | None = None) -> Iterator[dict[str, Any]]:
    """Yield one JSON object for each number of GPUs.

    run: also state what all steps take and cost and, if that has limits, which number is chosen.
    """
    rows = {row.gpus: row for row in scaling_rows(points)}
    chosen = None if run is None else choose_size(list(rows.values()), run)
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
            **({} if run is None else {"cost": asdict(run.cost(row))}),
            **({"chosen": row is chosen} if run is not None and run.is_limited else {}),
            "plan": row.plan.model_dump(mode="json"),
        }
