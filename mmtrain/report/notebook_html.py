"""Plans, simulated steps and runs as HTML for the output of a notebook's cell.

The style holds inside the output alone. A notebook chooses its own colors, so the output brings its ground with it.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mmtrain.costs import preset
from mmtrain.costs.hardware import GIB
from mmtrain.planning.artifact.plan import Plan
from mmtrain.program import Timeline
from mmtrain.report.comparison import RunTrace, comparison_rows
from mmtrain.report.drawing import LIGHT_COLORS
from mmtrain.report.html import (
    PART_STYLE,
    alternatives_html,
    comparison_html,
    key_figures_html,
    plan_html,
    timelines_html,
    training_html,
)
from mmtrain.report.plain_text import memory_text, seconds_text
from mmtrain.report.report_contents import ReportContents

_VARIABLES = "".join(f"--{name}:{value};" for name, value in LIGHT_COLORS.items())
# Nested, so that no rule reaches another output of the notebook.
_STYLE = (
    f"<style>.mmtrain-view{{{_VARIABLES}font:14px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--ground);"
    f"padding:8px 12px;max-width:1032px;{PART_STYLE}}}</style>"
)


def notebook_view(title: str, *parts: str) -> str:
    """Wrap parts of a page with the style that they need."""
    return f'{_STYLE}<div class="mmtrain-view"><p><b>{escape(title)}</b></p>{"".join(parts)}</div>'


def plan_view_html(plan: Plan) -> str:
    """Draw a plan: its predicted step, where every layer runs, and the alternatives."""
    predicted = plan.predicted
    title = (
        f"{plan.placement} on {plan.world_size} x {plan.hardware}: {seconds_text(predicted.step_time_s)} per step, "
        f"MFU {predicted.mfu:.1%}, peak memory {memory_text(max(predicted.peak_memory_gib.values()))} "
        f"({predicted.cost_source})"
    )
    alternatives = alternatives_html(plan)
    if alternatives:
        alternatives = f"<details><summary>{len(plan.alternatives)} alternatives</summary>{alternatives}</details>"
    return notebook_view(title, plan_html(plan), alternatives)


def steps_html(
    plan: Plan, timelines: Sequence[Timeline], trace: RunTrace | None, consequences: str | None = None
) -> str:
    """Draw simulated steps beside the recorded ones; `consequences`: of a fault, in sentences."""
    contents = ReportContents(
        name="",
        plan=plan,
        memory_limit_gib=preset(plan.hardware).memory_bytes / GIB,
        simulated=timelines,
        comparison=comparison_rows(timelines, trace),
        trace=trace,
    )
    fault = "" if consequences is None else f"<p>{escape(consequences)}</p>"
    parts = key_figures_html(contents), timelines_html(contents), comparison_html(contents), fault
    return notebook_view("Simulated step", *parts)


def run_html(title: str, metrics: Sequence[Mapping[str, Any]]) -> str:
    """Draw the curves of a run: loss, held-out loss, throughput and MFU over its steps."""
    return notebook_view(title, training_html(metrics))
