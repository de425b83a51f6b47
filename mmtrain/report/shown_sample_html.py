"""Samples as the model reads and learns them, as parts of a page."""

import base64
import io
from collections.abc import Iterable
from html import escape

from PIL import Image

from mmtrain.report.html import page_html
from mmtrain.report.notebook_html import notebook_view
from mmtrain.report.shown_sample import Pixels, ShownMedium, ShownSample, TokenRun, token_runs

_SMALLEST_SIDE_PX = 112  # smaller pictures are enlarged, so that their pixels can be seen
_LEGEND = (
    '<p class="legend"><span class="learned">learned</span> counts in the loss; <span class="special">special '
    'token</span>; <span class="medium">[vision × 576]</span> features of a medium; everything else is read and not '
    "learned. A token's number is shown by pointing at it.</p>"
)
# Nested below one class, so that no rule reaches another part of a page or notebook.
_STYLE = """<style>.sample{
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:13.5px/1.75 ui-monospace,monospace;border:1px solid var(--line);
border-radius:6px;padding:10px 14px;margin:8px 0;color:var(--ink);background:none}
.learned{background:color-mix(in srgb,var(--u2) 26%,transparent);color:var(--ink);
box-shadow:inset 0 -2px var(--u2)}
.special{color:var(--u3)}.medium{color:var(--u1);font-weight:600}.predicted{opacity:.65}
pre i{font-style:normal}pre i:hover{outline:1px solid var(--u0)}.break{color:var(--soft);opacity:.6}
.problem{color:var(--limit)}
figure{margin:14px 0}figcaption{color:var(--soft);font-size:13px;margin-bottom:5px}
figcaption b{color:var(--ink)}.pictures{display:flex;flex-wrap:wrap;gap:6px}
.pictures img{max-width:100%;height:auto;border:1px solid var(--line);image-rendering:pixelated}
.legend span{padding:0 3px}}</style>"""


def samples_page(name: str, samples: Iterable[ShownSample]) -> str:
    """Write one self-contained page about samples."""
    return page_html(name, samples_html(samples))


def samples_view(name: str, samples: Iterable[ShownSample]) -> str:
    """Draw samples for the output of a notebook's cell."""
    return notebook_view(name, samples_html(samples))


def samples_html(samples: Iterable[ShownSample]) -> str:
    """Draw samples below each other."""
    body = "".join(map(_sample_html, samples))
    return f'{_STYLE}<div class="sample">{_LEGEND}{body}</div>'


def _sample_html(sample: ShownSample) -> str:
    parts = [f"<h3>{escape(sample.title)}</h3>"]
    if sample.problem is not None:
        parts.append(f'<p class="problem">{escape(sample.problem)}</p>')
    parts += [f"<p>{escape(remark)}</p>" for remark in sample.remarks]
    if sample.counts:
        parts.append(f"<p>{escape(', '.join(f'{count:,} {what}' for what, count in sample.counts.items()))}</p>")
    if sample.tokens:
        parts.append(f"<pre>{''.join(map(_run_html, token_runs(sample.tokens)))}</pre>")
    return "".join([*parts, *map(_medium_html, sample.media)])


def _run_html(run: TokenRun) -> str:
    classes = [run.kind] * (run.kind != "text") + ["learned"] * run.is_learned
    if run.kind == "medium":
        inner = f'<i title="{run.tokens[0].id}">{escape(run.text)}</i>'
    else:
        inner = "".join(f'<i title="{token.id}">{_visible(token.text)}</i>' for token in run.tokens if token.text)
    return f'<span class="{" ".join(classes)}">{inner}</span>' if classes else inner


def _visible(text: str) -> str:
    """Escape a text, with a sign where its lines end: a line break is learned like any other token."""
    return escape(text).replace("\n", '<span class="break">↵</span>\n')


def _medium_html(medium: ShownMedium) -> str:
    pictures = "".join(map(_picture_html, medium.pictures))
    more = f"<p>and {medium.num_left_out:,} more</p>" if medium.num_left_out else ""
    problem = "" if medium.problem is None else f'<p class="problem">{escape(medium.problem)}</p>'
    caption = f"<figcaption><b>{escape(medium.title)}</b> {escape(medium.details)}</figcaption>"
    return f'<figure>{caption}<div class="pictures">{pictures}</div>{more}{problem}</figure>'


def _picture_html(pixels: Pixels) -> str:
    height, width = pixels.shape[:2]
    scale = max(1, _SMALLEST_SIDE_PX // max(1, min(width, height)))
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    address = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return f'<img alt="{width} x {height} pixels" width="{width * scale}" height="{height * scale}" src="{address}">'
