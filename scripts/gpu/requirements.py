"""Which packages are missing here, found before anything is imported that needs them."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Of the development packages: what the tests of block 1 import.
OF_TESTS = ("pytest", "hypothesis")


def missing_packages() -> list[str]:
    """Return the requirements of mmtrain that are not installed, as `pyproject.toml` states them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [requirement for requirement in project["dependencies"] if not _is_installed(requirement)]


def missing_test_packages() -> list[str]:
    """Return what the tests need and is not installed."""
    return [name for name in OF_TESTS if not _is_installed(name)]


def _is_installed(requirement: str) -> bool:
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
