"""Resolve what `pip install mmtrain` takes on each system from wheels alone. Needs a package index.

    python -m scripts.resolve_platforms                # the core, on Linux, macOS and Windows
    python -m scripts.resolve_platforms --extra train  # with what training adds

Nothing is installed or run. pip reads conditions on the system (markers) as those of this one; on Windows, colorama and
others join, which are Python alone. A system for which a package has no wheel is a row with pip's message, and the exit
code is 1.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
# Tags of wheels, by pip: the oldest system that is asked for. PyYAML and others have Windows on ARM from 3.12 on alone.
PLATFORMS = {
    "Linux, x86-64": ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"),
    "Linux, ARM": ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"),
    "macOS 11, Apple silicon": ("macosx_11_0_arm64",),
    "macOS 11, Intel": ("macosx_11_0_x86_64", "macosx_10_13_x86_64", "macosx_10_12_x86_64", "macosx_10_9_x86_64"),
    "Windows, x86-64": ("win_amd64",),
}
PYTHONS = ("3.11", "3.12", "3.13")


def resolve(tags: tuple[str, ...], python: str, extra: str = "") -> list[str]:
    """Return the packages that pip would install, as `name version`; raises ValueError with pip's message."""
    project = f"{ROOT}[{extra}]" if extra else str(ROOT)
    options = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--python-version", python, "--target", "none"]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        platforms = [option for tag in tags for option in ("--platform", tag)]
        command = [sys.executable, "-m", "pip", "install", "-q", *options, *platforms, "--report", str(report), project]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise ValueError(" ".join(errors or done.stderr.split()[-40:]))
        found = [entry["metadata"] for entry in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return sorted(f"{entry['name']} {entry['version']}" for entry in found if entry["name"] != "mmtrain")


def main() -> int:
    """Print a table; return 1 if a system has not all packages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--extra", default="", help="Extra of mmtrain to resolve beside the core.")
    extra = parser.parse_args().extra
    print("| system | Python | packages, all as wheels |\n|---|---|---|")
    is_complete = True
    for system, tags in PLATFORMS.items():
        for python in PYTHONS:
            try:
                answer = str(len(resolve(tags, python, extra)))
            except ValueError as error:
                answer, is_complete = str(error), False
            print(f"| {system} | {python} | {answer} |", flush=True)
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
