"""Measure what padding costs: train a recipe by OmniBal's baselines with and without it, and packed by `matched`.

    python -m scripts.bench_padding recipes/demo.yaml --set train.steps=40

All arguments go to `mmtrain train`; runs are written to a temporary folder. Prints for every run the time of a step and
of a thousand LLM tokens (padding does not count as tokens), the share of padding, and the planner's prediction.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mmtrain.plan import load_plan
from mmtrain.report import read_metrics

RUNS = (  # (grouping, pad)
    ("matched", False),
    *((grouping, pad) for grouping in ("random", "length", "device") for pad in (False, True)),
)
WARM_UP_SHARE = 0.2  # of the steps, left out: the first ones fill caches


def main() -> int:
    """Train by every method; return the exit code of the first run that failed, or 0."""
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores {platform.machine()}")
    print("grouping  pad     step s (predicted)   tokens   padding   ms a 1,000 tokens (predicted)")
    for grouping, pad in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            changes = [f"data.grouping={grouping}", f"data.pad={str(pad).lower()}"]
            settings = [part for change in changes for part in ("--set", change)]
            command = [sys.executable, "-m", "mmtrain", "train", *sys.argv[1:], *settings, "--run-dir", str(run)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return done.returncode
            print(row(grouping, pad, run), flush=True)
    return 0


def row(grouping: str, pad: bool, run: Path) -> str:
    """Return the line of one finished run."""
    steps = read_metrics(run)
    steps = steps[int(len(steps) * WARM_UP_SHARE) :]
    plan = load_plan(run / "plan.json")
    predicted = plan.predicted
    predicted_tokens_per_s = predicted.tokens_per_s_per_gpu * plan.world_size
    tokens = statistics.fmean(step["tokens"] for step in steps)
    padding = statistics.fmean(step.get("padding", 0) for step in steps)
    step_s = statistics.median(step["step_time_s"] for step in steps)
    per_token_s = statistics.median(step["step_time_s"] / step["tokens"] for step in steps)
    return (
        f"{grouping:<10}{'yes' if pad else 'no':<6}{step_s:>8.3f} ({predicted.step_time_s:.3f})"
        f"{tokens:>12.0f}{padding / (tokens + padding):>9.1%}"
        f"{per_token_s * 1e6:>14.1f} ({1e6 / predicted_tokens_per_s:.1f})"
    )


if __name__ == "__main__":
    sys.exit(main())
