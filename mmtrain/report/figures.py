"""The drawings of a report that papers want: the plan, and its step."""

from mmtrain.report.drawing import Drawing
from mmtrain.report.plan_picture import plan_drawing
from mmtrain.report.report_contents import ReportContents, drawn_steps
from mmtrain.report.timeline_picture import timeline_drawing


def report_drawings(contents: ReportContents) -> list[tuple[str, Drawing]]:
    """Each with its caption."""
    plan = contents.plan
    found = [(f"{contents.name}: {plan.placement} on {plan.world_size} x {plan.hardware}", plan_drawing(plan))]
    drawn, ranks = drawn_steps(contents)
    longest = max((step.length_us for step in drawn), default=0.0)
    for step in drawn:
        caption = f"{step.name}: {step.length_us / 1e3:.4g} ms"
        found.append((caption, timeline_drawing(step, tuple(plan.units), ranks, longest)))
    return found
