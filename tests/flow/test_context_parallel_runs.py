"""Whole runs in which ranks share sequences: killed, continued on the same or another plan, moved to other degrees."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mmtrain.checkpoint import open_newest_good
from mmtrain.planning import load_plan
from mmtrain.program import Backward
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import PLAN_FILE
from tests.distributed import RanksFailed, run_ranks
from tests.faults import FailAt
from tests.flow.cases import Mesh, recipe
from tests.flow.gather import whole
from tests.flow.runs import NUM_STEPS, assert_same_end, launch, refuse, request_for, run_all, tensors
from tests.flow.test_replan import _restore_and_train, _train_and_save

pytestmark = pytest.mark.slow

SHARED = ("parallel.placement=unified", "parallel.llm.cp=2", "parallel.llm.cp_split=even", "cluster.ranks=2")
WHOLE = ("parallel.placement=unified", "parallel.llm.cp=1", "cluster.ranks=2")
VISION = Mesh((), (0, 1), dp=2)
DEGREES: dict[str, dict[str, Mesh]] = {
    "cp1": {"vision": Mesh((), (0,)), "llm": Mesh((), (0,))},
    "ring cp2 pp2": {"vision": VISION, "llm": Mesh((2,), (0, 1, 2, 3), cp=2, method="ring", split="even")},
    "ulysses cp4": {"vision": VISION, "llm": Mesh((), (0, 1, 2, 3), cp=4)},
    "ulysses cp2 dp2": {"vision": Mesh((), (0, 1, 2, 3), dp=4), "llm": Mesh((), (0, 1, 2, 3), cp=2, dp=2)},
}


def test_a_killed_rank_that_shares_sequences_is_replaced(data: Path, tmp_path: Path) -> None:
    settings = (*SHARED, "parallel.llm.cp_method=ring", "train.validate_every=3")
    assert launch(request_for(data, tmp_path / "unbroken", *settings)) == (0, "")
    fault = FailAt(1, 3, "kill", action=Backward, once=tmp_path / "killed")
    assert launch(request_for(data, tmp_path / "run", *settings, max_restarts=1), fault) == (0, "")
    assert (tmp_path / "killed").exists()
    assert_same_end(tmp_path / "run", tmp_path / "unbroken")
    assert load_plan(tmp_path / "run" / PLAN_FILE).units["llm"].cp == 2
    assert len(read_metrics(tmp_path / "run")) == len(read_metrics(tmp_path / "unbroken"))


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_a_run_that_shares_sequences_goes_on_without_sharing(
    method: str, data: Path, unbroken: Path, tmp_path: Path
) -> None:
    """The search proposes the plan, a rank is killed behind the first checkpoint, and another plan continues."""
    shared = request_for(data, tmp_path, *SHARED, f"parallel.llm.cp_method={method}")
    with pytest.raises(RanksFailed, match="rank 1: died without a word"):
        run_all(shared, shared, faults=FailAt(1, 3, "kill", action=Backward))
    llm = load_plan(tmp_path / PLAN_FILE).units["llm"]
    assert (llm.cp, llm.cp_method, llm.cp_split) == (2, method, "even")
    resumed = request_for(data, tmp_path, *WHOLE, resume=True)
    assert run_all(resumed, resumed) == ["", ""]
    assert load_plan(tmp_path / PLAN_FILE).units["llm"].cp == 1
    losses, expected = ([step["loss"] for step in read_metrics(run)] for run in (tmp_path, unbroken))
    assert len(losses) == NUM_STEPS
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_run_moves_between_degrees_bit_for_bit(tmp_path: Path) -> None:
    settings: Any = recipe(model__llm__tie_embeddings=True)
    before = DEGREES["ring cp2 pp2"]
    expected = sum(run_ranks(4, _train_and_save, settings, before, tmp_path))
    stored = tensors(open_newest_good(tmp_path, refuse))
    for name, meshes in DEGREES.items():
        num_ranks = len({rank for mesh in meshes.values() for rank in mesh.ranks})
        seen = run_ranks(num_ranks, _restore_and_train, settings, meshes, tmp_path)
        held = whole([shard for _, shards in seen for shard in shards])
        assert held.keys() == stored.keys(), name
        assert all(torch.equal(held[tensor], stored[tensor]) for tensor in stored), name
        assert sum(loss for loss, _ in seen) == pytest.approx(expected, rel=1e-6), name
