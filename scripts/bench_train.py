"""Train a recipe and print what docs/benchmarks.md records of such a run: loss, speed, waiting, memory, machine.

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

from mmtrain.plan import load_plan
from mmtrain.report import read_metrics

MIB = 2**20
EDGE = 5  # steps averaged at either end of the loss curve


def main() -> int:
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
    warm = steps[len(steps) // 10 :]  # the first steps fill caches
    aside = len((run / "quarantine.jsonl").read_text().splitlines())
    predicted = load_plan(run / "plan.json").predicted
    tenth = max(1, len(steps) // 10)
    memory = [s["peak_memory_bytes"] / MIB for s in steps]
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(
        f"steps {len(steps)}, samples {total(steps, 'samples')}, LLM tokens {total(steps, 'tokens')}, set aside {aside}"
    )
    print(f"loss {mean(steps[:EDGE], 'loss'):.3f} (first {EDGE}) -> {mean(steps[-EDGE:], 'loss'):.3f} (last {EDGE})")
    step_s, tokens_per_s, mfu = (median(warm, key) for key in ("step_time_s", "tokens_per_s", "mfu"))
    print(f"median step {step_s:.3f} s; predicted {predicted.step_time_s:.3f} s ({predicted.cost_source})")
    print(f"median {tokens_per_s:.0f} tokens/s, MFU {mfu:.1%} of {steps[0]['peak_flops']:.3g} FLOP/s")
    for part in steps[0]["time_s"]:
        share = statistics.median(s["time_s"][part] / s["step_time_s"] for s in warm)
        print(f"  {part:<14}{share:6.1%} of a step (median, mean over the ranks)")
    print("peak memory of the fullest rank, MiB, after every tenth of the run:")
    print("  " + " ".join(f"{memory[i]:.0f}" for i in range(tenth - 1, len(memory), tenth)))


def total(steps: list[dict[str, Any]], key: str) -> int:
    return sum(s[key] for s in steps)


def mean(steps: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(s[key] for s in steps)


def median(steps: list[dict[str, Any]], key: str) -> float:
    return statistics.median(s[key] for s in steps)


if __name__ == "__main__":
    sys.exit(main())
