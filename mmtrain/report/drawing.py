"""Drawings as lists of marks, rendered as inline SVG for the HTML page and by matplotlib for papers.

Sizes are in pixels of the page. Colors have names, so that the page can follow a dark color scheme. The colors of units
are those of Okabe and Ito, which color-blind readers can tell apart ("Color Universal Design", 2008).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Literal

Color = Literal["u0", "u1", "u2", "u3", "u4", "u5", "ink", "soft", "line", "ground", "limit"]
UNIT_COLORS: tuple[Color, ...] = ("u0", "u1", "u2", "u3", "u4", "u5")
LIGHT_COLORS: dict[Color, str] = {
    "u0": "#0072b2", "u1": "#d55e00", "u2": "#009e73", "u3": "#cc79a7", "u4": "#e69f00", "u5": "#56b4e9",
    "ink": "#1c2630", "soft": "#5c6670", "line": "#d9dee3", "ground": "#ffffff", "limit": "#c62828",
}  # fmt: skip
DARK_COLORS: dict[Color, str] = {
    **LIGHT_COLORS, "u0": "#4aa3df", "u1": "#f08a3c",
    "ink": "#e4e9ee", "soft": "#9aa6b2", "line": "#33404c", "ground": "#12171c", "limit": "#ff6b6b",
}  # fmt: skip

OUTLINED_OPACITY = 0.12  # of the fill of an outlined box
ARROW_HEAD_PX = 6.0


@dataclass(frozen=True)
class Box:
    """A filled rectangle with a tooltip. An `outlined` box has a border and almost no fill."""

    x: float
    y: float
    width: float
    height: float
    color: Color
    opacity: float = 1.0
    tooltip: str = ""
    outlined: bool = False


@dataclass(frozen=True)
class Polyline:
    """A line through points; `arrow` adds an arrow head at its end."""

    points: tuple[tuple[float, float], ...]
    color: Color
    width: float = 1.0
    arrow: bool = False


@dataclass(frozen=True)
class Label:
    """Text on the baseline y."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    color: Color = "soft"
    size: float = 12.0
    bold: bool = False


Mark = Box | Polyline | Label


@dataclass(frozen=True)
class Drawing:
    """Marks on a sheet. `description` is the text for screen readers."""

    width: float
    height: float
    description: str
    marks: tuple[Mark, ...]
    full_width: bool = True  # scale to the width of the page; otherwise keep the drawn size


def unit_color(unit: str, units: "tuple[str, ...]") -> Color:
    """Return the color of a unit, the same in all drawings of a plan."""
    return UNIT_COLORS[units.index(unit) % len(UNIT_COLORS)]


def svg(drawing: Drawing) -> str:
    """Render inline SVG in a box that scrolls on a narrow page; colors are CSS classes of the page."""
    size = "" if drawing.full_width else f' style="width:{drawing.width:.0f}px"'
    return (
        f'<div class="draw" tabindex="0" role="group" aria-label="a scrollable picture">'
        f'<svg viewBox="0 0 {drawing.width:.0f} {drawing.height:.0f}" role="img" '
        f'aria-label="{escape(drawing.description)}"{size}>'
        f"{''.join(part for mark in drawing.marks for part in _svg(mark))}</svg></div>"
    )


def _svg(mark: Mark) -> Iterator[str]:
    match mark:
        case Box():
            css_class: str = mark.color
            style = "" if mark.opacity == 1 else f' fill-opacity="{mark.opacity:g}"'
            if mark.outlined:
                css_class = f"{mark.color} edge"
                style = f' fill-opacity="{OUTLINED_OPACITY:g}" stroke-width="1"'
            end = f"><title>{escape(mark.tooltip)}</title></rect>" if mark.tooltip else "/>"
            yield (
                f'<rect x="{mark.x:.1f}" y="{mark.y:.1f}" width="{max(mark.width, 0):.1f}" height="{mark.height:.1f}" '
                f'class="{css_class}"{style}{end}'
            )
        case Polyline():
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in mark.points)
            yield f'<path d="M{path}" class="{mark.color} path" stroke-width="{mark.width:g}"/>'
            if mark.arrow:
                corners = "L".join(f"{x:.1f} {y:.1f}" for x, y in arrow_head(mark))
                yield f'<path d="M{corners}Z" class="{mark.color}"/>'
        case Label():
            bold = ' font-weight="600"' if mark.bold else ""
            size = "" if mark.size == 12 else f' font-size="{mark.size:g}"'
            anchor = "" if mark.anchor == "start" else f' text-anchor="{mark.anchor}"'
            yield (
                f'<text x="{mark.x:.1f}" y="{mark.y:.1f}" class="{mark.color}"{anchor}{size}{bold}>'
                f"{escape(mark.text)}</text>"
            )


def arrow_head(line: Polyline) -> tuple[tuple[float, float], ...]:
    """Return the corners of the triangle at the end of a line."""
    (x0, y0), (x1, y1) = line.points[-2:]
    length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)
    dx = (x1 - x0) / length
    dy = (y1 - y0) / length
    base_x = x1 - ARROW_HEAD_PX * dx
    base_y = y1 - ARROW_HEAD_PX * dy
    half_width = ARROW_HEAD_PX / 2
    return (
        (x1, y1),
        (base_x - dy * half_width, base_y + dx * half_width),
        (base_x + dy * half_width, base_y - dx * half_width),
    )
