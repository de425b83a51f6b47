"""Whole runs of a small demo in processes of this machine, with failures placed in them."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mmtrain.checkpoint import Checkpoint, open_newest_good
from mmtrain.checkpoint.tensor_pieces import ShardSpec
from mmtrain.errors import MmtrainError
from mmtrain.plan.planner import plan_recipe as planner
from mmtrain.recipe import load_recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.runtime.training.train import run, train_rank
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import Address
from tests.distributed import fork_ranks

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.yaml"
NUM_STEPS, SAVE_EVERY = 6, 2
SMALL = [
    f"train.steps={NUM_STEPS}",
    f"train.checkpoint.every={SAVE_EVERY}",
    "train.validate_every=0",
    "model.vision.layers=1",
    "model.llm.layers=2",
    "data.seq_len=192",
    "data.prefetch=1",
    "data.workers=0",
]


def request_for(data: Path, run_dir: Path, *changes: str, **options: object) -> TrainRequest:
    """A run of two ranks on `data`; `changes` are settings, `options` fields of the request."""
    paths = [
        f"data.sources.0.path={data}/train.json",
        f"data.validation.0.path={data}/heldout.json",
        f"data.tokenizer={data}/tokenizer.json",
    ]
    loaded = load_recipe(RECIPE, [*paths, *SMALL, *changes])
    return replace(TrainRequest(loaded, planner, "cpu-core", 2, run_dir), **options)  # type: ignore[arg-type]


def run_all(*requests: TrainRequest, faults: FaultPoints | None = None) -> list[str]:
    """Run one plain rank per request, as another launcher would; return the error that its user would read."""
    return fork_ranks(len(requests), _rank, requests, free_port(), faults or FaultPoints())


def launch(request: TrainRequest, faults: FaultPoints | None = None) -> tuple[int, str]:
    """Run `mmtrain train` in a process of its own; return its exit code and its error."""
    outcome: tuple[int, str]
    [outcome] = fork_ranks(1, _launcher, replace(request, faults=faults or FaultPoints()))
    return outcome


def _rank(rank: int, world_size: int, _: Path, requests: Sequence[TrainRequest], port: int, faults: FaultPoints) -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        address = Address(rank, world_size, rank, "127.0.0.1", port, "mmtrain")
        train_rank(replace(requests[rank], faults=faults), address)
    except MmtrainError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def _launcher(rank: int, world_size: int, _: Path, request: TrainRequest) -> tuple[int, str]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        run(request)
    except MmtrainError as e:
        return e.exit_code, str(e)
    return 0, ""


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, by name."""
    return {n: checkpoint.read(n, ShardSpec(checkpoint.full_shape(n))) for n in checkpoint.names()}


def refuse(text: str) -> None:
    """Stand where a damaged checkpoint would be reported and none may be."""
    raise AssertionError(text)


def require_same_end(run_dir: Path, unbroken: Path) -> None:
    """Assert that both runs ended in the same weights, having seen the same losses."""
    found, wanted = (open_newest_good(run / CHECKPOINTS_FOLDER, refuse) for run in (run_dir, unbroken))
    assert found.state == wanted.state
    theirs = tensors(wanted)
    for name, tensor in tensors(found).items():
        assert torch.equal(tensor, theirs[name]), name
    assert [s["loss"] for s in read_metrics(run_dir)] == [s["loss"] for s in read_metrics(unbroken)]


def poll(found: Callable[[], bool], timeout_s: float) -> None:
    """Wait until `found` returns True."""
    deadline_s = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.05)
