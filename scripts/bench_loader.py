"""Measure how long training waits for its data, prepared in line, by a thread, by worker processes or by a producer.

    python -m scripts.bench_loader recipes/llava_files.yaml --set data.sources.0.path=/data/mine/llava.json

Every way is the same run of the recipe on one rank, in a temporary folder; only `data.prefetch`, `data.workers` and
`data.producers` differ. Prints for the steps after the first fifth: the share of their time in which the training
process waited for data, the median step time, and samples per second; and for the whole run, processor seconds.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from mmtrain.report import read_metrics
from scripts.measurements import arguments, children_s, set_options, start

WAYS = {
    "in line": ["data.prefetch=0", "data.workers=0"],
    "thread": ["data.workers=0"],
    "1 worker": ["data.workers=1"],
    "2 workers": ["data.workers=2"],
    "producer": ["data.workers=0"],
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this way; repeatable")
    options = parser.parse_args()
    changes = [*options.changes, "cluster.ranks=1", "parallel.placement=unified"]
    report = start("Waiting for data", options)
    report.table("way", "waits", "step s", "samples/s", "processor s", "samples")
    for builder in options.way or WAYS:
        with tempfile.TemporaryDirectory() as folder:
            start_s = children_s()
            run = Path(folder) / "run"
            with producer(builder, options.recipe, changes) as more:
                train(options.recipe, [*changes, *WAYS[builder], *more], run)
            report.row(builder, *figures(run, children_s() - start_s))


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
    return [sys.executable, "-m", "mmtrain", *map(str, command[:-1]), *set_options(command[-1])]


def figures(run: Path, cpu_s: float) -> list[str]:
    """Return the cells of a run."""
    steps = read_metrics(run)
    steps = steps[len(steps) // 5 :]  # without those in which processes start
    total_s = sum(s["step_time_s"] for s in steps)
    waited = sum(s["time_s"]["data"] for s in steps) / total_s
    step_s = median(s["step_time_s"] for s in steps)
    samples = sum(s["samples"] for s in steps)
    rates = [f"{waited:.1%}", f"{step_s:.3f}", f"{samples / total_s:.1f}"]
    return [*rates, f"{cpu_s:.1f}", str(samples)]


if __name__ == "__main__":
    main()
