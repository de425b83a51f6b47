"""Try the newest version of every dependency, and say what broke.

    python -m scripts.try_newest    # in an environment with `pip install -e '.[dev]'`, which it changes

First everything as pip resolves it, which is the newest within the bounds of pyproject.toml. Then one package at a time
whose newest version lies beyond its bounds, each taken back afterwards, so that a failure names its package. Each trial
runs the test suite without its long runs. The report is a table; in GitHub Actions it is the summary of the job.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from scripts.gpu.requirements import requirements

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = (  # the others need a GPU
    *("train", "transformers", "audio", "hf", "report", "heif", "video", "parquet", "serve", "remote"),
    *("notebook", "docs", "wandb", "mlflow", "trackio", "all", "dev"),
)
TESTS = ("pytest", "-q", "-n", "auto", "--dist", "loadfile", "-m", "not slow and not long")
MAX_FAILURES_SHOWN = 8
_BROKEN_TEST = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Trial:
    """What came of one version. `problem` is None if all tests passed."""

    what: str
    problem: str | None


def bounded_packages() -> dict[str, Requirement]:
    """Return the requirements of this Python and system by name, without mmtrain's own extras."""
    applicable = {}
    for requirement in map(Requirement, requirements(*EXTRAS)):
        if requirement.marker is None or requirement.marker.evaluate():
            applicable[requirement.name] = requirement
    return applicable


def broken_tests(output: str) -> str:
    """Return the tests that pytest's output names as failed, or its end if it names none."""
    names = _BROKEN_TEST.findall(output)
    if not names:
        return " ".join(output.split()[-40:])
    more = f" and {len(names) - MAX_FAILURES_SHOWN} more" if len(names) > MAX_FAILURES_SHOWN else ""
    return ", ".join(f"`{name}`" for name in names[:MAX_FAILURES_SHOWN]) + more


def report(trials: Sequence[Trial]) -> str:
    """Write the trials as a Markdown table."""
    rows = [f"| {trial.what} | {'passes' if trial.problem is None else trial.problem} |" for trial in trials]
    return "\n".join(["| tried | result |", "|---|---|", *rows]) + "\n"


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a module of this Python in the root of the tree, and take what it prints."""
    return subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT)


def newest_version(name: str) -> str:
    """Ask the package index for the newest version of a package that this Python can have."""
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-"]
    done = run(["pip", "install", *options, name])
    if done.returncode != 0:
        return ""
    return str(json.loads(done.stdout)["install"][0]["metadata"]["version"])


def try_installed(what: str) -> Trial:
    """Run the tests on what is installed."""
    done = run(TESTS)
    return Trial(what, None if done.returncode == 0 else broken_tests(done.stdout + done.stderr))


def try_beyond_bounds(requirement: Requirement, newest: str) -> Trial:
    """Install a version that pyproject.toml does not allow, run the tests, and take it back."""
    before = importlib.metadata.version(requirement.name)
    what = f"{requirement.name} {newest}, beyond `{requirement.specifier}`"
    installed = run(["pip", "install", "--quiet", f"{requirement.name}=={newest}"])
    if installed.returncode != 0:
        trial = Trial(what, "pip: " + " ".join(installed.stderr.split()[-40:]))
    else:
        trial = try_installed(what)
    run(["pip", "install", "--quiet", f"{requirement.name}=={before}"]).check_returncode()
    return trial


def main() -> None:
    """Run all trials; exit with 1 if one of them failed."""
    trials = [try_installed("the newest of everything within its bounds")]
    for name, requirement in bounded_packages().items():
        newest = newest_version(name)
        if not newest:
            trials.append(Trial(name, "the package index gives no version of it"))
        elif not requirement.specifier.contains(newest, prereleases=True):
            trials.append(try_beyond_bounds(requirement, newest))
    text = report(trials)
    print(text)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(text)
    sys.exit(any(trial.problem is not None for trial in trials))


if __name__ == "__main__":
    main()
