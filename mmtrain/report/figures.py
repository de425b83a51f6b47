"""The figures of a report for papers: the plan, and one step over time."""

from mmtrain.report.drawing import Drawing
from mmtrain.report.plan_picture import plan_drawing
from mmtrain.report.report_contents import ReportContents, drawn_steps
from mmtrain.report.timeline_picture import timeline_drawing


def report_drawings(contents: ReportContents) -> list[tuple[str, Drawing]]:
    """Draw the plan and, for each step of the report, a timeline; return (caption, drawing) pairs."""
    plan = contents.plan
    caption = f"{contents.name}: {plan.placement} on {plan.world_size} x {plan.hardware}"
    drawings = [(caption, plan_drawing(plan))]
    steps, ranks = drawn_steps(contents)
    longest_us = max((step.length_us for step in steps), default=0.0)
    for step in steps:
        caption = f"{step.name}: {step.length_us / 1e3:.4g} ms"
        drawings.append((caption, timeline_drawing(step, tuple(plan.units), ranks, longest_us)))
    return drawings
