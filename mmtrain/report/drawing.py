"""Drawings made once and rendered twice: as inline SVG for the page, and on paper.

A drawing is a list of marks in units that are pixels on a page. Colours have names, so that the page can follow a dark
screen. Those of units are Okabe and Ito's, which colour-blind readers tell apart ("Color Universal Design", 2008).
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


@dataclass(frozen=True)
class Box:
    """A filled rectangle; `tooltip` are shown where a pointer rests on it. `outlined` ones are all but empty."""

    x: float
    y: float
    width: float
    height: float
    color: Color
    opacity: float = 1.0  # 1 is full, 0 is invisible
    tooltip: str = ""
    outlined: bool = False


@dataclass(frozen=True)
class Polyline:
    """A line through points; `arrow` puts a head on its end."""

    points: tuple[tuple[float, float], ...]
    color: Color
    width: float = 1.0
    arrow: bool = False


@dataclass(frozen=True)
class Label:
    """Text on the base line y."""

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
    """Marks on a sheet. `description` says in words what is to be seen, for those who cannot see it."""

    width: float
    height: float
    description: str
    marks: tuple[Mark, ...]
    full_width: bool = True  # as wide as the page; otherwise as large as it is drawn


def unit_color(unit: str, units: "tuple[str, ...]") -> Color:
    """The colour of a unit, the same in all drawings of a plan."""
    return UNIT_COLORS[units.index(unit) % len(UNIT_COLORS)]


def svg(drawing: Drawing) -> str:
    """Inline SVG in a box that scrolls where the page is narrower; its colours are the page's classes."""
    size = "" if drawing.full_width else f' style="width:{drawing.width:.0f}px"'
    return (
        f'<div class="draw" tabindex="0" role="group" aria-label="a picture that can be scrolled">'
        f'<svg viewBox="0 0 {drawing.width:.0f} {drawing.height:.0f}" role="img" '
        f'aria-label="{escape(drawing.description)}"{size}>'
        f"{''.join(part for mark in drawing.marks for part in _svg(mark))}</svg></div>"
    )


def _svg(mark: Mark) -> Iterator[str]:
    match mark:
        case Box():
            strength = "" if mark.opacity == 1 else f' fill-opacity="{mark.opacity:g}"'
            strength = ' fill-opacity="0.12" stroke-width="1"' if mark.outlined else strength
            kind = f"{mark.color} edge" if mark.outlined else mark.color
            words = f"<title>{escape(mark.tooltip)}</title>" if mark.tooltip else ""
            yield (
                f'<rect x="{mark.x:.1f}" y="{mark.y:.1f}" width="{max(mark.width, 0):.1f}" height="{mark.height:.1f}" '
                f'class="{kind}"{strength}' + (f">{words}</rect>" if words else "/>")
            )
        case Polyline():
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in mark.points)
            yield f'<path d="M{path}" class="{mark.color} path" stroke-width="{mark.width:g}"/>'
            if mark.arrow:
                yield f'<path d="{_head(mark)}" class="{mark.color}"/>'
        case Label():
            bold = ' font-weight="600"' if mark.bold else ""
            size = "" if mark.size == 12 else f' font-size="{mark.size:g}"'
            anchor = "" if mark.anchor == "start" else f' text-anchor="{mark.anchor}"'
            yield (
                f'<text x="{mark.x:.1f}" y="{mark.y:.1f}" class="{mark.color}"{anchor}{size}{bold}>'
                f"{escape(mark.text)}</text>"
            )


def _head(line: Polyline) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in arrow_head(line)) + "Z"


def arrow_head(line: Polyline) -> tuple[tuple[float, float], ...]:
    """Corners of the triangle at the end of a line."""
    (x0, y0), (x1, y1) = line.points[-2:]
    length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)
    dx, dy, size = (x1 - x0) / length, (y1 - y0) / length, 6.0
    back = (x1 - size * dx, y1 - size * dy)
    return (
        (x1, y1),
        (back[0] - dy * size / 2, back[1] + dx * size / 2),
        (back[0] + dy * size / 2, back[1] - dx * size / 2),
    )
