"""Write the files of this version: `python -m tests.compatibility.write_files`, before a tag and never after it.

A tiny run writes them as users get them: its data, recipe, plan and checkpoint, and a small cost table.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mmtrain import __version__
from mmtrain.costs import CostTable

HERE = Path(__file__).parent
TABLES = HERE.parents[1] / "mmtrain" / "costs" / "tables"
NUM_LAYERS, NUM_MESSAGES = 2, 3  # of the shipped table
RECIPE = f"""\
mmtrain: {__version__}
name: compatibility

model:
  vision: {{layers: 1, hidden: 16, heads: 2, ffn: 32, patch: 12, max_side: 4, positions: grid}}
  llm: {{layers: 1, hidden: 16, heads: 2, kv_heads: 1, ffn: 32, vocab: 320, tie_embeddings: true}}

data:
  sources:
    - path: data/train.json
  tokenizer: data/tokenizer.json
  seq_len: 368
  image: {{scheme: fixed, size: 48}}
  max_bad_rate: 0

parallel:
  placement: unified

cluster:
  hardware: cpu-core
  ranks: 1

train:
  steps: 2
  global_batch: 2
  seed: 1
  optimizer:
    lr: 1.0e-3
  checkpoint:
    every: 2
"""


def run_mmtrain(folder: Path, *arguments: str) -> str:
    """Run a command in `folder`, and return what it prints."""
    root = str(HERE.parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "mmtrain", *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def main() -> None:
    """Replace the folder of this version."""
    target = HERE / __version__
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
        run_mmtrain(folder, "data", "demo", "--out", "data", "--samples", "6", "--heldout", "1")
        run_mmtrain(folder, "train", "recipe.yaml", "--run-dir", "run")
        shutil.copytree(folder / "data", target / "data")
        shutil.copytree(folder / "run" / "checkpoints", target / "checkpoints")
        shutil.copyfile(folder / "recipe.yaml", target / "recipe.yaml")
        shutil.copyfile(folder / "run" / "plan.json", target / "plan.json")
    table = CostTable.load(TABLES / "cpu-core.json")
    part = {"layers": table.layers[:NUM_LAYERS], "messages": table.messages[:NUM_MESSAGES], "mmtrain": __version__}
    table.model_copy(update=part).save(target / "costs.json")


if __name__ == "__main__":
    main()
