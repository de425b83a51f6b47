"""Compare predicted with measured steps of mmtrain's own runs on two processor cores, as users start them.

    python -m scripts.bench_own_runs                                  # beside the seconds that are recorded
    python -m scripts.bench_own_runs --measure [--only NAME]          # beside those of this machine, now
    python -m scripts.bench_own_runs --measure --write --log          # and record them: on idle cores alone

`scripts/own_runs.yaml` lists the runs. Each is measured as `mmtrain train` runs it: with its loader, its threads and
its metrics, on as many cores as ranks. The measured figure is the median step after the first fifth. It is predicted by
the cost table that mmtrain ships, and by one that `mmtrain profile` measures here before the model's first run.
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
    profiled_s: float | None = None  # predicted by the machine's own cost table


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
            tables = profile_models(runs, folder)
            for run in runs:
                profiled_s = predicted_seconds(run, folder, f"cluster.costs={tables[run.name]}")
                measured[run.name] = Measurement(measured_seconds(run, folder), here, round(profiled_s, 4))
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
    report.table("own run", "machine", "measured", "by the shipped table", "ratio", "by the machine's own", "ratio")
    for run in runs:
        predicted_s = predicted_seconds(run, folder)
        shipped = f"{1000 * predicted_s:.0f} ms"
        record = measured.get(run.name)
        if record is None:
            report.row(run.name, "not measured yet", "-", shipped, "-", "-", "-")
            continue
        profiled, profiled_ratio = "-", "-"
        if record.profiled_s is not None:
            profiled = f"{1000 * record.profiled_s:.0f} ms"
            profiled_ratio = f"{record.profiled_s / record.seconds:.2f}"
        ratio = f"{predicted_s / record.seconds:.2f}"
        seconds = f"{1000 * record.seconds:.0f} ms"
        report.row(run.name, record.machine, seconds, shipped, ratio, profiled, profiled_ratio)


def predicted_seconds(run: OwnRun, folder: Path, *changes: str) -> float:
    """Return the predicted seconds of a step, with the data in `folder` and further changes of the recipe."""
    recipe = load_recipe(ROOT / run.recipe, [*run.settings_on(folder), *changes]).recipe
    plan = fastest_plan(recipe, build_index(recipe).lengths, num_ranks=NUM_RANKS, hardware="cpu-core")
    return plan.predicted.step_time_s


def profile_models(runs: Sequence[OwnRun], folder: Path) -> dict[str, Path]:
    """Measure layers and messages of the runs' models here; return the cost table of each run, by name.

    Runs that differ in placement alone share a table.
    """
    tables: dict[str, Path] = {}
    of_runs = {}
    for run in runs:
        model = json.dumps({key: value for key, value in run.settings.items() if key != "parallel.placement"})
        if model not in tables:
            tables[model] = folder / f"costs-{len(tables)}.json"
            _run_mmtrain("profile", run, folder, "--out", str(tables[model]))
        of_runs[run.name] = tables[model]
    return of_runs


def measured_seconds(run: OwnRun, folder: Path) -> float:
    """Train the run with the data in `folder`; return the seconds of its median step."""
    steps_settings = set_options([f"train.steps={run.steps}", "train.optimizer.warmup_steps=0"])
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        _run_mmtrain("train", run, folder, *steps_settings, "--run-dir", run_dir)
        steps = read_metrics(Path(run_dir))
    return round(statistics.median(step["step_time_s"] for step in steps[len(steps) // 5 :]), 4)


def _run_mmtrain(subcommand: str, run: OwnRun, folder: Path, *options: str) -> None:
    """Run a command on the run's recipe in a process of its own, as users do; end the program where it fails."""
    command = [sys.executable, "-m", "mmtrain", subcommand, str(ROOT / run.recipe)]
    settings = set_options(run.settings_on(folder))
    done = subprocess.run([*command, *settings, *options], check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


if __name__ == "__main__":
    main()
