"""What `make` says of the Python that it is given, before anything is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE_NO_ENVIRONMENT = 9  # what the Python of these tests answers when it is told to make one


def _python(folder: Path, version: tuple[int, int]) -> Path:
    """Write a Python that says that it is of a version, and makes no environment."""
    code = f"import sys; sys.version_info = {(*version, 0, 'final', 0)}; exec(sys.argv[1])"
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] || {{ echo "asked: $@"; exit {MADE_NO_ENVIRONMENT}; }}\n'
        f'exec {sys.executable} -c "{code}" "$2"\n'
    )
    path.chmod(0o755)
    return path


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Without what a make above has set, such as the one that started these tests.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version", [(2, 7), (3, 10), (3, 14), (3, 15)])
def test_a_python_that_was_not_tried_is_refused_in_a_sentence(version: tuple[int, int], tmp_path: Path) -> None:
    done = _make("install", f"PYTHON={_python(tmp_path, version)}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode
    expected = "mmtrain needs Python 3.11, 3.12 or 3.13, and this is {}.{}: make PYTHON=python3.13 ...".format(*version)
    assert expected in done.stderr.splitlines()
    assert "asked" not in done.stdout


@pytest.mark.parametrize("version", [(3, 11), (3, 12), (3, 13)])
def test_an_environment_is_made_anew_whatever_an_earlier_attempt_left(version: tuple[int, int], tmp_path: Path) -> None:
    done = _make("install", f"PYTHON={_python(tmp_path, version)}", f"VENV={tmp_path / 'venv'}")
    assert f"asked: -m venv --clear {tmp_path / 'venv'}" in done.stdout.splitlines()
    assert f"Error {MADE_NO_ENVIRONMENT}" in done.stderr


def test_the_second_environment_is_left_out_only_where_its_python_is_missing(tmp_path: Path) -> None:
    left_out = _make("test-b", "PYTHON_B=")
    assert (left_out.returncode, left_out.stderr) == (0, "")
    assert left_out.stdout.count("\n") == 1
    assert "there is no Python 3.12 here" in left_out.stdout
    failed = _make("test-b", f"PYTHON_B={_python(tmp_path, (3, 12))}", f"VENV_B={tmp_path / 'venv'}")
    assert failed.returncode
    assert f"asked: -m venv --clear {tmp_path / 'venv'}" in failed.stdout
