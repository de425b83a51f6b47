"""Print what a script measures, and with `--log` append it to the log in docs/measurements as an entry of today.

options = arguments(__doc__).parse_args()
report = start("Speed of the simulator", options)
report.table("what", "seconds")
report.row("first batch", "0.19")
"""

import argparse
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

KIB = 1024  # bytes in which Linux counts resident memory
LOG_FOLDER = Path(__file__).resolve().parents[1] / "docs" / "measurements"
T = TypeVar("T")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the script's docstring as it stands, and knows `--log`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", action="store_true", help="append what is measured to docs/measurements")
    return parser


@dataclass(frozen=True)
class Report:
    """Where the figures of a run go: to the terminal, and to an entry of the log where there is a file.

    Lines are written at once: what was measured before a run fails is kept, and ranks that a script forks can write.
    """

    file: Path | None = None

    def line(self, text: str = "") -> None:
        """Write a line; an empty one ends a table or a paragraph."""
        print(text, flush=True)
        self._append(text)

    def table(self, *columns: str) -> None:
        """Start a Markdown table; `line()` ends the one before."""
        self.row(*columns)
        self.line("|" + "---|" * len(columns))

    def row(self, *cells: object) -> None:
        """Write a row of the table."""
        self.line(f"| {' | '.join(map(str, cells))} |")

    def targets(self) -> None:
        """Start a table of figures beside their targets, whose rows `target` and `figure` write."""
        self.table("measure", "figure", "target", "verdict")

    def target(self, measure: str, figure: float, limit: float, *, at_least: bool = False) -> None:
        """Write the row of a figure that should be at most, or at least, the limit."""
        is_met = figure >= limit if at_least else figure <= limit
        self.row(measure, f"{figure:.5g}", f"{'>=' if at_least else '<='} {limit:g}", "met" if is_met else "missed")

    def figure(self, measure: str, figure: str) -> None:
        """Write the row of a figure without a target."""
        self.row(measure, figure, "-", "-")

    def _append(self, text: str) -> None:
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")


def start(title: str, options: argparse.Namespace, folder: Path = LOG_FOLDER) -> Report:
    """Print the machine, and with `--log` start an entry with title, machine and command in today's file."""
    report = Report()
    if options.log:
        today = time.strftime("%Y-%m-%d")
        report = Report(folder / f"{today}.md")
        report._append(f"\n## {title}\n" if report.file.exists() else f"# Measurements of {today}\n\n## {title}\n")
    report.line(f"* Machine: {machine()}")
    report.line(f"* Command: `{command(sys.argv)}`")
    report.line()
    return report


def machine() -> str:
    """Describe this machine, and the torch and the GPU of a script that has imported torch."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [
        f"{os.cpu_count()} {platform.machine()} cores, {memory_gib:.0f} GiB, load {os.getloadavg()[0]:.1f}",
        f"Python {platform.python_version()}",
    ]
    if torch := sys.modules.get("torch"):
        parts.append(f"torch {torch.__version__}")
        if torch.cuda.is_available():
            parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)


def command(argv: Sequence[str]) -> str:
    """Return the command line of this process without `--log`, and of absolute paths the last name alone."""
    words = [Path(word).name if word.startswith("/") else word for word in argv[1:] if word != "--log"]
    return shlex.join(["python", "-m", f"scripts.{Path(argv[0]).stem}", *words])


def least_seconds(work: Callable[[], T], times: int = 3) -> tuple[float, T]:
    """Run `work` several times; return the least processor seconds, and its result."""
    best = float("inf")
    for _ in range(times):
        start_s = time.process_time()
        result = work()
        best = min(best, time.process_time() - start_s)
    return best, result


def children_s() -> float:
    """Return the processor seconds of all child processes that have ended, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class ChildRun:
    """What a child process used until it ended."""

    exit_code: int
    processor_s: float
    clock_s: float
    peak_bytes: int  # of its resident memory


def run_child(command: Sequence[str]) -> ChildRun:
    """Run a command on one core, without its output; return what it used."""
    start_s = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    clock_s = time.perf_counter() - start_s
    return ChildRun(process.returncode, used.ru_utime + used.ru_stime, clock_s, used.ru_maxrss * KIB)


def set_options(settings: Iterable[str]) -> list[str]:
    """Return the arguments of `mmtrain` that change these settings of a recipe."""
    return [word for setting in settings for word in ("--set", setting)]
