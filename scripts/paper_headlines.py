"""Say of every headline what our plans say, whether the paper's order is kept, and what the order depends on."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scripts.paper_data import PAPERS, Headline, Measure, Papers
from scripts.paper_figures import gpu_days_of
from scripts.paper_record import Entry, Figures, Record

NOT_PLANNED = "not planned yet"
EQUAL = 1.01  # as in plans: predicted figures that differ by less are called equal
MAX_LINE = 120  # characters
MAX_REFUSAL = 160  # characters of a refusal in a table; the page of commands has all of it

# What a headline compares, and whether more is better.
_MEASURES: dict[Measure, tuple[Callable[[Figures], float], str, bool]] = {
    "step": (lambda figures: float(figures["step_s"]), "{:.2f} s", False),
    "gpu_days": (lambda figures: gpu_days_of(figures, ""), "{:.1f} GPU-days", False),
    "mfu": (lambda figures: float(figures["mfu"]) * 100, "{:.1f}%", True),
    "tokens": (lambda figures: float(figures["tokens_per_s_per_gpu"]), "{:,.0f} tokens/s/GPU", True),
}


@dataclass(frozen=True)
class Gain:
    """A row of a headline's picture."""

    what: str  # `paper`, `ours`, or what an experiment changes
    values: tuple[float, ...]  # one, or the least and the most; of a fact the fact itself


def paper_title(paper: str) -> str:
    """Return the paper's name as the page has it, such as `OmniBal`."""
    return PAPERS[paper].partition(" ")[0]  # type: ignore[index]


def short_refusal(text: str) -> str:
    """Cut a refusal for a table's cell."""
    text = text.replace("|", "/")
    return text if len(text) <= MAX_REFUSAL else f"{text[: MAX_REFUSAL - 4]} ..."


def headline_lines(headline: Headline, papers: Papers, record: Record, picture: str) -> Iterator[str]:
    """Yield a headline's section: figures with a verdict, the reason, the picture and the experiments."""
    ours, reason = headline_answer(headline, _entries(headline, headline.slower, headline.faster, papers, record))
    yield f"### {paper_title(headline.paper)}: {headline.what}"
    yield ""
    yield f"Paper: {headline.published}. Ours: {ours}."
    if reason:
        yield ""
        yield from textwrap.wrap(reason.strip(), MAX_LINE)
    if headline_gains(headline, papers, record) is not None:
        yield ""
        yield f"![{headline.what}: the paper's gain and ours]({picture})"
    if headline.experiments:
        yield ""
        yield "| changed | slower | faster | gain |"
        yield "|---|---|---|---|"
        for experiment in headline.experiments:
            entries = _entries(headline, experiment.slower, experiment.faster, papers, record)
            yield f"| {experiment.what} | {' | '.join(_experiment_cells(headline, entries))} |"
    yield ""


def overview_lines(papers: Papers, record: Record) -> Iterator[str]:
    """Yield a table of all headlines: what the paper states, and what ours says to its order."""
    yield "| headline | paper | ours |"
    yield "|---|---|---|"
    for headline in papers.headlines:
        ours, _ = headline_answer(headline, _entries(headline, headline.slower, headline.faster, papers, record))
        yield f"| {paper_title(headline.paper)}: {headline.what} | {headline.published} | {ours} |"
    yield ""


def _entries(headline: Headline, slower: str, faster: str, papers: Papers, record: Record) -> list[Entry | None]:
    """Return the answers to two runs of the headline's paper."""
    names = [f"{headline.paper}/{name}" for name in (slower, faster)]
    return [record.entry(name, papers.runs[name]) for name in names]


def _experiment_cells(headline: Headline, entries: Sequence[Entry | None]) -> list[str]:
    gain = _gain(headline, entries)
    return [*(_figure_text(headline, entry) for entry in entries), "-" if gain is None else f"{gain:.2f}x"]


def _figure_text(headline: Headline, entry: Entry | None) -> str:
    """Return a run's figure in the headline's measure."""
    if entry is None:
        return NOT_PLANNED
    if entry.refused is not None:
        return f"refused: {short_refusal(entry.refused)}"
    value, form, _ = _MEASURES[headline.figure]
    return form.format(value(entry.figures))


def headline_answer(headline: Headline, entries: Sequence[Entry | None]) -> tuple[str, str]:
    """Return our figures of a headline's two systems with a verdict on their order, and the reason."""
    if any(entry is None for entry in entries):
        return NOT_PLANNED, ""
    refusals = [entry.refused for entry in entries if entry is not None and entry.refused is not None]
    if refusals:
        return f"refused ({short_refusal(refusals[0])})", ""
    value, form, _ = _MEASURES[headline.figure]
    slower, faster = (value(entry.figures) for entry in entries if entry is not None)
    if headline.is_fact:
        return form.format(faster), headline.kept
    gain = _gain(headline, entries)
    assert gain is not None, "both runs have figures"
    figures = f"{form.format(slower)} -> {form.format(faster)}, {gain:.2f}x"
    if gain > EQUAL:
        return f"{figures}, the paper's order", headline.kept
    verdict = "the order is reversed" if gain < 1 / EQUAL else "equal within 1%"
    return f"{figures}, {verdict}", headline.reversed


def headline_gains(headline: Headline, papers: Papers, record: Record) -> list[Gain] | None:
    """Return the rows of a headline's picture; None if its own runs have no figures."""
    paper = [] if headline.gain is None else [Gain("paper", headline.gain)]
    rows = [("ours", headline.slower, headline.faster)]
    rows += [(experiment.what, experiment.slower, experiment.faster) for experiment in headline.experiments]
    ours = []
    for what, slower, faster in rows:
        gain = _gain(headline, _entries(headline, slower, faster, papers, record))
        if gain is not None:
            ours.append(Gain(what, (gain,)))
    return [*paper, *ours] if ours and ours[0].what == "ours" else None


def _gain(headline: Headline, entries: Sequence[Entry | None]) -> float | None:
    """Return how many times better the second entry is, or the fact of a headline that compares nothing."""
    if any(entry is None or entry.refused is not None for entry in entries):
        return None
    value, _, more_is_better = _MEASURES[headline.figure]
    slower, faster = (value(entry.figures) for entry in entries if entry is not None)
    if headline.is_fact:
        return faster
    return faster / slower if more_is_better else slower / faster
