"""What differs between two runs: their settings and plans, what they measured, and their loss at the same steps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from mmtrain.costs.hardware import GIB
from mmtrain.planning.artifact.plan import Plan
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.base import flatten
from mmtrain.report.drawing import Drawing, Label, Mark, Polyline, svg, unit_color
from mmtrain.report.html import page_html, table_html
from mmtrain.report.plain_text import DEFAULT_WIDTH, memory_text, render_text, seconds_text
from mmtrain.report.plan_difference_table import difference_table
from mmtrain.report.report_contents import steady_medians
from mmtrain.report.timeline_picture import TIMELINE_MARGIN_PX, TIMELINE_WIDTH_PX

MAX_COMPARED_STEPS = 8  # of a table; the page draws all of them
CURVE_HEIGHT_PX = 200.0


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder says."""

    name: str
    recipe: Recipe
    plan: Plan
    metrics: Sequence[Mapping[str, Any]]  # logged steps, in order


@dataclass(frozen=True)
class ComparedFigure:
    """One figure of two runs; None where a run has logged none."""

    what: str
    unit: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        """The second figure over the first."""
        return self.second / self.first if self.first and self.second is not None else None

    def cells(self) -> tuple[str, str, str, str]:
        """Return the row of a table: the figure, both values, and their ratio."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}x"
        return self.what, _text(self.first, self.unit), _text(self.second, self.unit), ratio


def compared_figures(first: RunRecord, second: RunRecord) -> list[ComparedFigure]:
    """Return steps, losses, medians of a step and peak memory of both runs."""
    of_first, of_second = _figures(first), _figures(second)
    return [ComparedFigure(what, unit, of_first[what, unit], of_second[what, unit]) for what, unit in of_first]


def _figures(run: RunRecord) -> dict[tuple[str, str], float | None]:
    medians = steady_medians(run.metrics)
    peak_bytes = max((step.get("peak_memory_bytes") or 0 for step in run.metrics), default=0)
    held_out = [step["val_loss"] for step in run.metrics if step.get("val_loss") is not None]
    last: Mapping[str, Any] = run.metrics[-1] if run.metrics else {}
    return {
        ("steps", ""): last.get("step"),
        ("LLM tokens trained", ""): sum(step.get("tokens") or 0 for step in run.metrics) or None,
        ("last loss", ""): last.get("loss"),
        ("last held-out loss", ""): held_out[-1] if held_out else None,
        ("best held-out loss", ""): min(held_out, default=None),
        ("median step", "s"): medians.get("step_time_s"),
        ("predicted step", "s"): run.plan.predicted.step_time_s,
        ("LLM tokens/s", ""): medians.get("tokens_per_s"),
        ("MFU", "share"): medians.get("mfu"),
        ("peak memory", "GiB"): peak_bytes / GIB if peak_bytes else None,
    }


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    match unit:
        case "s":
            return seconds_text(value)
        case "GiB":
            return memory_text(value)
        case "share":
            return f"{value:.1%}"
        case _:
            return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def changed_settings(first: RunRecord, second: RunRecord) -> list[tuple[str, str, str]]:
    """Return the settings in which the recipes differ, without name and folder: dotted path, and both values."""
    of_first, of_second = (flatten(run.recipe.model_dump(mode="json")) for run in (first, second))
    return [
        (key, _setting_text(of_first, key), _setting_text(of_second, key))
        for key in dict.fromkeys((*of_first, *of_second))
        if of_first.get(key) != of_second.get(key) and key not in ("name", "run_dir")
    ]


def _setting_text(settings: Mapping[str, object], key: str) -> str:
    return str(settings[key]) if key in settings else "-"


def loss_rows(first: RunRecord, second: RunRecord) -> list[tuple[int, float, float]]:
    """Return the losses of steps that both runs logged: at most eight, evenly spaced, with the last one."""
    losses = [
        {step["step"]: step["loss"] for step in run.metrics if step.get("loss") is not None} for run in (first, second)
    ]
    shared = sorted(losses[0].keys() & losses[1].keys())
    count = min(len(shared), MAX_COMPARED_STEPS)
    chosen = [shared[(number + 1) * len(shared) // count - 1] for number in range(count)]
    return [(step, losses[0][step], losses[1][step]) for step in chosen]


def run_difference_text(first: RunRecord, second: RunRecord, width: int = DEFAULT_WIDTH) -> str:
    """Write tables of the settings, figures and losses that differ, then how the plans differ."""
    names = first.name, second.name
    parts: list[RenderableType] = []
    settings = changed_settings(first, second)
    if settings:
        parts += [_table("Settings", ("setting", *names), settings), ""]
    else:
        parts += ["Both runs have the same settings.", ""]
    parts += [
        _table("Figures", ("", *names, "ratio"), [figure.cells() for figure in compared_figures(first, second)]),
        "",
    ]
    rows = [(f"{step:,}", f"{one:.4f}", f"{other:.4f}") for step, one, other in loss_rows(first, second)]
    if rows:
        parts += [_table("Loss at the same steps", ("step", *names), rows), ""]
    else:
        parts += ["The runs logged no step in common.", ""]
    return render_text(*parts, width=width) + _plans_text(first, second, width)


def _plans_text(first: RunRecord, second: RunRecord, width: int) -> str:
    if first.plan == second.plan:
        return "Both runs have the same plan.\n"
    return difference_table(first.plan, second.plan, (f"plan of {first.name}", f"plan of {second.name}"), width)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(head):
        table.add_column(column, justify="left" if not number else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def run_difference_json(first: RunRecord, second: RunRecord) -> dict[str, Any]:
    """Return settings, figures and losses of both runs for JSON output."""
    return {
        "first": first.name,
        "second": second.name,
        "settings": [
            {"setting": key, "first": one, "second": other} for key, one, other in changed_settings(first, second)
        ],
        "figures": [
            {"what": figure.what, "unit": figure.unit, "first": figure.first, "second": figure.second}
            for figure in compared_figures(first, second)
        ],
        "losses": [{"step": step, "first": one, "second": other} for step, one, other in loss_rows(first, second)],
        "same_plan": first.plan == second.plan,
    }


def run_difference_html(first: RunRecord, second: RunRecord) -> str:
    """Write a page: curves of both runs in one picture each, then the tables of the text."""
    names = first.name, second.name
    legend = " ".join(
        f'<b class="{unit_color(name, _keys())}">■</b> {escape(run)}' for name, run in zip(_keys(), names, strict=True)
    )
    body = f"<p>{legend}</p>" + "".join(_curves(first, second))
    figures = [figure.cells() for figure in compared_figures(first, second)]
    body += f"<h2>Figures</h2>{table_html(('', *names, 'ratio'), figures)}"
    settings = changed_settings(first, second)
    body += f"<h2>Settings</h2>{table_html(('setting', *names), settings) if settings else '<p>The same.</p>'}"
    body += f"<h2>Plans</h2><pre>{escape(_plans_text(first, second, DEFAULT_WIDTH))}</pre>"
    return page_html(f"{names[0]} and {names[1]}", body)


def _keys() -> tuple[str, str]:
    return "first", "second"


def _curves(first: RunRecord, second: RunRecord) -> Iterator[str]:
    for key, title in (("loss", "Loss"), ("val_loss", "Held-out loss"), ("tokens_per_s", "LLM tokens/s")):
        curves = [
            [(step["step"], step[key]) for step in run.metrics if step.get(key) is not None] for run in (first, second)
        ]
        if any(len(curve) > 1 for curve in curves):
            yield f"<h2>{title}</h2>{svg(paired_curves(curves, title))}"


def paired_curves(curves: Sequence[Sequence[tuple[float, float]]], what: str) -> Drawing:
    """Draw the curves of two runs over one axis of steps; one of them may be empty."""
    points = [point for curve in curves for point in curve]
    first_step, last_step = min(step for step, _ in points), max(step for step, _ in points)
    lo, hi = min(value for _, value in points), max(value for _, value in points)
    width = TIMELINE_WIDTH_PX - 10
    marks: list[Mark] = [Polyline(((TIMELINE_MARGIN_PX, y), (width, y)), "line") for y in (10.0, CURVE_HEIGHT_PX)]
    for name, curve in zip(_keys(), curves, strict=True):
        line = tuple(
            (
                TIMELINE_MARGIN_PX
                + (width - TIMELINE_MARGIN_PX) * (step - first_step) / max(last_step - first_step, 1),
                CURVE_HEIGHT_PX - (CURVE_HEIGHT_PX - 10) * (value - lo) / ((hi - lo) or 1),
            )
            for step, value in curve
        )
        if line:
            marks.append(Polyline(line, unit_color(name, _keys()), 2))
    marks += [
        Label(0, 14, f"{hi:.4g}"),
        Label(0, CURVE_HEIGHT_PX + 4, f"{lo:.4g}"),
        Label(TIMELINE_MARGIN_PX, CURVE_HEIGHT_PX + 22, f"step {first_step:.0f}"),
        Label(width, CURVE_HEIGHT_PX + 22, f"step {last_step:.0f}", "end"),
    ]
    description = f"{what} of two runs from step {first_step:.0f} to {last_step:.0f}"
    return Drawing(TIMELINE_WIDTH_PX, CURVE_HEIGHT_PX + 30, description, tuple(marks))
