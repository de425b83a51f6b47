"""Draw docs/papers_PAPER_NAME.png of every headline: the paper's gain, ours, and ours with something changed."""

import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.paper_data import Headline, Papers
from scripts.paper_headlines import Gain, headline_gains
from scripts.paper_record import Record

_WIDTH_INCHES = 7.0
_ROW_INCHES = 0.3
_MARGIN_INCHES = 0.75  # for title and axis
_DPI = 100
_PAPER_COLOR, _OURS_COLOR, _CHANGED_COLOR, _EVEN_COLOR = "#8a8a8a", "#1f5fa8", "#8fb8e0", "#333333"
VALUES_KEY = "Description"  # of the picture's metadata, where its values stand for the test that compares them


def picture_name(headline: Headline) -> str:
    """Return the file name of a headline's picture."""
    return f"papers_{headline.paper}_{headline.name}.png"


def picture_values(gains: Sequence[Gain]) -> str:
    """Return what a picture shows as text, which two pictures of the same values share."""
    return json.dumps([[gain.what, [round(value, 3) for value in gain.values]] for gain in gains])


def draw_pictures(papers: Papers, record: Record, folder: Path) -> None:
    """Write the picture of every headline whose runs have answers."""
    for headline in papers.headlines:
        gains = headline_gains(headline, papers, record)
        if gains is not None:
            _draw(headline, gains, folder / picture_name(headline))


def _draw(headline: Headline, gains: Sequence[Gain], path: Path) -> None:
    height = _ROW_INCHES * len(gains) + _MARGIN_INCHES
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    axes = figure.add_subplot()
    for row, gain in enumerate(gains):
        _bar(axes, row, gain, is_fact=headline.is_fact)
    axes.set_yticks(range(len(gains)), [gain.what for gain in gains], fontsize=8)
    axes.invert_yaxis()
    if not headline.is_fact:
        axes.axvline(1.0, color=_EVEN_COLOR, linewidth=0.8)
    most = max(value for gain in gains for value in gain.values)
    axes.set_xlim(0, most * 1.15)
    unit = "percent of the GPUs' peak" if headline.is_fact else "times as fast as the slower system (1: equal)"
    axes.set_xlabel(unit, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(headline.what, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    # No date and no version of matplotlib, so that equal values make the same file.
    figure.savefig(path, dpi=_DPI, metadata={VALUES_KEY: picture_values(gains), "Software": None})


def _bar(axes: Axes, row: int, gain: Gain, *, is_fact: bool) -> None:
    """Draw a gain; of a range, its least as the bar and its most as a line to the right of it."""
    color = {"paper": _PAPER_COLOR, "ours": _OURS_COLOR}.get(gain.what, _CHANGED_COLOR)
    least, most = gain.values[0], gain.values[-1]
    axes.barh(row, least, height=0.6, color=color)
    if most > least:
        axes.plot([least, most], [row, row], color=color, linewidth=3, solid_capstyle="butt")
    form = "{:.1f}%" if is_fact else "{:.2f}x"
    text = " to ".join(dict.fromkeys(form.format(value) for value in (least, most)))
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # covers the line at 1 behind the figure
    at, offset = (most, row), (4, 0)  # in points
    axes.annotate(text, at, offset, textcoords="offset points", va="center", fontsize=8, bbox=paper)
