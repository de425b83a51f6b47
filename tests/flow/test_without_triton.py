"""Training needs no Triton, which torch's builds for CPUs do not bring, and Megatron-core says nothing in its logs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 2
SETTINGS = [f"train.steps={STEPS}", "train.checkpoint.every=0", "model.vision.layers=1", "model.llm.layers=1"]


def _run(folder: Path, *arguments: str, python_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = [str(path) for path in (python_path, ROOT) if path is not None]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "mmtrain", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_training_without_triton_gives_the_same_losses_and_logs_nothing_new(tmp_path: Path) -> None:
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")  # for every rank's process
    _run(tmp_path, "data", "demo", "--out", "demo-data", "--samples", "64", "--heldout", "4")
    losses = {}
    for name, python_path in (("with", None), ("without", hiding)):
        settings = [part for setting in SETTINGS for part in ("--set", setting)]
        recipe = str(ROOT / "recipes" / "demo.yaml")
        done = _run(tmp_path, "train", recipe, *settings, "--run-dir", name, python_path=python_path)
        assert "egatron" not in done.stderr + done.stdout
        assert "Rewrapping" not in done.stderr
        assert "full_param_layout" not in done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    assert len(losses["with"]) == STEPS
    assert losses["without"] == losses["with"]
