"""Measure what padding costs: train a recipe by OmniBal's baselines with and without it, and packed by `matched`.

    python -m scripts.bench_padding recipes/demo.yaml --set train.steps=30 --set cluster.ranks=1 \\
        --set parallel.placement=unified

All arguments but `--pause-s` go to `mmtrain train`; runs are written to a temporary folder. Every method runs several
times, by turns, so that other work on the machine meets all of them. Prints the median time of a step and of a thousand
LLM tokens, the least of the runs (padding does not count as tokens), the share of padding, and the planner's
prediction; then what padding costs by the first quartile of all steps, which other work disturbed least.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmtrain.planning import load_plan
from mmtrain.report import read_metrics

RUNS = (  # (grouping, pad)
    ("matched", False),
    *((grouping, pad) for grouping in ("random", "length", "device") for pad in (False, True)),
)
NUM_ROUNDS = 3
WARM_UP_SHARE = 0.2  # of the steps, left out: the first ones fill caches


def main() -> int:
    """Train by every method; return the exit code of the first run that failed, or 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pause-s", type=float, default=0.0, help="between rounds; real-time runs let others work then"
    )
    options, train_arguments = parser.parse_known_args()
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores {platform.machine()}", flush=True)
    outcomes: dict[tuple[str, bool], list[Outcome]] = defaultdict(list)
    for number, (grouping, pad) in enumerate(RUNS * NUM_ROUNDS):
        if number and number % len(RUNS) == 0:
            time.sleep(options.pause_s)
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            changes = [f"data.grouping={grouping}", f"data.pad={str(pad).lower()}"]
            settings = [part for change in changes for part in ("--set", change)]
            command = [sys.executable, "-m", "mmtrain", "train", *train_arguments, *settings, "--run-dir", str(run)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return done.returncode
            outcomes[grouping, pad].append(outcome_of(run))
    print("grouping  pad    step s (predicted)   tokens  padding   s per 1,000 tokens (predicted)")
    for (grouping, pad), of_runs in outcomes.items():
        best = min(of_runs, key=lambda outcome: outcome.token_s)
        print(
            f"{grouping:<10}{'yes' if pad else 'no':<6}{best.step_s:>8.3f} ({best.predicted_step_s:.3f})"
            f"{best.tokens:>11.0f}{best.padding_share:>9.1%}{best.token_s * 1e3:>11.4f} "
            f"({best.predicted_token_s * 1e3:.4f})   worst run {max(o.token_s for o in of_runs) * 1e3:.4f}"
        )
    print_cost_of_padding(outcomes)
    return 0


def print_cost_of_padding(outcomes: Mapping[tuple[str, bool], Sequence["Outcome"]]) -> None:
    """Print how many times as long a token takes with padding, as measured and as predicted."""
    print("what padding costs: first quartile of the steps of all runs, seconds per 1,000 tokens")
    for grouping in dict.fromkeys(grouping for grouping, _ in outcomes):
        if (grouping, True) not in outcomes:
            continue
        runs = [outcomes[grouping, pad] for pad in (False, True)]
        alone_s, padded_s = (
            statistics.quantiles([seconds for outcome in of_runs for seconds in outcome.all_token_s], n=4)[0]
            for of_runs in runs
        )
        predicted = runs[1][0].predicted_token_s / runs[0][0].predicted_token_s
        print(
            f"{grouping:<10}{alone_s * 1e3:.4f} -> {padded_s * 1e3:.4f}: {padded_s / alone_s:.2f}x measured, "
            f"{predicted:.2f}x predicted"
        )


@dataclass(frozen=True)
class Outcome:
    """What one run measured, without its first steps."""

    step_s: float  # median
    token_s: float  # median of the seconds of a step over its LLM tokens
    tokens: float  # of a step, mean, without padding
    padding_share: float  # of all tokens that the LLM computed
    predicted_step_s: float
    predicted_token_s: float
    all_token_s: tuple[float, ...]  # seconds of each step over its LLM tokens


def outcome_of(run: Path) -> Outcome:
    """Read a finished run."""
    steps = read_metrics(run)
    steps = steps[int(len(steps) * WARM_UP_SHARE) :]
    plan = load_plan(run / "plan.json")
    predicted = plan.predicted
    predicted_tokens_per_s = predicted.tokens_per_s_per_gpu * plan.world_size
    tokens = statistics.fmean(step["tokens"] for step in steps)
    padding = statistics.fmean(step.get("padding", 0) for step in steps)
    return Outcome(
        step_s=statistics.median(step["step_time_s"] for step in steps),
        token_s=statistics.median(step["step_time_s"] / step["tokens"] for step in steps),
        tokens=tokens,
        padding_share=padding / (tokens + padding),
        predicted_step_s=predicted.step_time_s,
        predicted_token_s=1 / predicted_tokens_per_s,
        all_token_s=tuple(step["step_time_s"] / step["tokens"] for step in steps),
    )


if __name__ == "__main__":
    sys.exit(main())
