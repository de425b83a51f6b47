"""What must work with every set of versions: the demo trains in each placement, and without Triton."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 2
SETTINGS = [f"train.steps={STEPS}", "train.checkpoint.every=0", "model.vision.layers=1", "model.llm.layers=1"]
PLACEMENTS = ("unified", "disaggregated", "colocated", "replicated")
REMARKS = ("Rewrapping", "full_param_layout", "egatron", "CUDA runtime")  # of Megatron-core and torch, about nothing

Losses = Callable[[str, bool], list[float]]


def _run(folder: Path, *arguments: str, python_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = [str(path) for path in (python_path, ROOT) if path is not None]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "mmtrain", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Return the function that trains in a placement, with or without Triton, and returns the losses of the steps."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "recipes").mkdir()
    (folder / "recipes" / "demo.yaml").write_bytes((ROOT / "recipes" / "demo.yaml").read_bytes())
    hiding = folder / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")  # in every rank's process
    assert _run(folder, "data", "demo", "--out", "demo-data", "--samples", "64", "--heldout", "4").returncode == 0

    @cache
    def train(placement: str, hides_triton: bool) -> list[float]:
        settings = [part for s in (*SETTINGS, f"parallel.placement={placement}") for part in ("--set", s)]
        run = folder / f"{placement}-{hides_triton}"
        arguments = ("train", "recipes/demo.yaml", *settings, "--run-dir", str(run))
        done = _run(folder, *arguments, python_path=hiding if hides_triton else None)
        assert done.returncode == 0, done.stderr
        assert [remark for remark in REMARKS if remark in done.stdout + done.stderr] == []
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]

    return train


@pytest.mark.slow  # 10 s each
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_demo_trains_in_each_placement_to_the_same_losses(placement: str, losses: Losses) -> None:
    trained = losses(placement, False)
    assert len(trained) == STEPS
    assert trained == pytest.approx(losses("unified", False), rel=1e-5)


@pytest.mark.slow
def test_losses_without_triton_are_the_same_to_the_last_bit(losses: Losses) -> None:
    assert losses("disaggregated", True) == losses("disaggregated", False)
