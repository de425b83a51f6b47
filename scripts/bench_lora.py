"""Measure what a LoRA teaches the exported demo model: `python -m scripts.bench_lora runs/demo/exported`.

The demo asks which bar is tallest. Here adapters on the LLM learn another question about such pictures, which bar is
lowest. Exact match on held-out pictures is compared before and after; all other weights must stay as they were.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from mmtrain.checkpoint import Checkpoint, ShardSpec, open_newest_good
from mmtrain.data.synthetic.demo_draw import COLOURS, draw_bar_chart
from mmtrain.models.shapes.layer_shape import is_adapter
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER

NUM_TRAIN, NUM_HELDOUT = 1500, 200
RECIPE = """
name: lora
model: {{hf: {folder}}}
data:
  sources: [{{path: train.json}}]
  validation: [{{path: heldout.json}}]
  seq_len: 368
train:
  steps: {steps}
  global_batch: 4
  lora: {{rank: 8, alpha: 16, targets: [llm.*.linear_*]}}
  optimizer: {{lr: {lr}, warmup_steps: 0, weight_decay: 0.0}}
"""


def main() -> int:
    """Train adapters, and print exact match before and after; return 1 if another weight changed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="the exported demo")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        _write_questions(place, "train", NUM_TRAIN)
        _write_questions(place, "heldout", NUM_HELDOUT)
        folder = arguments.folder.resolve()
        before = _train(place, "before", RECIPE.format(folder=folder, steps=1, lr=1e-12))
        after = _train(place, "after", RECIPE.format(folder=folder, steps=arguments.steps, lr=3e-3))
        scores = [_exact_match(run) for run in (before, after)]
        print(f"exact match on {NUM_HELDOUT} questions: {scores[0]:.1%} before, {scores[1]:.1%} after")
        checkpoints = [open_newest_good(run / CHECKPOINTS_FOLDER, print) for run in (before, after)]
        return _compare_base(*checkpoints)


def _write_questions(place: Path, split: str, count: int) -> None:
    rng = random.Random(split)
    rows = []
    (place / "images").mkdir(exist_ok=True)
    for number in range(count):
        bars = list(zip(rng.sample(list(COLOURS), 3), rng.sample(range(1, 6), 3), strict=True))
        name = f"images/{split}-{number}.png"
        draw_bar_chart(rng, bars).save(place / name)
        turns = [
            {"from": "human", "value": "<image>Which bar is lowest?"},
            {"from": "gpt", "value": min(bars, key=lambda bar: bar[1])[0]},
        ]
        rows.append({"image": name, "template": "lowest_bar", "conversations": turns})
    (place / f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")


def _train(place: Path, name: str, recipe: str) -> Path:
    """Train a run; return its folder."""
    path, run = place / f"{name}.yaml", place / name
    path.write_text(recipe, encoding="utf-8")
    _mmtrain("train", str(path), "--run-dir", str(run))
    return run


def _exact_match(run: Path) -> float:
    [template] = _evaluation(run)["templates"]
    return float(template["exact"] / template["questions"])


def _evaluation(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(_mmtrain("evaluate", str(run), "--json"))
    return result


def _mmtrain(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "mmtrain", *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def _compare_base(before: Checkpoint, after: Checkpoint) -> int:
    """Compare all weights but the adapters; return 1 if some differ."""
    names = [name for name in before.names() if "#" not in name and not is_adapter(name)]
    changed = []
    for name in names:
        spec = ShardSpec(before.full_shape(name))
        if not torch.equal(before.read(name, spec), after.read(name, spec)):
            changed.append(name)
    print(f"{len(names) - len(changed)} of {len(names)} weights of the folder are the same bits after training")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
