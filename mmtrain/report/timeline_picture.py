"""Draw one step over time: for each rank a row of computations and a thin row of communication."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, log10
from typing import Any

from mmtrain.program import Compute, Timeline, chrome_trace
from mmtrain.program.trace.timeline import STREAMS
from mmtrain.report.comparison import COMPUTE_TID
from mmtrain.report.drawing import Box, Color, Drawing, Label, Mark, Polyline, unit_color
from mmtrain.report.plain_text import exact_time_text, span_time_text

TIMELINE_WIDTH_PX = 1000.0
TIMELINE_MARGIN_PX = 66.0  # at the left, for the names of the ranks
MAX_DRAWN_RANKS = 24  # in a picture; `rank_groups.ranks_to_draw` chooses them
MAX_TIMELINE_BOXES = 4000  # keeps a page at some hundred kilobytes
MAX_TALL_ROWS = 12  # more ranks get lower rows
Event = Mapping[str, Any]
Threads = Mapping[tuple[int, int], Sequence[Event]]  # events in order of time, by rank and thread


@dataclass(frozen=True)
class DrawnStep:
    """A step to draw: the events of a Chrome trace that start inside the step."""

    name: str
    events: Sequence[Event]
    start_us: float
    length_us: float
    critical: frozenset[tuple[int, float]] = frozenset()  # (rank, start in us) of computations on the critical path

    @classmethod
    def simulated(cls, name: str, timeline: Timeline, ranks: Sequence[int]) -> "DrawnStep":
        """Take the events of these ranks from a simulated step."""
        drawn_ranks = set(ranks)
        spans = tuple(span for span in timeline.spans if span.rank in drawn_ranks)
        events = chrome_trace(replace(timeline, spans=spans), "")["traceEvents"]
        critical = frozenset(
            (span.rank, span.start_s * 1e6) for span in timeline.critical_path if isinstance(span.action, Compute)
        )
        return cls(name, events, 0.0, timeline.step_time_s * 1e6, critical)


@dataclass(frozen=True)
class _Axes:
    """Where ranks and times lie in the picture, in pixels."""

    start_us: float
    px_per_us: float
    compute_height: float
    communication_height: float

    @property
    def pitch(self) -> float:
        return self.compute_height + self.communication_height + 8

    def x(self, time_us: float) -> float:
        return TIMELINE_MARGIN_PX + (time_us - self.start_us) * self.px_per_us

    def thread(self, row: int, tid: int) -> tuple[float, float]:
        """Return top and height of a thread."""
        top = row * self.pitch
        if tid == COMPUTE_TID:
            return top, self.compute_height
        return top + self.compute_height + 1, self.communication_height


def timeline_drawing(step: DrawnStep, units: Sequence[str], ranks: Sequence[int], length_us: float) -> Drawing:
    """Draw the step on these ranks, on an axis of `length_us`.

    Forwards are opaque, backwards pale; numbers are microbatches. Neighboring spans narrower than a pixel become one
    gray box. If that leaves too many boxes, wider spans are merged too, so that a page stays small.
    """
    threads = _threads(step)
    compute_height, communication_height = (20.0, 7.0) if len(ranks) <= MAX_TALL_ROWS else (13.0, 4.0)
    px_per_us = (TIMELINE_WIDTH_PX - TIMELINE_MARGIN_PX) / max(length_us, 1e-9)
    axes = _Axes(step.start_us, px_per_us, compute_height, communication_height)
    marks: list[Mark] = list(_time_axis(length_us, px_per_us, len(ranks) * axes.pitch))
    min_width = 1.0
    boxes = _spans(threads, axes, ranks, tuple(units), min_width)
    while len(boxes) > MAX_TIMELINE_BOXES and min_width <= TIMELINE_WIDTH_PX:
        min_width *= 2
        boxes = _spans(threads, axes, ranks, tuple(units), min_width)
    marks += _critical_path_lines(step, threads, axes, ranks)
    for row, rank in enumerate(ranks):
        marks.append(Label(0, row * axes.pitch + compute_height * 0.75, f"rank {rank}", color="ink"))
    busy = _busy_text(threads, ranks, step.length_us)
    description = f"{step.name}: {exact_time_text(step.length_us / 1e6)} on {len(ranks)} ranks. {busy}"
    return Drawing(TIMELINE_WIDTH_PX, len(ranks) * axes.pitch + 20, description, (*marks, *boxes))


def _threads(step: DrawnStep) -> Threads:
    """Sort the step's events by rank and thread, in order of time."""
    threads: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in step.events:
        if event["ph"] == "X" and step.start_us <= event["ts"] < step.start_us + step.length_us:
            threads[event["pid"], event["tid"]].append(event)
    for events in threads.values():
        events.sort(key=lambda event: float(event["ts"]))
    return threads


