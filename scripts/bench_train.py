"""Train a recipe and print what docs/benchmarks.md records of a run: loss, speed, waiting, memory, machine.

    python scripts/bench_train.py recipes/llava_files.yaml --set data.sources.0.path=/data/mine/llava.json

All arguments go to `mmtrain train`; the run is written to a temporary folder.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mmtrain.planning import load_plan
from mmtrain.report import read_metrics

MIB = 2**20
NUM_END_STEPS = 5  # averaged at either end of the loss curve


def main() -> int:
    """Train with the arguments of this script; return the exit code of `mmtrain train`."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "mmtrain", "train", *sys.argv[1:], "--run-dir", str(run)]
        code = subprocess.run(command, check=False).returncode
        if code == 0:
            report(run)
    return code


def report(run: Path) -> None:
    """Print the summary of a finished run."""
    steps = read_metrics(run)
    warm_steps = steps[len(steps) // 10 :]  # the first steps fill caches
    num_quarantined = len((run / "quarantine.jsonl").read_text().splitlines())
    predicted = load_plan(run / "plan.json").predicted
    tenth = max(1, len(steps) // 10)
    memory_mib = [s["peak_memory_bytes"] / MIB for s in steps]
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    samples, tokens = total(steps, "samples"), total(steps, "tokens")
    print(f"steps {len(steps)}, samples {samples}, LLM tokens {tokens}, set aside {num_quarantined}")
    first_loss, last_loss = mean(steps[:NUM_END_STEPS], "loss"), mean(steps[-NUM_END_STEPS:], "loss")
    print(f"loss {first_loss:.3f} (first {NUM_END_STEPS}) -> {last_loss:.3f} (last {NUM_END_STEPS})")
    step_s, tokens_per_s, mfu = (median(warm_steps, key) for key in ("step_time_s", "tokens_per_s", "mfu"))
    print(f"median step {step_s:.3f} s; predicted {predicted.step_time_s:.3f} s ({predicted.cost_source})")
    print(f"median {tokens_per_s:.0f} tokens/s, MFU {mfu:.1%} of {steps[0]['peak_flops']:.3g} FLOP/s")
    for part in steps[0]["time_s"]:
        share = statistics.median(s["time_s"][part] / s["step_time_s"] for s in warm_steps)
        print(f"  {part:<14}{share:6.1%} of a step (median, mean over the ranks)")
    print("peak memory of the fullest rank, MiB, after every tenth of the run:")
    print("  " + " ".join(f"{memory_mib[i]:.0f}" for i in range(tenth - 1, len(memory_mib), tenth)))


def total(steps: list[dict[str, Any]], key: str) -> int:
    return sum(s[key] for s in steps)


def mean(steps: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(s[key] for s in steps)


def median(steps: list[dict[str, Any]], key: str) -> float:
    return statistics.median(s[key] for s in steps)


if __name__ == "__main__":
    sys.exit(main())
