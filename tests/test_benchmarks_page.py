"""docs/benchmarks.md says "met" where a figure meets its target and only there, and names commands that exist."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command

from mmtrain.cli.app import app

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
LOG = sorted((ROOT / "docs" / "measurements").iterdir())
COLUMNS = ["measure", "figure", "target", "verdict", "command"]
MAX_LINES = 200
MAX_WORDS_OF_A_SENTENCE = 30
NUMBER = r"-?[\d,]*\.?\d+"
VALUE = re.compile(rf"(?P<low>{NUMBER})(?: to (?P<high>{NUMBER}))? ?(?P<unit>.*)")
TARGET = re.compile(r"(?P<sign><=|>=)? ?(?:(?P<percent>\d+)% of )?(?P<value>.*)")


@dataclass(frozen=True)
class Value:
    """One figure: the least and the largest number of a range, which are equal for a single one."""

    low: float
    high: float
    unit: str


@dataclass(frozen=True)
class Target:
    """What one figure must keep to: a limit, or both limits of a range."""

    sign: str  # "" where the figure must lie within the value
    value: Value

    def is_met_by(self, figure: Value) -> bool:
        """Compare; raises ValueError where the units differ."""
        if figure.unit != self.value.unit:
            raise ValueError(f"the figure is in {figure.unit!r}, its target in {self.value.unit!r}")
        if self.sign == "<=":
            return figure.high <= self.value.high
        if self.sign == ">=":
            return figure.low >= self.value.low
        return self.value.low <= figure.low and figure.high <= self.value.high


def read_value(text: str) -> Value:
    """Read `1.08 to 1.14`, `6.5 ms` or `19 of 20`, whose unit is `of 20`; raises ValueError without a number."""
    match = VALUE.fullmatch(text)
    if match is None:
        raise ValueError(f"no figure: {text!r}")
    low = float(match["low"].replace(",", ""))
    high = float(match["high"].replace(",", "")) if match["high"] else low
    return Value(low, high, match["unit"])


def read_values(text: str) -> list[Value]:
    """Read values divided by ` / `; those without a unit have the last one's."""
    values = [read_value(part) for part in text.split(" / ")]
    return [Value(value.low, value.high, value.unit or values[-1].unit) for value in values]


def read_targets(text: str) -> list[Target]:
    """Read `<= 0.2 / <= 2 s`, `1.00 to 1.15`, or `>= 80% of 10.2%`."""
    matches = [TARGET.fullmatch(part) for part in text.split(" / ")]
    values = read_values(" / ".join(match["value"] for match in matches if match))
    targets = []
    for match, value in zip(matches, values, strict=True):
        assert match is not None
        share = int(match["percent"] or 100) / 100
        targets.append(Target(match["sign"] or "", Value(share * value.low, share * value.high, value.unit)))
    return targets


def meets(figure: str, target: str) -> bool:
    """Say whether a figure meets its target; a target in words is met by the same words.

    Raises:
        ValueError: the figure cannot be read, or it and the target differ in units or in their number of values.
    """
    if not re.search(r"\d", target):
        return figure == target
    are_met = []
    for figure_half, target_half in zip(figure.split(" in "), target.split(" in "), strict=True):
        values, targets = read_values(figure_half), read_targets(target_half)
        if len(targets) == 1:
            targets *= len(values)
        are_met += [one.is_met_by(value) for one, value in zip(targets, values, strict=True)]
    return all(are_met)


def expected_verdict(figure: str, target: str) -> str:
    """Return what the page must say."""
    if target == "-":
        return "-"
    return "met" if meets(figure, target) else "missed"


def page_rows() -> list[list[str]]:
    """Return the cells of all rows under the tables' headers."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    tables = [line.strip("| ").split(" | ") for line in lines if not line.startswith("|---")]
    return [cells for cells in tables if cells != COLUMNS]


@pytest.mark.parametrize("cells", page_rows(), ids=lambda cells: " ".join(cells[0].split()[:6]))
def test_a_row_says_met_where_the_figure_meets_its_target_and_only_there(cells: list[str]) -> None:
    _, figure, target, verdict, _ = cells
    assert verdict == expected_verdict(figure, target)


@pytest.mark.parametrize("command", sorted({cells[-1].strip("`") for cells in page_rows()}))
def test_every_command_is_of_a_script_that_exists_with_these_options(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "python":
        module = words[1]
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert words[0] == "-m"
        assert [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in text] == []
    elif program == "mmtrain":
        command_of = get_command(app).commands[words[0]]  # type: ignore[attr-defined]
        recipe = command_of.make_context(words[0], words[1:]).params["recipe"]
        assert (ROOT / recipe).is_file()
    else:
        assert program == "make"
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_page_is_short_and_its_sentences_too() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert len(page_rows()) > 60
    prose = "\n".join("" if line.startswith(("|", "#", "* ")) else line for line in text.splitlines())
    sentences = re.split(r"\n\n|(?<=[.:])\s", prose)
    assert [sentence for sentence in sentences if len(sentence.split()) > MAX_WORDS_OF_A_SENTENCE] == []


@pytest.mark.parametrize(
    ("figure", "target", "verdict"),
    [
        ("1.08 to 1.14", "1.00 to 1.15", "met"),
        ("1.08 to 1.16", "1.00 to 1.15", "missed"),
        ("0.99 to 1.14", "1.00 to 1.15", "missed"),
        ("0.904 in 8.1 ms", ">= 0.9 in <= 10 ms", "met"),
        ("0.904 in 12 ms", ">= 0.9 in <= 10 ms", "missed"),
        ("0.06 / 0.92 s", "<= 0.2 / <= 2 s", "met"),
        ("0.06 / 2.1 s", "<= 0.2 / <= 2 s", "missed"),
        ("13 / 37 to 46 ms", "<= 45 ms", "missed"),
        ("23,500 to 23,700", ">= 20,000", "met"),
        ("19 of 20", "20 of 20", "missed"),
        ("7.1%", ">= 80% of 10.6%", "missed"),
        ("9.9%", ">= 80% of 10.2%", "met"),
        ("-0.04 to 0.51%", "-5 to 5%", "met"),
        ("bit-equal", "bit-equal", "met"),
        ("28 s", "a few seconds", "missed"),
        ("96.7%", "-", "-"),
    ],
)
def test_the_reader_finds_the_verdict(figure: str, target: str, verdict: str) -> None:
    assert expected_verdict(figure, target) == verdict


@pytest.mark.parametrize(
    ("figure", "target"),
    [("8 s", "<= 10 ms"), ("quick", "<= 10 ms"), ("1 / 2 / 3", "<= 1 / <= 2"), ("1", "<= 1 in <= 2 s")],
)
def test_the_reader_rejects_what_cannot_be_compared(figure: str, target: str) -> None:
    with pytest.raises(ValueError, match=r"unit|is in|figure|zip"):
        expected_verdict(figure, target)


@pytest.mark.parametrize("file", LOG, ids=lambda file: file.stem)
def test_every_entry_of_the_log_has_a_machine_and_a_command(file: Path) -> None:
    heading, *entries = re.split(r"^## .+$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", file.stem)
    assert heading.strip() == f"# Measurements of {file.stem}"
    assert entries != []
    for entry in entries:
        assert re.match(r"\n\n\* Machine: .+\n\* Command: .+\n\n.", entry), entry[:200]
