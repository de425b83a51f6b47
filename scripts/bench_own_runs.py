"""Compare predicted with measured steps of mmtrain's own runs on two processor cores, as users start them.

    python -m scripts.bench_own_runs                                  # beside the seconds that are recorded
    python -m scripts.bench_own_runs --measure [--only NAME]          # beside those of this machine, now
    python -m scripts.bench_own_runs --measure --write --log          # and record them: on idle cores alone

`scripts/own_runs.yaml` lists the runs. Each is predicted by the cost table that mmtrain ships, and measured as `mmtrain
train` runs it: with its loader, its threads and its metrics, on as many cores as ranks. The measured figure is the
median step after the first fifth.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from mmtrain.data import build_index
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.recipe import load_recipe
from mmtrain.report import read_metrics
from scripts.measurements import Report, arguments, machine, set_options, start
from scripts.plans import fastest_plan

ROOT = Path(__file__).resolve().parents[1]
RUNS_FILE = Path(__file__).with_name("own_runs.yaml")
MEASURED_FILE = RUNS_FILE.with_suffix(".json")
NUM_RANKS = 2
DEMO_SAMPLES = 1000  # of the demo's 10,000, whose lengths are alike
MAX_LOAD = 0.5  # of the last minute, of a machine whose figures are recorded


@dataclass(frozen=True)
class OwnRun:
    """A run of mmtrain itself."""

    name: str
    recipe: str  # path in this repository
    steps: int  # to train where it is measured
    settings: Mapping[str, Any]  # dotted keys, on top of the recipe's

    def settings_on(self, folder: Path) -> list[str]:
        """Return the recipe's changes as KEY=VALUE, with the data that `draw_data` drew in `folder`."""
        of_data = {
            "data.sources": [{"path": str(folder / "train.json")}],
            "data.validation": [],
            "data.tokenizer": str(folder / "tokenizer.json"),
            "train.validate_every": 0,
            "cluster.ranks": NUM_RANKS,
        }
        return [f"{key}={json.dumps(value)}" for key, value in {**self.settings, **of_data}.items()]


@dataclass(frozen=True)
class Measurement:
    """What a step of a run took."""

    seconds: float
    machine: str  # and when


def main() -> None:
    """Print a row for each run; with `--write` also record what is measured."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="runs whose names have these words")
    parser.add_argument("--measure", action="store_true", help="train the runs here")
    parser.add_argument("--write", action="store_true", help="record what is measured")
    options = parser.parse_args()
    _check(parser, options)
    report = start("Own runs on two cores", options)
    runs = [run for run in own_runs() if options.only in run.name]
    measured = measured_runs()
    here = f"{machine()}, {time.strftime('%Y-%m-%d')}"  # with the load before the first run
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw_data(folder)
        if options.measure:
            measured |= {run.name: Measurement(measured_seconds(run, folder), here) for run in runs}
        _report_runs(report, runs, measured, folder)
    if options.write:
        write_measured(measured)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program where its options say too little, or where the machine is not fit to be recorded."""
    if options.write and not options.measure:
        parser.error("--write: nothing is measured; add --measure")
    load = os.getloadavg()[0]
    if options.write and load > MAX_LOAD:
        parser.error(
            f"--write: this machine has a load of {load:.1f}; allowed: {MAX_LOAD}, as of idle cores. End other "
            "programs and wait a minute, or leave out --write"
        )


def own_runs() -> tuple[OwnRun, ...]:
    """Read mmtrain's own runs."""
    return tuple(OwnRun(**row) for row in yaml.safe_load(RUNS_FILE.read_text(encoding="utf-8")))


def measured_runs() -> dict[str, Measurement]:
    """Read what is recorded of them, by name. A run may have no record yet."""
    recorded = json.loads(MEASURED_FILE.read_text(encoding="utf-8"))
    return {name: Measurement(**record) for name, record in recorded.items()}


def write_measured(measured: Mapping[str, Measurement]) -> None:
    """Record what was measured, a line for each run."""
    lines = [f" {json.dumps(name)}: {json.dumps(asdict(record))}" for name, record in measured.items()]
    MEASURED_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def draw_data(folder: Path) -> None:
    """Draw the data of all runs."""
    generate_demo(folder, seed=0, train=DEMO_SAMPLES, heldout=DEMO_SAMPLES // 10)


def report_own_runs(report: Report) -> None:
    """Write a row for each run, beside the seconds that are recorded."""
    with tempfile.TemporaryDirectory() as name:
        draw_data(Path(name))
        _report_runs(report, own_runs(), measured_runs(), Path(name))


def _report_runs(report: Report, runs: Sequence[OwnRun], measured: Mapping[str, Measurement], folder: Path) -> None:
    report.table("own run", "machine", "measured", "predicted by the shipped table", "ratio")
    for run in runs:
        predicted_s = predicted_seconds(run, folder)
        machine_text, measured_text, ratio_text = "not measured yet", "-", "-"
        if record := measured.get(run.name):
            machine_text, measured_text = record.machine, f"{1000 * record.seconds:.0f} ms"
            ratio_text = f"{predicted_s / record.seconds:.2f}"
        report.row(run.name, machine_text, measured_text, f"{1000 * predicted_s:.0f} ms", ratio_text)


def predicted_seconds(run: OwnRun, folder: Path) -> float:
    """Return the predicted seconds of a step, with the data in `folder`."""
    recipe = load_recipe(ROOT / run.recipe, run.settings_on(folder)).recipe
    plan = fastest_plan(recipe, build_index(recipe).lengths, num_ranks=NUM_RANKS, hardware="cpu-core")
    return plan.predicted.step_time_s


def measured_seconds(run: OwnRun, folder: Path) -> float:
    """Train the run with the data in `folder`; return the seconds of its median step."""
    settings = [*run.settings_on(folder), f"train.steps={run.steps}", "train.optimizer.warmup_steps=0"]
    command = [sys.executable, "-m", "mmtrain", "train", str(ROOT / run.recipe), *set_options(settings)]
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        done = subprocess.run([*command, "--run-dir", run_dir], check=False, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        steps = read_metrics(Path(run_dir))
    return round(statistics.median(step["step_time_s"] for step in steps[len(steps) // 5 :]), 4)


if __name__ == "__main__":
    main()
