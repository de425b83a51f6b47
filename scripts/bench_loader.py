"""Measure how long training waits for its data, prepared in line, by a thread, by worker processes or by a producer.

    python scripts/bench_loader.py recipes/llava_files.yaml --set data.sources.0.path=/data/mine/llava.json

Every way is the same run of the recipe on one rank, in a temporary folder; only `data.prefetch`, `data.workers` and
`data.producers` differ. Prints for the steps after the first fifth: the share of their time in which the training
process waited for data, the median step time, and samples per second; and for the whole run, processor seconds.
"""

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from mmtrain.report import read_metrics

WAYS = {
    "in line": ["data.prefetch=0", "data.workers=0"],
    "thread": ["data.workers=0"],
    "1 worker": ["data.workers=1"],
    "2 workers": ["data.workers=2"],
    "producer": ["data.workers=0"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this way; repeatable")
    arguments = parser.parse_args()
    changes = [*arguments.changes, "cluster.ranks=1", "parallel.placement=unified"]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{'way':<10}  {'waits':>6}  {'step s':>7}  {'samples/s':>9}  {'CPU s':>6}  {'samples':>7}")
    for builder in arguments.way or WAYS:
        with tempfile.TemporaryDirectory() as folder:
            start_s = processor_s()
            run = Path(folder) / "run"
            with producer(builder, arguments.recipe, changes) as more:
                train(arguments.recipe, [*changes, *WAYS[builder], *more], run)
            report(builder, run, processor_s() - start_s)


@contextmanager
def producer(builder: str, recipe: str, changes: list[str]) -> Iterator[list[str]]:
    """Start a producer on this machine for the way that needs one; yields the settings of the trainer."""
    if builder != "producer":
        yield []
        return
    command = [*mmtrain("data", "serve", recipe, changes), "--bind", "tcp://127.0.0.1:*", "--workers", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield [f"data.producers=[{process.stdout.readline().split()[-1]}]"]
        process.terminate()


def train(recipe: str, changes: list[str], run: Path) -> None:
    done = subprocess.run(
        [*mmtrain("train", recipe, changes), "--run-dir", str(run)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def mmtrain(*command: str | list[str]) -> list[str]:
    """Return a command line; the last argument is a list of settings."""
    settings = [word for setting in command[-1] for word in ("--set", setting)]
    return [sys.executable, "-m", "mmtrain", *map(str, command[:-1]), *settings]


def processor_s() -> float:
    """Return the processor seconds of all child processes that have ended, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report(builder: str, run: Path, cpu_s: float) -> None:
    steps = read_metrics(run)
    steps = steps[len(steps) // 5 :]  # without those in which processes start
    total_s = sum(s["step_time_s"] for s in steps)
    waited = sum(s["time_s"]["data"] for s in steps) / total_s
    step_s = median(s["step_time_s"] for s in steps)
    samples = sum(s["samples"] for s in steps)
    line = f"{builder:<10}  {waited:>6.1%}  {step_s:>7.3f}  {samples / total_s:>9.1f}  {cpu_s:>6.1f}  {samples:>7}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
