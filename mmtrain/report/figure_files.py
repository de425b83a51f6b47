"""Drawings as a file for papers: PNG at 300 dots an inch, or vectors as PDF or SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.errors import UserError, writing
from mmtrain.report.drawing import LIGHT_COLORS, Box, Drawing, Label, Mark, Polyline, arrow_head

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE_FILE_SUFFIXES = (".png", ".pdf", ".svg")
_INCHES, _DPI = 7.0, 300  # the text width of a page in two columns
_CAPTION, _GAP = 20.0, 14.0
_OUTLINED_OPACITY = 0.12


def save_drawings(drawings: Sequence[tuple[str, Drawing]], path: Path) -> None:
    """Draw these under each other, each with its caption, as wide as a page; the ending of `path` says the format.

    Raises:
        UserError: matplotlib is missing, the ending is unknown, or the file cannot be written.
    """
    if path.suffix.lower() not in FIGURE_FILE_SUFFIXES:
        raise UserError(f"--png {path}: a picture ends in {', '.join(FIGURE_FILE_SUFFIXES)}, this in `{path.suffix}`")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "--png needs the `matplotlib` package, which is not installed here: pip install 'mmtrain[report]'"
        ) from None
    width = max(drawing.width for _, drawing in drawings)
    height = sum(_CAPTION + drawing.height + _GAP for _, drawing in drawings)
    inch = _INCHES / width
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "path"}):  # text in a PDF stays text that editors know
        figure = Figure(figsize=(_INCHES, height * inch), facecolor=LIGHT_COLORS["ground"])
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        top = 0.0
        for caption, drawing in drawings:
            _label(axes, Label(0, 14, caption, color="ink", size=13, bold=True), top, inch)
            for mark in drawing.marks:
                _mark(axes, mark, top + _CAPTION, inch)
            top += _CAPTION + drawing.height + _GAP
        with writing("--png", path, "picture"):
            figure.savefig(path, dpi=_DPI, bbox_inches="tight", pad_inches=0.05)


def _mark(axes: "Axes", mark: Mark, top: float, inch: float) -> None:
    from matplotlib.patches import Polygon, Rectangle

    match mark:
        case Box():
            colour = LIGHT_COLORS[mark.color]
            strength = _OUTLINED_OPACITY if mark.outlined else mark.opacity
            axes.add_patch(
                Rectangle(
                    (mark.x, top + mark.y),
                    max(mark.width, 0.0),
                    mark.height,
                    facecolor=(colour, strength),
                    edgecolor=colour if mark.outlined else "none",
                    linewidth=72 * inch,
                    zorder=2,
                )
            )
        case Polyline():
            xs, ys = zip(*mark.points, strict=True)
            axes.plot(
                xs, [top + y for y in ys], color=LIGHT_COLORS[mark.color], linewidth=72 * inch * mark.width, zorder=1
            )
            if mark.arrow:
                corners = [(x, top + y) for x, y in arrow_head(mark)]
                axes.add_patch(Polygon(corners, facecolor=LIGHT_COLORS[mark.color], edgecolor="none", zorder=2))
        case Label():
            _label(axes, mark, top, inch)


def _label(axes: "Axes", label: Label, top: float, inch: float) -> None:
    axes.text(
        label.x,
        top + label.y,
        label.text,
        fontsize=72 * inch * label.size * 0.92,  # matplotlib's letters are wider than a page's
        color=LIGHT_COLORS[label.color],
        ha={"start": "left", "middle": "center", "end": "right"}[label.anchor],
        va="baseline",
        fontweight="bold" if label.bold else "normal",
        parse_math=False,
        zorder=3,
    )
