"""One step in a picture: for each rank what it computed, and under that what it sent, over time."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, log10
from typing import Any

from mmtrain.program import Compute, Timeline, chrome_trace
from mmtrain.report.drawing import Box, Color, Drawing, Label, Mark, Polyline, unit_color

TIMELINE_WIDTH_PX, TIMELINE_MARGIN_PX = 1000.0, 66.0
MAX_DRAWN_RANKS = 24  # in a picture; see `arrangement.shown_ranks`
MAX_TIMELINE_BOXES = 4000
_COMPUTE_TID = 0
Event = Mapping[str, Any]


@dataclass(frozen=True)
class DrawnStep:
    """A step to draw: events of a Chrome trace, of which those that begin inside it count."""

    name: str
    events: Sequence[Event]
    start_us: float
    length_us: float
    critical: frozenset[tuple[int, float]] = frozenset()  # (rank, begin in us) of computations on the critical path

    @classmethod
    def simulated(cls, name: str, timeline: Timeline, ranks: Sequence[int]) -> "DrawnStep":
        """A simulated step, of which only these ranks are turned into events."""
        wanted = set(ranks)
        few = replace(timeline, spans=tuple(span for span in timeline.spans if span.rank in wanted))
        path = (span for span in timeline.critical_path if isinstance(span.action, Compute))
        critical = frozenset((span.rank, span.start_s * 1e6) for span in path)
        return cls(name, chrome_trace(few, "")["traceEvents"], 0.0, timeline.step_time_s * 1e6, critical)


def timeline_drawing(step: DrawnStep, units: Sequence[str], ranks: Sequence[int], length_us: float) -> Drawing:
    """Draw the step's given ranks on an axis of `length_us`: forwards full, backwards pale, with their microbatch.

    Neighbours narrower than a pixel become one grey box, or than more where boxes would be too many: a page stays
    small however long the step.
    """
    tracks: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in step.events:
        if event["ph"] == "X" and step.start_us <= event["ts"] < step.start_us + step.length_us:
            tracks[event["pid"], event["tid"]].append(event)
    for found in tracks.values():
        found.sort(key=lambda event: float(event["ts"]))
    tall, flat = (20.0, 7.0) if len(ranks) <= 12 else (13.0, 4.0)
    scale = (TIMELINE_WIDTH_PX - TIMELINE_MARGIN_PX) / max(length_us, 1e-9)
    pitch = tall + flat + 8
    marks: list[Mark] = list(_axis(length_us, scale, len(ranks) * pitch))
    narrow = 1.0
    while True:
        boxes = [
            mark
            for row, rank in enumerate(ranks)
            for tid, (top, height) in enumerate(((row * pitch, tall), (row * pitch + tall + 1, flat)))
            for mark in _track(tracks[rank, tid], step.start_us, scale, top, height, tuple(units), narrow)
        ]
        if len(boxes) <= MAX_TIMELINE_BOXES or narrow > TIMELINE_WIDTH_PX:
            break
        narrow *= 2
    marks += _critical(step, tracks, ranks, scale, pitch, tall)
    marks += [Label(0, row * pitch + tall * 0.75, f"rank {rank}", color="ink") for row, rank in enumerate(ranks)]
    about = f"{step.name}: {step.length_us / 1e3:.4g} ms on {len(ranks)} ranks. " + _describe(tracks, ranks, step)
    return Drawing(TIMELINE_WIDTH_PX, len(ranks) * pitch + 20, about, (*marks, *boxes))


def _critical(
    step: DrawnStep,
    tracks: Mapping[tuple[int, int], Sequence[Event]],
    ranks: Sequence[int],
    scale: float,
    pitch: float,
    tall: float,
) -> Iterator[Mark]:
    """A line under each computation that the step's time depends on, neighbours in one."""
    for row, rank in enumerate(ranks):
        y, line = row * pitch + tall + 0.5, None
        for event in tracks.get((rank, _COMPUTE_TID), ()):
            if (rank, event["ts"]) not in step.critical:
                continue
            left = TIMELINE_MARGIN_PX + (event["ts"] - step.start_us) * scale
            right = left + event["dur"] * scale
            if line is not None and left - line[1] < 1:
                line = (line[0], right)
                continue
            if line is not None:
                yield Polyline(((line[0], y), (line[1], y)), "ink", 2)
            line = (left, right)
        if line is not None:
            yield Polyline(((line[0], y), (line[1], y)), "ink", 2)


