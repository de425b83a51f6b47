"""The figures of a report for papers: the plan, and one step over time; as PNG at 300 dots per inch, PDF or SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.errors import UserError, writing
from mmtrain.report.drawing import LIGHT_COLORS, OUTLINED_OPACITY, Box, Drawing, Label, Mark, Polyline, arrow_head
from mmtrain.report.plain_text import exact_time_text
from mmtrain.report.plan_picture import plan_drawing
from mmtrain.report.report_contents import ReportContents, drawn_steps
from mmtrain.report.timeline_picture import timeline_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE_FILE_SUFFIXES = (".png", ".pdf", ".svg")
_WIDTH_INCHES = 7.0  # the text width of a page in two columns
_DPI = 300
_CAPTION_HEIGHT_PX = 20.0
_GAP_PX = 14.0
_FONT_SCALE = 0.92  # matplotlib's letters are wider than a browser's


def save_drawings(drawings: Sequence[tuple[str, Drawing]], path: Path) -> None:
    """Draw the drawings below each other with their captions; the suffix of `path` sets the format.

    Raises:
        UserError: matplotlib is missing, the suffix is unknown, or the file cannot be written.
    """
    if path.suffix.lower() not in FIGURE_FILE_SUFFIXES:
        raise UserError(f"--png {path}: found suffix `{path.suffix}`, allowed: {', '.join(FIGURE_FILE_SUFFIXES)}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "--png needs the `matplotlib` package, which is not installed here: pip install 'mmtrain[report]'"
        ) from None
    width = max(drawing.width for _, drawing in drawings)
    height = sum(_CAPTION_HEIGHT_PX + drawing.height + _GAP_PX for _, drawing in drawings)
    inches_per_px = _WIDTH_INCHES / width
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "path"}):  # keeps text in a PDF editable
        figure = Figure(figsize=(_WIDTH_INCHES, height * inches_per_px), facecolor=LIGHT_COLORS["ground"])
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        top = 0.0
        for caption, drawing in drawings:
            _label(axes, Label(0, 14, caption, color="ink", size=13, bold=True), top, inches_per_px)
            for mark in drawing.marks:
                _mark(axes, mark, top + _CAPTION_HEIGHT_PX, inches_per_px)
            top += _CAPTION_HEIGHT_PX + drawing.height + _GAP_PX
        with writing("--png", path, "figure"):
            figure.savefig(path, dpi=_DPI, bbox_inches="tight", pad_inches=0.05)


def _mark(axes: "Axes", mark: Mark, top: float, inches_per_px: float) -> None:
    from matplotlib.patches import Polygon, Rectangle

    match mark:
        case Box():
            color = LIGHT_COLORS[mark.color]
            opacity = OUTLINED_OPACITY if mark.outlined else mark.opacity
            axes.add_patch(
                Rectangle(
                    (mark.x, top + mark.y),
                    max(mark.width, 0.0),
                    mark.height,
                    facecolor=(color, opacity),
                    edgecolor=color if mark.outlined else "none",
                    linewidth=72 * inches_per_px,
                    zorder=2,
                )
            )
        case Polyline():
            xs, ys = zip(*mark.points, strict=True)
            axes.plot(
                xs,
                [top + y for y in ys],
                color=LIGHT_COLORS[mark.color],
                linewidth=72 * inches_per_px * mark.width,
                zorder=1,
            )
            if mark.arrow:
                corners = [(x, top + y) for x, y in arrow_head(mark)]
                axes.add_patch(Polygon(corners, facecolor=LIGHT_COLORS[mark.color], edgecolor="none", zorder=2))
        case Label():
            _label(axes, mark, top, inches_per_px)


def _label(axes: "Axes", label: Label, top: float, inches_per_px: float) -> None:
    axes.text(
        label.x,
        top + label.y,
        label.text,
        fontsize=72 * inches_per_px * label.size * _FONT_SCALE,
        color=LIGHT_COLORS[label.color],
        ha={"start": "left", "middle": "center", "end": "right"}[label.anchor],
        va="baseline",
        fontweight="bold" if label.bold else "normal",
        parse_math=False,
        zorder=3,
    )


def report_drawings(contents: ReportContents) -> list[tuple[str, Drawing]]:
    """Draw the plan and, for each step of the report, a timeline; return (caption, drawing) pairs."""
    plan = contents.plan
    caption = f"{contents.name}: {plan.placement} on {plan.world_size} x {plan.hardware}"
    drawings = [(caption, plan_drawing(plan))]
    steps, ranks = drawn_steps(contents)
    longest_us = max((step.length_us for step in steps), default=0.0)
    for step in steps:
        caption = f"{step.name}: {exact_time_text(step.length_us / 1e6)}"
        drawings.append((caption, timeline_drawing(step, tuple(plan.units), ranks, longest_us)))
    return drawings
