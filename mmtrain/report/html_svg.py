"""Drawings of the report as inline SVG: timelines, bars, curves. No script, no address, all names escaped."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

WIDTH = 1000  # of every drawing, in its own units; the page scales it
MAX_RANKS = 32  # drawn; the page says when there are more
_LANE, _LEFT, _TICKS = 13, 60, 5
_COMPUTE = 0


def timeline(events: Sequence[Mapping[str, Any]], start_us: float, length_us: float, units: Sequence[str]) -> str:
    """One step from a Chrome trace: per rank a lane of compute over one of communication, milliseconds below.

    Neighbours that are each narrower than a pixel become one grey block, so that a page stays small however many
    spans there are.
    """
    lanes: defaultdict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and start_us <= event["ts"] < start_us + length_us:
            lanes[event["pid"], event["tid"]].append(event)
    ranks = sorted({pid for pid, _ in lanes})
    scale = (WIDTH - _LEFT) / max(length_us, 1e-9)
    parts = []
    for row, rank in enumerate(ranks[:MAX_RANKS]):
        top = row * (2 * _LANE + 8)
        parts.append(f'<text x="0" y="{top + _LANE + 4}">rank {rank}</text>')
        for tid in (0, 1):
            found = sorted(lanes[rank, tid], key=lambda e: float(e["ts"]))
            parts += _blocks(found, start_us, scale, top + tid * (_LANE + 1), units)
    bottom = min(len(ranks), MAX_RANKS) * (2 * _LANE + 8)
    for tick in range(_TICKS + 1):
        x = _LEFT + (WIDTH - _LEFT) * tick / _TICKS
        anchor = "end" if tick == _TICKS else "middle"
        label = f"{length_us * tick / _TICKS / 1e3:.4g}" + (" ms" if tick == _TICKS else "")
        parts.append(f'<path class="grid" d="M{x:.1f} 0V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="{anchor}">{label}</text>')
    note = f"<p>The first {MAX_RANKS} of {len(ranks)} ranks.</p>" if len(ranks) > MAX_RANKS else ""
    return _svg(bottom + 20, parts) + note


def _blocks(
    events: Iterable[Mapping[str, Any]], start_us: float, scale: float, top: int, units: Sequence[str]
) -> list[str]:
    parts: list[str] = []
    merged: tuple[float, float, int] | None = None  # left, right and number of spans too narrow to be seen

    def flush() -> None:
        if merged:
            left, right, number = merged
            parts.append(_rect(left, top, max(right - left, 0.5), "merged", f"{number} short spans"))

    for event in events:
        left, width = _LEFT + (event["ts"] - start_us) * scale, event["dur"] * scale
        if width < 1:
            if merged and left - merged[1] < 1:
                merged = (merged[0], max(merged[1], left + width), merged[2] + 1)
                continue
            flush()
            merged = (left, left + width, 1)
            continue
        flush()
        merged = None
        words = f"{event['name']}: {event['dur'] / 1e3:.3f} ms"
        parts.append(_rect(left, top, min(width, WIDTH - left), _style(event, units), words))
    flush()
    return parts


def _style(event: Mapping[str, Any], units: Sequence[str]) -> str:
    unit = event["args"].get("unit")
    if event["tid"] != _COMPUTE or unit not in units:
        return "comm"
    return f"u{units.index(unit) % 6}" + ("" if event["name"].startswith("F") else " back")


def _rect(left: float, top: float, width: float, style: str, words: str) -> str:
    return (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_LANE}" class="{style}">'
        f"<title>{escape(words)}</title></rect>"
    )


def bars(rows: Mapping[str, float], full: float, unit: str, limit: float | None = None) -> str:
    """A bar for each row, `full` wide at most; `limit` is drawn as a line across."""
    span, left, parts = WIDTH - 222, 220, []
    for row, (name, value) in enumerate(rows.items()):
        y, width = row * 24, span * value / full if full > 0 else 0.0
        parts.append(f'<text x="0" y="{y + 14}">{escape(name)}</text>')
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{width:.2f}" height="14" class="u0"/>')
        parts.append(f'<text x="{left - 10}" y="{y + 14}" text-anchor="end">{value:.4g} {escape(unit)}</text>')
    if limit is not None and full > 0:
        parts.append(f'<path class="limit" d="M{left + span * limit / full:.1f} 0V{24 * len(rows)}"/>')
    return _svg(24 * len(rows) + 4, parts)


def curve(points: Sequence[tuple[float, float | None]], unit: str) -> str:
    """A line over steps with a gap where a value is missing; empty where fewer than two are there."""
    there = [(x, y) for x, y in points if y is not None]
    if len(there) < 2:
        return "<p>Fewer than two finite values.</p>"
    lo, hi = min(y for _, y in there), max(y for _, y in there)
    first, last = points[0][0], points[-1][0]
    draw, pen = [], "M"
    for x, y in points:
        if y is None:
            pen = "M"
            continue
        at = (_LEFT + (WIDTH - _LEFT) * (x - first) / max(last - first, 1), 150 - 140 * (y - lo) / ((hi - lo) or 1))
        draw.append(f"{pen}{at[0]:.1f} {at[1]:.1f}")
        pen = "L"
    texts = (
        f'<text x="0" y="14">{hi:.4g}</text><text x="0" y="154">{lo:.4g}</text>'
        f'<text x="{_LEFT}" y="172">step {first:.0f}</text>'
        f'<text x="{WIDTH}" y="172" text-anchor="end">step {last:.0f}; {escape(unit)}</text>'
    )
    return _svg(178, [f'<path class="line" d="{"".join(draw)}"/>', texts])


def _svg(height: float, parts: Iterable[str]) -> str:
    return f'<div class="draw"><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg></div>'
