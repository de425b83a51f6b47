"""Samples as the model reads and learns them, for a terminal."""

import io
from collections.abc import Iterable, Iterator

import numpy as np
from PIL import Image
from rich.console import RenderableType
from rich.style import Style
from rich.text import Text

from mmtrain.report.console import Console
from mmtrain.report.plain_text import DEFAULT_WIDTH
from mmtrain.report.shown_sample import Pixels, ShownMedium, ShownSample, TokenKind, token_runs

_STYLES: dict[TokenKind, str] = {
    "text": "",
    "special": "magenta",
    "medium": "bold yellow",
    "predicted": "dim magenta",
}
_LEARNED_STYLE = "black on green"
_OPEN, _CLOSE = "⟦", "⟧"  # around learned text where there are no colors
_THUMBNAIL_COLUMNS = 48
_MAX_THUMBNAILS = 2  # of a medium
_HALF_BLOCK = "▀"  # its color is the upper pixel, its ground the lower one


def samples_text(samples: Iterable[ShownSample], width: int = DEFAULT_WIDTH, *, colors: bool = False) -> str:
    """Write samples below each other.

    Learned text is green with `colors`, and stands in brackets without. Pictures are drawn with colors only.
    """
    console = Console(
        file=io.StringIO(),
        width=width,
        no_color=not colors,
        force_terminal=colors,
        color_system="truecolor" if colors else None,
        highlight=False,
    )
    with console.capture() as capture:
        for part in _parts(samples, width, colors):
            console.print(part, soft_wrap=isinstance(part, Text) and part.end == "")
    return capture.get().rstrip("\n")


def _parts(samples: Iterable[ShownSample], width: int, colors: bool) -> Iterator[RenderableType]:
    learned = ("green", _LEARNED_STYLE) if colors else (f"in {_OPEN} {_CLOSE}", "")
    yield Text.assemble("Learned text is ", learned, "; ↵ ends a line.", style="dim" if colors else "")
    for sample in samples:
        yield Text(f"\n{sample.title}", style="bold")
        if sample.problem is not None:
            yield Text(sample.problem, style="red")
        yield from map(Text, sample.remarks)
        if sample.counts:
            yield Text(", ".join(f"{count:,} {what}" for what, count in sample.counts.items()))
        if sample.tokens:
            yield Text("")
            yield _tokens(sample, colors)
        for medium in sample.media:
            yield from _medium(medium, min(width, _THUMBNAIL_COLUMNS), colors)


def _tokens(sample: ShownSample, colors: bool) -> Text:
    text = Text()
    was_learned = False
    for run in token_runs(sample.tokens):
        if run.is_learned != was_learned and not colors:
            text.append(_OPEN if run.is_learned else _CLOSE)
        was_learned = run.is_learned
        style = _LEARNED_STYLE if run.is_learned else _STYLES[run.kind]
        text.append(run.text.replace("\n", "↵\n"), style=style)
    if was_learned and not colors:
        text.append(_CLOSE)
    return text


def _medium(medium: ShownMedium, columns: int, colors: bool) -> Iterator[RenderableType]:
    yield Text.assemble("\n", (medium.title, "bold"), f" {medium.details}")
    if medium.problem is not None:
        yield Text(medium.problem, style="red")
    if colors:
        yield from (_thumbnail(pixels, columns) for pixels in medium.pictures[:_MAX_THUMBNAILS])


def _thumbnail(pixels: Pixels, columns: int) -> Text:
    """Draw a picture with half blocks, two pixels one above the other in each character."""
    height, width = pixels.shape[:2]
    columns = min(columns, width)
    rows = max(1, round(height * columns / width / 2))
    small = np.asarray(Image.fromarray(pixels).resize((columns, 2 * rows)))
    text = Text()
    for row in range(rows):
        for upper, lower in zip(small[2 * row].tolist(), small[2 * row + 1].tolist(), strict=True):
            text.append(_HALF_BLOCK, Style(color=_rgb(upper), bgcolor=_rgb(lower)))
        text.append("\n")
    return text


def _rgb(pixel: list[int]) -> str:
    return "rgb({},{},{})".format(*pixel)