def _critical_path_lines(step: DrawnStep, threads: Threads, axes: _Axes, ranks: Sequence[int]) -> Iterator[Mark]:
    """Draw a line below each computation on the critical path; neighbors share one line."""
    for row, rank in enumerate(ranks):
        y = row * axes.pitch + axes.compute_height + 0.5
        line: tuple[float, float] | None = None  # left and right end of the line being extended
        for event in threads.get((rank, COMPUTE_TID), ()):
            if (rank, event["ts"]) not in step.critical:
                continue
            left = axes.x(event["ts"])
            right = left + event["dur"] * axes.px_per_us
            if line is not None and left - line[1] < 1:
                line = (line[0], right)
                continue
            if line is not None:
                yield Polyline(((line[0], y), (line[1], y)), "ink", 2)
            line = (left, right)
        if line is not None:
            yield Polyline(((line[0], y), (line[1], y)), "ink", 2)


def _time_axis(length_us: float, px_per_us: float, bottom: float) -> Iterator[Mark]:
    """Draw about seven grid lines with times in milliseconds; in seconds if there is one at least."""
    unit, unit_us = ("s", 1e6) if length_us >= 1e6 else ("ms", 1e3)
    length = max(length_us, 1e-9) / unit_us
    power_of_ten = 10.0 ** floor(log10(length / 7))
    spacing = next(power_of_ten * factor for factor in (1, 2, 5, 10) if power_of_ten * factor >= length / 7)
    for tick in range(int(length / spacing) + 1):
        x = TIMELINE_MARGIN_PX + tick * spacing * unit_us * px_per_us
        text = f"{tick * spacing:.6g}" + (f" {unit}" if tick == 0 else "")
        yield Polyline(((x, 0), (x, bottom)), "line")
        yield Label(x, bottom + 14, text, "start" if tick == 0 else "middle")


def _spans(threads: Threads, axes: _Axes, ranks: Sequence[int], units: tuple[str, ...], min_width: float) -> list[Mark]:
    """Draw all threads of these ranks, merging spans narrower than `min_width` pixels."""
    marks: list[Mark] = []
    for row, rank in enumerate(ranks):
        for tid in (
            COMPUTE_TID,
            *reversed(range(COMPUTE_TID + 1, len(STREAMS))),
        ):  # messages over reductions and gathers
            marks += _draw_thread(threads.get((rank, tid), ()), axes, axes.thread(row, tid), units, min_width)
    return marks


def _draw_thread(
    events: Sequence[Event],
    axes: _Axes,
    top_and_height: tuple[float, float],
    units: tuple[str, ...],
    min_width: float,
) -> Iterator[Mark]:
    top, height = top_and_height
    merged: tuple[float, float, int] | None = None  # left, right and number of spans too narrow to be drawn apart
    for event in events:
        left = axes.x(event["ts"])
        width = event["dur"] * axes.px_per_us
        if width < min_width:
            if merged is not None and left - merged[1] < min_width:
                merged = (merged[0], max(merged[1], left + width), merged[2] + 1)
                continue
            yield from _merged_box(merged, top, height)
            merged = (left, left + width, 1)
            continue
        yield from _merged_box(merged, top, height)
        merged = None
        yield from _span(event, left, min(width, TIMELINE_WIDTH_PX - left), (top, height), units)
    yield from _merged_box(merged, top, height)


