"""The versions that pyproject.toml allows are those of which docs/decisions/foundations.md says where they ran."""

import re
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAMED_BY_DATE = {"packaging", "fsspec"}  # their numbers promise nothing, so a next major version says nothing


def _requirements() -> Iterator[Requirement]:
    """Yield what mmtrain and its extras require, without what only development needs, and without extras of extras."""
    of_extras = [needed for extra, needed in PROJECT["optional-dependencies"].items() if extra != "dev"]
    for requirement in map(Requirement, chain(PROJECT["dependencies"], *of_extras)):
        if requirement.name != "mmtrain":
            yield requirement


def _rows() -> dict[str, tuple[str, str, str]]:
    text = (ROOT / "docs/decisions/foundations.md").read_text(encoding="utf-8")
    table = text.partition("| package | bounds |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name: (bounds, lowest, newest) for name, bounds, lowest, newest in cells}


def test_each_bound_is_in_the_table_and_was_run() -> None:
    bounds: dict[str, list[str]] = {}
    for requirement in _requirements():
        bounds.setdefault(requirement.name, []).append(str(requirement.specifier))
    rows = _rows()
    assert rows.keys() == bounds.keys()
    for name, specifiers in bounds.items():
        stated, lowest, newest = rows[name]
        assert set(map(SpecifierSet, stated.split(" or "))) == set(map(SpecifierSet, specifiers)), name
        for text in (lowest, newest):
            if ran := re.match(r"\d[\w.]*", text):
                assert any(SpecifierSet(s).contains(Version(ran[0]), prereleases=True) for s in specifiers), (
                    name,
                    text,
                )
            else:
                assert text in ("the same", "never run", "never run: it needs a GPU"), (name, text)


@pytest.mark.parametrize("requirement", list(_requirements()), ids=str)
def test_each_package_has_a_lower_and_an_upper_bound(requirement: Requirement) -> None:
    operators = {specifier.operator for specifier in requirement.specifier}
    expected = {">="} if requirement.name in NAMED_BY_DATE else {">=", "<"}
    assert operators in (expected, {"=="})


def test_pins_of_the_environments_are_allowed() -> None:
    allowed = {requirement.name: requirement for requirement in _requirements()}
    for name in ("constraints.txt", "constraints-b.txt"):
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
            pin = Requirement(line.partition("#")[0] or "none")
            if pin.name in allowed and allowed[pin.name].marker is None:
                [version] = pin.specifier
                assert allowed[pin.name].specifier.contains(version.version), line
