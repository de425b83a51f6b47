"""What differs between two plans, as text and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_difference import Measure, PlanDifference, Value, plan_differences
from mmtrain.report.plain_text import DEFAULT_WIDTH, memory_text, render_text, seconds_text


def difference_table(first: Plan, second: Plan, names: tuple[str, str], width: int = DEFAULT_WIDTH) -> str:
    """Write a row for each difference, then a sentence on steps and throughput; `names` head the columns."""
    differences = plan_differences(first, second)
    if not differences:
        return f"Both plans are the same, and were made with the same settings and costs: {names[0]}, {names[1]}.\n"
    table = Table(title="Differences", title_justify="left")
    for column in ("", "what", *names):
        table.add_column(column)
    part_before = None
    for difference in differences:
        ratio = "" if difference.ratio is None else f" ({difference.ratio:.2f}x)"
        texts = (_value_text(value, difference.measure) for value in (difference.first, difference.second))
        first_text, second_text = texts
        part = "" if difference.part == part_before else difference.part
        table.add_row(part, difference.what, first_text, second_text + ratio)
        part_before = difference.part
    return render_text(table, *_sentences(differences, names), width=width)


def difference_json(first: Plan, second: Plan, names: tuple[str, str]) -> dict[str, Any]:
    """Return the differences for JSON output."""
    differences = plan_differences(first, second)
    return {"first": names[0], "second": names[1], "differences": [asdict(difference) for difference in differences]}


def _sentences(differences: Sequence[PlanDifference], names: tuple[str, str]) -> Iterator[str]:
    by_what = {difference.what: difference for difference in differences}
    parts = {difference.part for difference in differences}
    if "layout" not in parts:
        yield "Layers, ranks and schedule are the same in both plans."
    step, tokens = by_what.get("step"), by_what.get("LLM tokens/s")
    if step is not None and step.ratio is not None:
        sentence = f"A step of {names[1]} is predicted to take {step.ratio:.2f}x the time"
        if tokens is not None and tokens.ratio is not None:
            sentence += f", and to train {tokens.ratio:.2f}x the LLM tokens/s"
        yield f"{sentence}."
    elif "predicted" not in parts:
        yield "The predictions are the same."
    if "costs" in by_what:
        yield "The plans were predicted with different costs, so part of the difference may come from these."
    if "fingerprint of the recipe" in by_what:
        yield "A plan does not record the settings of its recipe: make it again to see which settings differ."


def _value_text(value: Value, measure: Measure) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if measure and isinstance(value, int | float):
        return _NUMBER_TEXTS[measure](value)
    return f"{value:,g}" if isinstance(value, float) else str(value)


_NUMBER_TEXTS = {"s": seconds_text, "GiB": memory_text, "share": "{:.1%}".format, "tokens/s": "{:,.0f}".format}
