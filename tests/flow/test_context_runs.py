"""Whole runs in which ranks share sequences: killed and continued, moved to other degrees, and asked questions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmtrain.checkpoint import open_newest_good
from mmtrain.plan.artifact.plan import Plan, UnitPlan
from mmtrain.plan.planner import plan_recipe
from mmtrain.program import Backward
from mmtrain.report import read_metrics
from tests.distributed import run_ranks
from tests.faults import FailAt
from tests.flow.cases import Mesh, recipe
from tests.flow.gather import whole
from tests.flow.runs import assert_same_end, launch, refuse, request_for, tensors
from tests.flow.test_replan import _restore_and_train, _train_and_save

pytestmark = pytest.mark.slow

TWO_REPLICAS = ("parallel.placement=unified", "parallel.llm={tp: 1, pp: 1, dp: 2}", "train.validate_every=3")
VISION = Mesh((), (0, 1), dp=2)
DEGREES: dict[str, dict[str, Mesh]] = {
    "cp1": {"vision": Mesh((), (0,)), "llm": Mesh((), (0,))},
    "ring cp2 pp2": {"vision": VISION, "llm": Mesh((2,), (0, 1, 2, 3), cp=2, method="ring", split="even")},
    "ulysses cp4": {"vision": VISION, "llm": Mesh((), (0, 1, 2, 3), cp=4)},
    "ulysses cp2 dp2": {"vision": Mesh((), (0, 1, 2, 3), dp=4), "llm": Mesh((), (0, 1, 2, 3), cp=2, dp=2)},
}


def plan_with_shared_sequences(*arguments: Any, **options: Any) -> Plan:
    """Plan, and let the LLM's two replicas compute every microbatch together."""
    made = plan_recipe(*arguments, **options)
    llm = made.units["llm"]
    assert (llm.dp, llm.cp) == (2, 1)
    fields = llm.model_dump() | {"dp": 1, "cp": 2, "cp_method": "ring", "cp_split": "even"}
    counts = {unit: 2 * count for unit, count in made.schedule.num_microbatches.items()}
    schedule = made.schedule.model_copy(update={"num_microbatches": counts})
    units = made.units | {"llm": UnitPlan.model_validate(fields)}
    return made.model_copy(update={"units": units, "schedule": schedule})


def test_a_killed_rank_that_shares_sequences_is_replaced(data: Path, tmp_path: Path) -> None:
    def request(name: str, **options: Any) -> Any:
        train = request_for(data, tmp_path / name, *TWO_REPLICAS, **options)
        return replace(train, planner=plan_with_shared_sequences)

    assert launch(request("unbroken")) == (0, "")
    fault = FailAt(1, 3, "kill", action=Backward, once=tmp_path / "killed")
    assert launch(request("run", max_restarts=1), fault) == (0, "")
    assert (tmp_path / "killed").exists()
    assert_same_end(tmp_path / "run", tmp_path / "unbroken")
    plan = Plan.model_validate_json((tmp_path / "run" / "plan.json").read_text())
    assert plan.units["llm"].cp == 2
    assert len(read_metrics(tmp_path / "run")) == len(read_metrics(tmp_path / "unbroken"))


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
