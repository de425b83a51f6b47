"""Which packages are missing here or have other versions, found before anything is imported that needs them."""

import importlib.metadata
import os
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Of the development packages: what the tests import that need a GPU.
OF_TESTS = ("pytest", "hypothesis")


def requirements(*extras: str) -> list[str]:
    """Return the requirements of mmtrain and of these extras as `pyproject.toml` states them, extras of extras not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [requirement for group in groups for requirement in group if not requirement.startswith("mmtrain[")]


def missing_packages() -> list[str]:
    """Return what training needs and is not installed."""
    return [requirement for requirement in requirements("train") if not _is_installed(requirement)]


def versions_out_of_bounds() -> list[str]:
    """Return the packages whose version here was never run with mmtrain, each with the bounds."""
    from packaging.requirements import Requirement  # it may be missing itself

    outside = []
    for requirement in map(Requirement, requirements("train")):
        applies = requirement.marker is None or requirement.marker.evaluate()
        version = importlib.metadata.version(requirement.name)
        if applies and not requirement.specifier.contains(version, prereleases=True):
            outside.append(f"{requirement.name} {version} ({requirement.specifier})")
    return outside


def use_folders_of_target_installs() -> None:
    """Let this process and those that it starts import FlashAttention-4's compiler from `pip install --target`.

    nvidia-cutlass-dsl adds the folder to the path by a `.pth` file, which Python reads in folders of its own only.
    """
    for entry in list(sys.path):
        packages = str(Path(entry or ".").absolute() / "nvidia_cutlass_dsl" / "dsl_packages")
        if Path(packages).is_dir() and packages not in sys.path:
            sys.path.append(packages)
            paths = [*filter(None, [os.environ.get("PYTHONPATH")]), packages]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)


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
