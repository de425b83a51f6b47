"""Every test that docs/reliability.md names exists, and is a long run where the page says so."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`(\*?)")
NUM_PHASES = 5
DEFAULT_FILE = re.compile(r"Tests (?:without a file )?are in `(tests/[\w/]+\.py)`")


@cache
def _tests_of(path: str) -> dict[str, bool]:
    """Return the tests of a file, and whether all of their runs are in the slow tier."""
    body = ast.parse((ROOT / path).read_text()).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    are_all_slow = any(ast.unparse(node) == "pytestmark = pytest.mark.slow" for node in body)
    return {
        f.name: are_all_slow or any(ast.unparse(mark) == "pytest.mark.slow" for mark in f.decorator_list)
        for f in functions
    }


def test_every_named_test_exists_and_the_page_states_its_tier() -> None:
    named = []
    for section in re.split(r"^##+ ", PAGE, flags=re.MULTILINE):
        default = DEFAULT_FILE.search(section)
        for path, test, star in NAMED.findall(section):
            path = path or (default[1] if default else "")
            named.append((path, test))
            assert test in _tests_of(path), f"{path}::{test}"
            assert _tests_of(path)[test] == bool(star), f"{path}::{test} is marked in one place only"
    assert len(set(named)) > 25


def test_every_test_that_the_page_on_running_names_exists() -> None:
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    default = re.search(r"tests without a file are in `(tests/[\w/]+\.py)`", page)
    assert default is not None
    named = [(path or default[1], test) for path, test, _ in NAMED.findall(page)]
    assert len(named) > 10
    for path, test in named:
        assert test in _tests_of(path), f"{path}::{test}"


def test_every_cell_names_a_test_or_says_why_there_is_none() -> None:
    reasons = set(re.findall(r"^\* (\*[a-z ]+\*):", PAGE, flags=re.MULTILINE))
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    used = set()
    for fault, every_phase, *cells in rows:
        assert len(cells) == NUM_PHASES, fault
        if fault == "fault":
            continue
        assert NAMED.search(every_phase) or every_phase == "-", fault
        assert any(re.match(r"x\b", cell) for cell in cells) == (every_phase != "-"), fault
        for cell in cells:
            is_tested = NAMED.search(cell) or re.match(r"x\b", cell)
            assert is_tested or cell in reasons, f"{fault}: {cell}"
            used |= {cell} & reasons
    assert used == reasons
