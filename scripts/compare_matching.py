"""Compare what the demo learns from random steps, matched inside, and from steps of alike groups.

`python -m scripts.compare_matching --work DIR [--steps N] [--seeds N]` draws the demo's data into DIR and trains its
model for as many steps with each `data.matching`. Prints the loss on held-out samples, and the spread of the training
loss from step to step. A run of 1,400 steps takes about four minutes of a core.
"""

import argparse
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.yaml"
LEARNING_STEPS_SHARE = 0.3  # of the steps, left out of the spread: the loss falls there


def main() -> None:
    """Print a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder for data and runs")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=4)
    arguments = parser.parse_args()
    data = arguments.work / "demo-data"
    if not data.exists():
        mmtrain("data", "demo", "--out", str(data))
    losses: dict[str, list[float]] = {"step": [], "row": []}
    for seed in range(1, arguments.seeds + 1):
        for matching, of_seeds in losses.items():
            run = arguments.work / f"{matching}-{seed}-{arguments.steps}-{arguments.global_batch}"
            settings = {
                "data.sources.0.path": data / "train.json",
                "data.validation.0.path": data / "heldout.json",
                "data.tokenizer": data / "tokenizer.json",
                "data.matching": matching,
                "parallel.placement": "unified",  # in one process
                "cluster.ranks": 1,
                "train.seed": seed,
                "train.steps": arguments.steps,
                "train.global_batch": arguments.global_batch,
                "train.validate_every": arguments.steps,
                "train.checkpoint.every": arguments.steps,
            }
            options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
            mmtrain("train", str(RECIPE), "--run-dir", str(run), *options)
            records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            held_out = [record["val_loss"] for record in records if record.get("val_loss") is not None][-1]
            of_seeds.append(held_out)
            trained = [record["loss"] for record in records if "loss" in record]
            trained = trained[int(LEARNING_STEPS_SHARE * len(trained)) :]
            tokens = sum(record.get("tokens", 0) for record in records)
            spread = (sum((b - a) ** 2 for a, b in pairwise(trained)) / 2 / (len(trained) - 1)) ** 0.5
            print(
                f"{matching}, seed {seed}: held-out loss {held_out:.4f} after {tokens} tokens in {arguments.steps} "
                f"steps; training loss of a step varies by {spread:.4f}",
                flush=True,
            )
    for matching, of_seeds in losses.items():
        print(f"{matching}: mean held-out loss {sum(of_seeds) / len(of_seeds):.4f}")


def mmtrain(*arguments: str) -> None:
    """Run a command of the package, and stop if it fails."""
    done = subprocess.run([sys.executable, "-m", "mmtrain", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"mmtrain {' '.join(arguments)}:\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    main()
