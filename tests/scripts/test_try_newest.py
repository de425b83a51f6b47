"""The weekly trial covers every dependency, and its report names the tests that broke."""

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from scripts.try_newest import EXTRAS, Trial, bounded_packages, broken_tests, report

ROOT = Path(__file__).parents[2]
NEEDS_GPU = {"cuda", "flash-attn"}


def test_every_dependency_is_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert {*EXTRAS} == extras.keys() - NEEDS_GPU
    listed = [*project["dependencies"], *(text for extra in EXTRAS for text in extras[extra])]
    assert bounded_packages().keys() == {Requirement(text).name for text in listed} - {"mmtrain"}


def test_failures_of_pytest_are_named(tmp_path: Path) -> None:
    """pytest itself writes the output, one failure in a test and one in a fixture."""
    (tmp_path / "test_broken.py").write_text(
        "import pytest\n\n@pytest.fixture\ndef bad():\n    raise OSError\n\n"
        "def test_one():\n    assert 1 == 2\n\ndef test_two(bad):\n    pass\n\ndef test_three():\n    pass\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert broken_tests(done.stdout) == "`test_broken.py::test_one`, `test_broken.py::test_two`"


def test_output_without_names_is_shown_by_its_end() -> None:
    assert broken_tests("ImportError: no module named\ntorch") == "ImportError: no module named torch"


def test_the_report_is_a_table() -> None:
    trials = [Trial("numpy 3.0, beyond `<3,>=2.1`", "`tests/a.py::test_b`"), Trial("rich 16", None)]
    assert report(trials).splitlines()[2:] == [
        "| numpy 3.0, beyond `<3,>=2.1` | `tests/a.py::test_b` |",
        "| rich 16 | passes |",
    ]
