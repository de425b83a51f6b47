"""A run of tests ends within the minutes that it is given."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("minutes", "outcome"), [("0", "1 skipped"), ("60", "1 passed")])
def test_tests_that_come_too_late_are_left_out_and_named(minutes: str, outcome: str) -> None:
    test = "tests/test_structure.py::test_the_cycle_finder_finds_cycles"
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", f"--minutes={minutes}", test]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome in done.stdout, done.stdout + done.stderr
    assert ("the 0 minutes of this run were over" in done.stdout) == (minutes == "0")
