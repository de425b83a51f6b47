"""Every test that docs/reliability.md names exists, and is a long run where the page says so."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`(\*?)")
DEFAULT_FILE = re.compile(r"Tests (?:without a file )?are in `(tests/[\w/]+\.py)`")


def _tests_of(path: str) -> dict[str, bool]:
    """Return the tests of a file, and whether all of their runs are in the slow tier."""
    functions = [node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
    return {f.name: any(ast.unparse(mark) == "pytest.mark.slow" for mark in f.decorator_list) for f in functions}


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


def test_every_row_has_all_phases() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert {line.count(" | ") for line in rows if not line.startswith("|-")} == {5}
