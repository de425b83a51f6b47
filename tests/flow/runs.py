"""Whole runs of a small demo in processes of this machine, with injected faults."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmtrain.checkpoint import Checkpoint, open_newest_good
from mmtrain.checkpoint.tensor_pieces import ShardSpec
from mmtrain.errors import MmtrainError
from mmtrain.planning.whatif import plan_again
from mmtrain.program import Forward
from mmtrain.recipe import load_recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.runtime.training.train import start_training, train_rank
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import Address
from tests.distributed import RanksFailed, fork_ranks
from tests.faults import FailAt
from tests.plans import plan_recipe as planner

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.yaml"
NUM_STEPS, SAVE_EVERY = 6, 2
MANY_STEPS = 30  # of a run that is still training when its first checkpoint is seen
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


# Settings of runs whose ranks hold shards of all units, and of two that dispatch images between them.
SHARDED = ("parallel.placement=replicated", "parallel.shard=all")
REPLICATED = (*SHARDED, "parallel.dispatch=all", "cluster.ranks=2")


def request_for(data: Path, run_dir: Path, *changes: str, **options: object) -> TrainRequest:
    """Return a request to train two ranks on `data`; `changes` are settings, `options` are fields of the request."""
    paths = [
        f"data.sources.0.path={data}/train.json",
        f"data.validation.0.path={data}/heldout.json",
        f"data.tokenizer={data}/tokenizer.json",
    ]
    loaded = load_recipe(RECIPE, [*paths, *SMALL, *changes])
    return replace(TrainRequest(loaded, planner, plan_again, "cpu-core", 2, run_dir), **options)  # type: ignore[arg-type]


def run_all(*requests: TrainRequest, faults: FaultPoints | None = None) -> list[str]:
    """Run one rank per request, started as by another launcher; return the error of each, or an empty string."""
    return fork_ranks(len(requests), run_one_rank, requests, free_port(), faults or FaultPoints())


def launch(request: TrainRequest, faults: FaultPoints | None = None) -> tuple[int, str]:
    """Run `mmtrain train` in a process of its own, which starts the ranks; return its exit code and its error."""
    outcome: tuple[int, str]
    [outcome] = fork_ranks(1, _launcher, replace(request, faults=faults or FaultPoints()))
    return outcome


def run_one_rank(
    rank: int, world_size: int, _: Path, requests: Sequence[TrainRequest], port: int, faults: FaultPoints
) -> str:
    """Run one of the ranks of `run_all` in this process; return its error, or an empty string."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        address = Address(rank, world_size, rank, "127.0.0.1", port, "mmtrain")
        train_rank(replace(requests[rank], faults=faults), address)
    except MmtrainError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def _launcher(rank: int, world_size: int, _: Path, request: TrainRequest) -> tuple[int, str]:
    return launch_here(request)


def launch_here(request: TrainRequest) -> tuple[int, str]:
    """Run `mmtrain train` in this process; return its exit code and its error."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        start_training(request)
    except MmtrainError as e:
        return e.exit_code, str(e)
    return 0, ""


def kill_and_resume(data: Path, folder: Path, *changes: str) -> TrainRequest:
    """Train a run unbroken, and once more with a kill in its fourth step and a resume; assert that both end alike.

    Returns the request of the killed one.
    """
    unbroken, killed = (request_for(data, folder / name, *changes) for name in ("unbroken", "killed"))
    assert run_all(unbroken, unbroken) == ["", ""]
    with pytest.raises(RanksFailed, match="died without a word"):
        run_all(killed, killed, faults=FailAt(0, 3, "kill", action=Forward))
    resumed = replace(killed, resume=True)
    assert run_all(resumed, resumed) == ["", ""]
    assert_same_end(killed.run_dir, unbroken.run_dir)
    return killed


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, unsharded, by name."""
    return {name: checkpoint.read(name, ShardSpec(checkpoint.full_shape(name))) for name in checkpoint.names()}


def assert_same_end(run_dir: Path, reference: Path, num_steps: int = NUM_STEPS) -> None:
    """Assert that both runs ended with the same weights and optimizer state after the same losses, bit for bit."""
    checkpoint, expected = (open_newest_good(run / CHECKPOINTS_FOLDER, refuse) for run in (run_dir, reference))
    assert checkpoint.step == expected.step == num_steps
    assert checkpoint.state == expected.state
    _assert_equal(tensors(checkpoint), tensors(expected))
    assert [s["loss"] for s in read_metrics(run_dir)] == [s["loss"] for s in read_metrics(reference)]


def assert_same_weights(run_dir: Path, reference: Path) -> None:
    """Assert that the newest good checkpoints of both runs are equal; damaged ones may be passed over."""
    newest = [open_newest_good(run / CHECKPOINTS_FOLDER, lambda _: None) for run in (run_dir, reference)]
    _assert_equal(*map(tensors, newest))


def _assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def refuse(text: str) -> None:
    """Fail where a damaged checkpoint is reported."""
    raise AssertionError(text)
