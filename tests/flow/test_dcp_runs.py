"""A run goes to torch.distributed.checkpoint and back, with its optimizer, on other plans, without a bit lost."""

from pathlib import Path

import pytest
import torch

from mmtrain.api.exported_run import export_run
from mmtrain.checkpoint import Checkpoint, open_newest_good
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.weights.dcp_folder import DcpFolder
from tests.faults import FailAt
from tests.flow.runs import SHARDED, refuse, request_for, run_all, tensors

TAUGHT = ("train.steps=3", "train.optimizer.lr=0.1", "parallel.placement=unified", "parallel.llm.tp=2")
PLANS = {
    "disaggregated": ("parallel.placement=disaggregated",),
    "unified, tp 2": ("parallel.placement=unified", "parallel.llm.tp=2"),
    "sharded": (*SHARDED, "cluster.ranks=2"),
}


def newest(run_dir: Path) -> Checkpoint:
    return open_newest_good(run_dir / CHECKPOINTS_FOLDER, refuse)


def contents(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a DCP folder."""
    stored = DcpFolder(folder)
    return {
        name: stored.read(name, tuple((0, size) for size in weight.shape)) for name, weight in stored.tensors.items()
    }


@pytest.fixture(scope="module")
def first(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folder of a run of three steps on two ranks, and its DCP folder."""
    run_dir = tmp_path_factory.mktemp("dcp") / "first"
    request = request_for(data, run_dir, *TAUGHT)
    assert run_all(request, request) == ["", ""]
    export_run(run_dir, run_dir.parent / "dcp", warn=refuse, format="dcp")
    return run_dir, run_dir.parent / "dcp"


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_weights_moments_and_updates_come_back_bit_for_bit_on_any_plan(
    plan: str, data: Path, first: tuple[Path, Path], tmp_path: Path
) -> None:
    """The first step of the second run has a gradient that is not finite, and changes nothing."""
    run_dir, folder = first
    start = (f"train.init_from={folder}", "train.init_optimizer=true", "train.steps=1")
    second = request_for(data, tmp_path / "second", *start, *PLANS[plan])
    faults = FailAt(rank=0, step=0, kind="nan")
    assert run_all(second, second, faults=faults) == ["", ""]
    before, after = tensors(newest(run_dir)), tensors(newest(tmp_path / "second"))
    assert any(name.endswith("#exp_avg_sq") and bool(values.any()) for name, values in before.items())
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert newest(tmp_path / "second").state["num_updates"] == newest(run_dir).state["num_updates"] == 3

    export_run(tmp_path / "second", tmp_path / "again", warn=refuse, format="dcp")
    once, twice = contents(folder), contents(tmp_path / "again")
    assert once.keys() == twice.keys()
    assert [name for name in once if once[name].dtype != twice[name].dtype or not once[name].equal(twice[name])] == []


@pytest.mark.slow
def test_without_init_optimizer_only_the_weights_are_taken(
    data: Path, first: tuple[Path, Path], tmp_path: Path
) -> None:
    run_dir, folder = first
    second = request_for(
        data, tmp_path / "second", f"train.init_from={folder}", "train.steps=1", *PLANS["unified, tp 2"]
    )
    assert run_all(second, second, faults=FailAt(rank=0, step=0, kind="nan")) == ["", ""]
    before, after = tensors(newest(run_dir)), tensors(newest(tmp_path / "second"))
    for name, values in after.items():
        assert not values.any() if "#" in name else values.equal(before[name]), name
    assert newest(tmp_path / "second").state["num_updates"] == 0
