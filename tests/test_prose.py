"""Pages are written for a reader who reads fast: short sentences, headings close together, tables of facts.

To cover another page, add its path to PAGES and run this file: it prints every place that is too long.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    "AGENTS.md",
    "README.md",
    "CONTRIBUTING.md",
    "docs/data.md",
    "docs/glossary.md",
    "docs/gpu.md",
    "docs/planning.md",
    "docs/python.md",
    "docs/tutorial.md",
    "docs/architecture.md",
    "docs/benchmarks.md",
    "docs/models.md",
    "docs/guests.md",
    "docs/papers.md",
    "docs/reliability.md",
    "docs/running.md",
]
MAX_WORDS_PER_SENTENCE = 30
MAX_LINES_BETWEEN_HEADINGS = 45
MAX_CHARACTERS_PER_CELL = 200
CODE = re.compile(r"`[^`]+`")
NAME_OF_TEST = re.compile(r"`(?:tests/|test_)[^`]+`")
LIST_ITEM = re.compile(r"\s*(?:[*-]|\d+\.) ")


def prose_blocks(page: str) -> Iterator[tuple[int, str]]:
    """Yield the first line's number and the text of every paragraph and list item; leave out code, tables, headings.

    Lines of code are indented by four spaces, or fenced. Inside a list item they are indented by more than that.
    """
    first_line, lines, is_item, is_fenced = 0, [], False, False
    for number, line in enumerate([*page.splitlines(), ""], start=1):
        is_code = is_fenced or line.lstrip().startswith("```")
        is_fenced ^= line.lstrip().startswith("```")
        is_code |= line.startswith("    ") and not (lines and is_item)
        starts_item = bool(LIST_ITEM.match(line)) and not is_code
        ends = not line.strip() or is_code or line.startswith(("#", "|")) or starts_item
        if ends and lines:
            yield first_line, " ".join(lines)
            lines = []
        if starts_item or not ends:
            if not lines:
                first_line, is_item = number, starts_item
            lines.append(LIST_ITEM.sub("", line, count=1) if starts_item else line.strip())


def sentences(block: str) -> list[str]:
    """Split a paragraph into sentences; code counts as one word, and of a link its text only."""
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", CODE.sub("CODE", block)).replace("**", "")
    return re.split(r"(?<=[.!?])[)\"*]*\s+(?=[\"*(]*[A-Z0-9])", text)


def cells(page: str) -> Iterator[tuple[int, str]]:
    """Yield the line's number and the text of every cell of every table, without the names of tests, which are long."""
    for number, line in enumerate(page.splitlines(), start=1):
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                yield number, NAME_OF_TEST.sub("", cell).strip()


def sections(page: str) -> Iterator[tuple[int, int]]:
    """Yield for every heading its line's number and how many lines follow until the next one, without those of code."""
    heading, num_lines, is_fenced = 1, 0, False
    for number, line in enumerate(page.splitlines(), start=1):
        is_fenced ^= line.startswith("```")
        if re.match(r"#+ ", line) and not is_fenced:
            yield heading, num_lines
            heading, num_lines = number, 0
        num_lines += not (is_fenced or line.startswith("    "))
    yield heading, num_lines


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return (ROOT / request.param).read_text(encoding="utf-8")


def test_sentences_are_short(page: str) -> None:
    long = [
        f"line {number}: {words} words: {sentence}"
        for number, block in prose_blocks(page)
        for sentence in sentences(block)
        if (words := len(re.findall(r"\w[\w'’/.,:-]*", sentence))) > MAX_WORDS_PER_SENTENCE
    ]
    assert long == []


def test_headings_are_close_together(page: str) -> None:
    assert [(start, lines) for start, lines in sections(page) if lines > MAX_LINES_BETWEEN_HEADINGS] == []


def test_cells_of_tables_hold_facts(page: str) -> None:
    long = [f"line {number}: {cell}" for number, cell in cells(page) if len(cell) > MAX_CHARACTERS_PER_CELL]
    assert long == []
