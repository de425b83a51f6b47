"""What a user runs on a node of eight cores: defaults, the command line in a process of its own, spawned ranks.

The same recipe with `data.workers=0` and forked ranks is what the other tests run; losses are equal to the last bit.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

from mmtrain.machine_limits import CORE_COUNT_VARIABLE
from mmtrain.report import read_metrics
from tests.flow.spawned_command import LOG_VARIABLE, SPAWNED_RANK
from tests.flow.user_flows import (
    FLOWS,
    FORMATS,
    PLACEMENTS,
    TRAIN,
    Flow,
    media_families,
    write_flow,
)
from tests.forked_command import run_forked
from tests.waiting import MAX_WAIT_S

ROOT = Path(__file__).parents[2]
NUM_RANKS = 2  # what a recipe without a cluster gets on a machine without GPUs
WORKER_HOST = "mmtrain.data.loading.worker_process"


def _start(folder: Path, *arguments: str, log: str) -> "subprocess.Popen[str]":
    """Start `mmtrain` on a machine that says it has eight cores, whatever this one has."""
    variables = {
        CORE_COUNT_VARIABLE: "8",
        LOG_VARIABLE: str(folder / log),
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",  # containers of CI may have no other
    }
    command = [sys.executable, "-m", "tests.flow.spawned_command", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=os.environ | variables, stdout=pipe, stderr=pipe, text=True)


@contextmanager
def _served(folder: Path, recipe: Path) -> Iterator[str]:
    """Serve the recipe's steps as a user does, and yield the address; in the end the producer must go in peace."""
    process = _start(folder, "data", "serve", str(recipe), "--bind", "tcp://127.0.0.1:*", "--json", log="served.log")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            pytest.fail(process.communicate()[1])
        served = json.loads(line)
        assert served["workers"] == 8
        yield served["address"]
        process.terminate()
        _, stderr = process.communicate(timeout=MAX_WAIT_S)
        assert process.returncode == 0, stderr
        assert "Traceback" not in stderr
    finally:
        process.kill()
        process.communicate()


def _losses(run_dir: Path) -> list[float]:
    return [step["loss"] for step in read_metrics(run_dir)]


@pytest.mark.slow
@pytest.mark.parametrize("flow", FLOWS, ids=str)
def test_a_run_with_the_defaults_has_the_losses_of_one_without_workers(flow: Flow, tmp_path: Path) -> None:
    recipe = write_flow(flow, tmp_path)
    without = run_forked(tmp_path, "train", str(recipe), "--set", "data.workers=0", "--run-dir", "without")
    assert without.returncode == 0, without.stderr
    if flow.producer:
        with _served(tmp_path, recipe) as address:
            started = _train(tmp_path, recipe, "--set", f"data.producers=[{address}]")
        assert WORKER_HOST in (tmp_path / "served.log").read_text(encoding="utf-8")
        assert not any(WORKER_HOST in line for line in started), "the ranks made the steps of a producer that served"
    else:
        started = _train(tmp_path, recipe)
        assert any(WORKER_HOST in line for line in started)
    assert started.count(SPAWNED_RANK) == NUM_RANKS
    losses = _losses(tmp_path / "run")
    assert len(losses) == TRAIN["steps"]
    assert losses == _losses(tmp_path / "without")


def _train(folder: Path, recipe: Path, *options: str) -> list[str]:
    """Train as a user does; return the processes that the command and its ranks started."""
    process = _start(folder, "train", str(recipe), "--run-dir", "run", *options, log="train.log")
    _, stderr = process.communicate(timeout=MAX_WAIT_S)
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr
    return (folder / "train.log").read_text(encoding="utf-8").splitlines()


def test_the_flows_show_every_value_of_every_axis() -> None:
    assert len(FLOWS) <= 19
    assert {flow.family for flow in FLOWS} == set(media_families())
    assert {flow.format for flow in FLOWS} == set(FORMATS)
    assert {flow.placement for flow in FLOWS} == set(PLACEMENTS)
    shown = {(flow.format, flow.placement) for flow in FLOWS}
    assert len(shown) >= len(FLOWS) - 1, f"of {len(set(product(FORMATS, PLACEMENTS)))} pairs"