def _merged_box(merged: tuple[float, float, int] | None, top: float, height: float) -> Iterator[Mark]:
    if merged is not None:
        left, right, count = merged
        yield Box(left, top, max(right - left, 0.5), height, "soft", 0.6, f"{count} short spans")


def _span(
    event: Event, left: float, width: float, top_and_height: tuple[float, float], units: tuple[str, ...]
) -> Iterator[Mark]:
    """Draw a box, and the number of the microbatch where it fits."""
    top, height = top_and_height
    tooltip = f"{event['name']}: {span_time_text(event['dur'] / 1e6)}"
    unit = event["args"].get("unit")
    if event["tid"] != COMPUTE_TID or unit not in units:
        yield Box(left, top, width, height, "soft", 1.0, tooltip)
        return
    is_forward = event["name"].startswith("F")
    opacity = 1.0 if is_forward else 0.4
    yield Box(left, top, max(width - 0.5, 0.5), height, unit_color(unit, units), opacity, tooltip)
    microbatch = str(event["args"].get("microbatch", ""))
    if microbatch and height >= 12 and width >= 7 * len(microbatch) + 3:
        color: Color = "ground" if is_forward else "ink"
        x, y = left + width / 2, top + height / 2 + 4
        yield Label(x, y, microbatch, "middle", color, size=min(11, height - 2))


def _busy_text(threads: Threads, ranks: Sequence[int], length_us: float) -> str:
    """Write the share of the step in which each rank computes."""
    sentences = []
    for rank in ranks:
        compute_us = sum(event["dur"] for event in threads.get((rank, COMPUTE_TID), ()))
        sentences.append(f"rank {rank} computes {compute_us / max(length_us, 1e-9):.0%} of it")
    return ", ".join(sentences) + "."


def curve_drawing(points: Sequence[tuple[float, float | None]], what: str, unit: str) -> Drawing | None:
    """Draw values over steps, with a gap where a value is missing; None if fewer than two values exist.

    A curve is half as wide as a timeline: two fit side by side on a page, and one fits a phone.
    """
    present = [(step, value) for step, value in points if value is not None]
    if len(present) < 2:
        return None
    lo = min(value for _, value in present)
    hi = max(value for _, value in present)
    first_step, last_step = points[0][0], points[-1][0]
    width = TIMELINE_WIDTH_PX / 2 - 10
    pieces: list[list[tuple[float, float]]] = [[]]  # runs without a gap, in pixels
    for step, value in points:
        if value is None:
            pieces.append([])
            continue
        x = TIMELINE_MARGIN_PX + (width - TIMELINE_MARGIN_PX) * (step - first_step) / max(last_step - first_step, 1)
        y = 150 - 140 * (value - lo) / ((hi - lo) or 1)
        pieces[-1].append((x, y))
    marks: list[Mark] = [Polyline(((TIMELINE_MARGIN_PX, y), (width, y)), "line") for y in (10.0, 150.0)]
    for piece in pieces:
        if len(piece) == 1:
            marks.append(Box(piece[0][0] - 2, piece[0][1] - 2, 4, 4, "u0"))
        elif piece:
            marks.append(Polyline(tuple(piece), "u0", 2))
    marks += [
        Label(0, 14, f"{hi:.4g}"),
        Label(0, 154, f"{lo:.4g}"),
        Label(TIMELINE_MARGIN_PX, 172, f"step {first_step:.0f}"),
        Label(width, 172, f"step {last_step:.0f}", "end"),
    ]
    description = (
        f"{what} in {unit} over steps {first_step:.0f} to {last_step:.0f}: {present[0][1]:.4g} at first, "
        f"{present[-1][1]:.4g} at last, between {lo:.4g} and {hi:.4g}."
    )
    return Drawing(width, 178, description, tuple(marks))