def _axis(length_us: float, scale: float, bottom: float) -> Iterator[Mark]:
    raw = max(length_us, 1e-9) / 1e3 / 7
    size = 10.0 ** floor(log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    for tick in range(int(length_us / 1e3 / step) + 1):
        x = TIMELINE_MARGIN_PX + tick * step * 1e3 * scale
        unit = " ms" if tick == 0 else ""
        yield Polyline(((x, 0), (x, bottom)), "line")
        yield Label(x, bottom + 14, f"{tick * step:.6g}{unit}", "start" if tick == 0 else "middle")


def _track(
    events: Sequence[Event],
    start_us: float,
    scale: float,
    top: float,
    height: float,
    units: tuple[str, ...],
    narrow: float,
) -> Iterator[Mark]:
    merged: tuple[float, float, int] | None = None  # left, right and number of spans too narrow to be seen
    for event in events:
        left, width = TIMELINE_MARGIN_PX + (event["ts"] - start_us) * scale, event["dur"] * scale
        if width < narrow:
            if merged and left - merged[1] < narrow:
                merged = (merged[0], max(merged[1], left + width), merged[2] + 1)
                continue
            yield from _merged(merged, top, height)
            merged = (left, left + width, 1)
            continue
        yield from _merged(merged, top, height)
        merged = None
        yield from _span(event, left, min(width, TIMELINE_WIDTH_PX - left), top, height, units)
    yield from _merged(merged, top, height)


def _merged(merged: tuple[float, float, int] | None, top: float, height: float) -> Iterator[Mark]:
    if merged:
        left, right, number = merged
        yield Box(left, top, max(right - left, 0.5), height, "soft", 0.6, f"{number} short spans")


def _span(event: Event, left: float, width: float, top: float, height: float, units: tuple[str, ...]) -> Iterator[Mark]:
    words, unit = f"{event['name']}: {event['dur'] / 1e3:.3f} ms", event["args"].get("unit")
    if event["tid"] != _COMPUTE_TID or unit not in units:
        yield Box(left, top, width, height, "soft", 1.0, words)
        return
    forward = event["name"].startswith("F")
    yield Box(left, top, max(width - 0.5, 0.5), height, unit_color(unit, units), 1.0 if forward else 0.4, words)
    number = str(event["args"].get("microbatch", ""))
    if number and height >= 12 and width >= 7 * len(number) + 3:
        paint: Color = "ground" if forward else "ink"
        yield Label(left + width / 2, top + height / 2 + 4, number, "middle", paint, size=min(11, height - 2))


def _describe(tracks: Mapping[tuple[int, int], Sequence[Event]], ranks: Sequence[int], step: DrawnStep) -> str:
    """How busy each rank is, in words."""
    busy = (
        sum(event["dur"] for event in tracks.get((rank, _COMPUTE_TID), ())) / max(step.length_us, 1e-9)
        for rank in ranks
    )
    return ", ".join(f"rank {rank} computes {share:.0%} of it" for rank, share in zip(ranks, busy, strict=True)) + "."


def curve_drawing(points: Sequence[tuple[float, float | None]], what: str, unit: str) -> Drawing | None:
    """A line over steps with a gap where a value is missing; None where fewer than two are there.

    Half as wide as a timeline: two stand side by side, and one fits a phone.
    """
    there = [(x, y) for x, y in points if y is not None]
    if len(there) < 2:
        return None
    lo, hi = min(y for _, y in there), max(y for _, y in there)
    first, last, wide = points[0][0], points[-1][0], TIMELINE_WIDTH_PX / 2 - 10
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            pieces.append([])
            continue
        height = 150 - 140 * (y - lo) / ((hi - lo) or 1)
        pieces[-1].append(
            (TIMELINE_MARGIN_PX + (wide - TIMELINE_MARGIN_PX) * (x - first) / max(last - first, 1), height)
        )
    lines: list[Mark] = [Polyline(((TIMELINE_MARGIN_PX, y), (wide, y)), "line") for y in (10.0, 150.0)]
    for piece in pieces:
        if len(piece) == 1:
            lines.append(Box(piece[0][0] - 2, piece[0][1] - 2, 4, 4, "u0"))
        elif piece:
            lines.append(Polyline(tuple(piece), "u0", 2))
    texts = [
        Label(0, 14, f"{hi:.4g}"),
        Label(0, 154, f"{lo:.4g}"),
        Label(TIMELINE_MARGIN_PX, 172, f"step {first:.0f}"),
        Label(wide, 172, f"step {last:.0f}", "end"),
    ]
    about = (
        f"{what} in {unit} over steps {first:.0f} to {last:.0f}: {there[0][1]:.4g} at first, {there[-1][1]:.4g} at "
        f"last, between {lo:.4g} and {hi:.4g}."
    )
    return Drawing(wide, 178, about, (*lines, *texts))
