"""Write the section of docs/papers.md about miniatures, and its figure, from their record."""

import json
import operator
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.paper_data import DATA_FOLDER, ROOT

DATA_FILE, RECORD_FILE = DATA_FOLDER / "miniatures.yaml", DATA_FOLDER / "miniatures.json"
TEXT_FILE = DATA_FOLDER / "miniatures.md"
FIGURE = ROOT / "docs" / "papers_miniatures.svg"
Json = Mapping[str, Any]

# Pixels of the figure.
LABEL_WIDTH, BAR_WIDTH, BAR_HEIGHT, GAP, TITLE_HEIGHT, RIGHT = 190, 420, 9, 7, 24, 60


@dataclass(frozen=True)
class Case:
    """A case of a miniature: seconds for a sample, predicted and seen."""

    name: str
    layout: str
    predicted_s: float
    rounds_s: tuple[float, ...]  # trained, by round; of a rehearsal one
    waited_share: float | None  # of the time of a rank's threads, waiting for a core

    @classmethod
    def of(cls, row: Json) -> "Case":
        """Read a case of the record."""
        samples = sum(row["samples"])
        seen = [sum(each["core_s"]) for each in row.get("rounds", ())] or [_rehearsed_s(row)]
        shares = [share for each in row.get("rounds", ()) for share in each["waited_share"]]
        return cls(
            row["name"],
            row["layout"],
            sum(row["predicted_s"]) / samples,
            tuple(seconds / samples for seconds in seen),
            statistics.median(shares) if shares else None,
        )

    @property
    def seen_s(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds_s)


def _rehearsed_s(row: Json) -> float:
    """Return the seconds of the predicted steps if all replica groups took as much longer as the rehearsed one."""
    return float(sum(map(operator.mul, row["predicted_s"], row["rehearsed_ratio"])))


@dataclass(frozen=True)
class SpeedUp:
    """How many times as fast as a miniature's first case another one is."""

    case: Case
    predicted: float
    seen: float
    rounds: tuple[float, ...]  # by round


def speed_ups(part: Json) -> list[SpeedUp]:
    """Return the speed-up of each case of a miniature, the first one's being 1; rounds are compared in pairs."""
    cases = [Case.of(row) for row in part["cases"]]
    first = cases[0]
    result = []
    for case in cases:
        rounds = tuple(a / b for a, b in zip(first.rounds_s, case.rounds_s, strict=True))
        result.append(SpeedUp(case, first.predicted_s / case.predicted_s, statistics.median(rounds), rounds))
    return result


def load_record(file: Path = RECORD_FILE) -> Json:
    """Read the record."""
    content: Json = json.loads(file.read_text(encoding="utf-8"))
    return content


def miniatures_section(record_file: Path = RECORD_FILE) -> list[str]:
    """Return the lines of the section."""
    record = load_record(record_file)
    lines = ["## Miniatures that ran", "", *TEXT_FILE.read_text(encoding="utf-8").rstrip().splitlines(), ""]
    lines += [f"![Speed-ups of miniatures, predicted and seen]({FIGURE.name})", ""]
    asked = yaml.safe_load(DATA_FILE.read_text(encoding="utf-8"))["miniatures"]
    for name, part in record["miniatures"].items():
        lines += [*_miniature(part), "", asked[name]["finding"], ""]
    return lines[:-1]


def _miniature(part: Json) -> Iterator[str]:
    is_trained = "rounds" in part["cases"][0]
    rounds = len(part["cases"][0].get("rounds", ()))
    how = f"trained {rounds} {'time' if rounds == 1 else 'times'}" if is_trained else "rehearsed"
    yield f"### {part['title']}"
    yield ""
    yield f"{part['ranks']} ranks, {how} on {part['date']}; lengths of `{part['paper']}`. {part['machine']}."
    yield ""
    yield _ratios(part["ratios"])
    yield ""
    seen = "trained" if is_trained else "rehearsed"
    yield f"| case | plan | predicted, ms a sample | {seen} | predicted speed-up | {seen} | waited for a core |"
    yield "|---|---|---|---|---|---|---|"
    for speed_up in speed_ups(part):
        case = speed_up.case
        spread = f" ({min(speed_up.rounds):.2f} to {max(speed_up.rounds):.2f})" if len(speed_up.rounds) > 1 else ""
        waited = "-" if case.waited_share is None else f"{case.waited_share:.0%}"
        seconds = f"{case.predicted_s * 1e3:.1f} | {case.seen_s * 1e3:.1f}"
        ratios = f"{speed_up.predicted:.2f}x | {speed_up.seen:.2f}x{spread}"
        yield f"| {case.name} | {case.layout} | {seconds} | {ratios} | {waited} |"


def _ratios(ratios: Json) -> str:
    """Say how the units' FLOPs relate, in the paper's recipe and in the miniature."""
    texts = []
    for unit, paper in ratios["paper"].items():
        own = ratios["miniature"].get(unit)
        here = f"{own['flops']:.2f}, {own['items']:.2f}" if own is not None else "left out"
        texts.append(f"{unit} {paper['flops']:.2f}, {paper['items']:.2f} (here {here})")
    return f"FLOPs over the LLM's and items a sample: {'; '.join(texts)}."


def miniatures_figure(record: Json) -> str:
    """Return the figure as SVG: a bar for each predicted and each seen speed-up, grouped by miniature."""
    parts = [(part, speed_ups(part)) for part in record["miniatures"].values()]
    scale = BAR_WIDTH / max(max(s.predicted, s.seen) for _, rows in parts for s in rows)
    marks: list[str] = []
    top = TITLE_HEIGHT
    for part, rows in parts:
        marks.append(f'<text x="4" y="{top}" font-weight="bold">{part["title"]}</text>')
        top += GAP
        for row in rows:
            marks += _bars(row, top, scale)
            top += 2 * BAR_HEIGHT + GAP
        top += TITLE_HEIGHT
    legend = (
        '<text x="4" y="0"><tspan fill="#8fa8c8">■</tspan> predicted by the simulator '
        '<tspan fill="#1f5fa8">■</tspan> trained or rehearsed</text>'
    )
    width = LABEL_WIDTH + BAR_WIDTH + RIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -16 {width} {top}" width="{width}" '
        f'font-family="sans-serif" font-size="11">\n<rect y="-16" width="{width}" height="{top}" fill="white"/>\n'
        f"{legend}\n" + "\n".join(marks) + "\n</svg>\n"
    )


def _bars(row: SpeedUp, top: int, scale: float) -> Sequence[str]:
    name = f'<text x="{LABEL_WIDTH - 8}" y="{top + BAR_HEIGHT + 3}" text-anchor="end">{row.case.name}</text>'
    bars = []
    for number, (value, color) in enumerate(((row.predicted, "#8fa8c8"), (row.seen, "#1f5fa8"))):
        y = top + number * BAR_HEIGHT
        bars.append(
            f'<rect x="{LABEL_WIDTH}" y="{y}" width="{value * scale:.1f}" height="{BAR_HEIGHT - 1}" fill="{color}"/>'
        )
        bars.append(f'<text x="{LABEL_WIDTH + value * scale + 4:.1f}" y="{y + 8}" font-size="9">{value:.2f}x</text>')
    return [name, *bars]
