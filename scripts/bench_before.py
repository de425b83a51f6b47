"""Compare this tree with one before it, in turn: how long planning takes, and a step of training.

    git worktree add /tmp/before COMMIT
    python -m scripts.bench_before /tmp/before --plan recipes/whatif/internvl_26b.yaml --train demo.yaml

Both trees read the same recipes, which must be valid in both. Order alternates from round to round, so that what else
runs on the machine slows both alike.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from mmtrain.report import read_metrics

AFTER = Path(__file__).parents[1]
NUM_WARM_UP_STEPS = 10
Figures = dict[str, list[float]]  # of one tree, by what was measured


@dataclass(frozen=True)
class Spent:
    """Seconds of a command."""

    clock_s: float
    processor_s: float  # of all its processes


def main() -> None:
    """Print the medians of both trees, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder of the other tree")
    parser.add_argument("--plan", type=Path, action="append", default=[], help="recipe to plan; may be repeated")
    parser.add_argument("--train", type=Path, help="recipe to train")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    trees = {"before": options.before, "after": AFTER}
    figures: dict[str, Figures] = {name: defaultdict(list) for name in trees}
    for number in range(options.rounds):  # all figures so far are printed after each
        for name in sorted(trees, reverse=bool(number % 2)):
            for recipe in options.plan:
                spent = run_mmtrain(trees[name], "plan", str(recipe.resolve()))
                figures[name][f"plan {recipe.stem}, s by the clock"].append(spent.clock_s)
                figures[name][f"plan {recipe.stem}, s of the processor"].append(spent.processor_s)
            if options.train is not None:
                step_s, spent = train(trees[name], options.train.resolve(), options.steps)
                figures[name][f"median step of {options.train.stem}, s by the clock"].append(step_s)
                figures[name][f"train {options.train.stem}, s of the processor"].append(spent.processor_s)
        print(f"after round {number + 1} of {options.rounds}:")
        report(figures["before"], figures["after"])


def report(before: Figures, after: Figures) -> None:
    """Print the medians of both trees, their ratio, and what they are of."""
    for title in before:
        medians = statistics.median(before[title]), statistics.median(after[title])
        print(f"{title}: {medians[0]:.4f} before, {medians[1]:.4f} after, {medians[1] / medians[0]:.3f}x")
        for name, values in (("before", before[title]), ("after", after[title])):
            print(f"  {name}: " + " ".join(f"{value:.3f}" for value in values), flush=True)


def run_mmtrain(tree: Path, *arguments: str) -> Spent:
    """Run a command of a tree in that folder."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    used_s, start_s = _used_s(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "mmtrain", *arguments], cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    return Spent(time.perf_counter() - start_s, _used_s() - used_s)


def train(tree: Path, recipe: Path, num_steps: int) -> tuple[float, Spent]:
    """Train for some steps; return the median step time, without the first steps, and what the command spent."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        changes = [f"train.steps={num_steps}", "train.validate_every=0", "train.checkpoint.every=0"]
        options = [word for change in changes for word in ("--set", change)]
        spent = run_mmtrain(tree, "train", str(recipe), "--run-dir", str(run), *options)
        return statistics.median(step["step_time_s"] for step in read_metrics(run)[NUM_WARM_UP_STEPS:]), spent


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
