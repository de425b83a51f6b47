"""Encoders that tp does not divide: ranks of a TP group of the LLM hold replicas of them and share their items.

The simplest cells are in `test_master.py`.
"""

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
from tests.flow.cases import AUDIO, DEEPSTACK, FINE, HEARD, MANY, Mesh, plan, recipe
from tests.flow.cells import ADAPTED
from tests.flow.equality import assert_equals_one_process
from tests.flow.gather import whole
from tests.flow.runs import NUM_STEPS, refuse, request_for, run_all, tensors
from tests.flow.test_master import FIVE_HEADS, FROZEN_VISION
from tests.flow.test_replan import _restore_and_train, _train_and_save

pytestmark = pytest.mark.slow

# name -> (recipe changes, meshes). Batches hold text alone, one image or several; every second step text alone.
CASES: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "5 heads, tp4": (FIVE_HEADS, {"vision": Mesh((), tuple(range(4)), dp=4), "llm": Mesh((), tuple(range(4)), tp=4)}),
    "5 heads, tp2 dp2 with slices of tokens, two replica groups": (
        FIVE_HEADS,
        {
            "vision": Mesh((), tuple(range(4)), dp=4),
            "llm": Mesh((), tuple(range(4)), tp=2, dp=2, sp=True),
        },
    ),
    "5 heads, tp2 pp2 vpp2 with slices of tokens, the encoder is the first round, recomputed": (
        FIVE_HEADS,
        {
            "vision": Mesh((2,), (0, 1, 2, 3), dp=2, recompute=(1, 2)),
            "llm": Mesh((2,), (0, 1, 2, 3), tp=2, sp=True, recompute=(1, 3)),
        },
    ),
    "5 heads, tp2 cp2, all cut": (
        FIVE_HEADS,
        {"vision": Mesh((), tuple(range(4)), dp=4), "llm": Mesh((), tuple(range(4)), tp=2, cp=2, split="even")},
    ),
    "tp2 of the encoder on an llm of tp4, one kv head": (
        {"model__llm__kv_heads": 1},
        {"vision": Mesh((), tuple(range(4)), tp=2, dp=2, sp=True), "llm": Mesh((), tuple(range(4)), tp=4, sp=True)},
    ),
    "5 heads beside encoders of tp2": (
        FIVE_HEADS | {"model__audio": AUDIO, "model__encoders": {"fine": FINE}},
        {
            "vision": Mesh((), (0, 1), dp=2),
            "audio": Mesh((), (0, 1), tp=2),
            "fine": Mesh((2,), (0, 1, 2, 3), tp=2),
            "llm": Mesh((), (2, 3), tp=2),
        },
    ),
    "5 heads, merged microbatches": (
        FIVE_HEADS,
        {"vision": Mesh((), (0, 1), dp=2, n=2), "llm": Mesh((), (0, 1), tp=2)},
    ),
    "5 heads, deepstack, pp2": (
        DEEPSTACK | FIVE_HEADS,
        {"vision": Mesh((2,), (0, 1, 2, 3), dp=2), "llm": Mesh((2,), (0, 1, 2, 3), tp=2, sp=True)},
    ),
    "5 heads, frozen": (
        FIVE_HEADS | FROZEN_VISION,
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1, 2, 3), tp=2)},
    ),
    "5 heads, adapters, clipped": (
        FIVE_HEADS | ADAPTED | {"train__optimizer__clip_norm": 0.05},
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1, 2, 3), tp=2, sp=True)},
    ),
}
DEGREES: dict[str, dict[str, Mesh]] = {
    "one rank": {"vision": Mesh((), (0,)), "llm": Mesh((), (0,))},
    "tp2 pp2": {"vision": Mesh((2,), (0, 1, 2, 3), dp=2), "llm": Mesh((), (2, 3), tp=2, sp=True)},
    "tp4": {"vision": Mesh((), (0, 1, 2, 3), dp=4), "llm": Mesh((), (0, 1, 2, 3), tp=4)},
    "disaggregated, tp2": {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), tp=2)},
}


def _assert_equals(case: str, texts: bool | range) -> None:
    changes, meshes = CASES[case]
    settings = recipe(**changes)
    assert_equals_one_process(settings, plan(settings, **meshes), texts_between=texts)


@pytest.mark.parametrize("case", CASES)
def test_replicas_on_a_tensor_parallel_group_compute_what_one_process_does(case: str) -> None:
    _assert_equals(case, texts=True)


@pytest.mark.parametrize("samples", [HEARD, MANY], ids=["no item in any microbatch", "64 images in one sample"])
def test_a_first_step_may_have_no_items_or_many(samples: range) -> None:
    _assert_equals("5 heads, tp4", texts=samples)


def test_a_run_moves_between_numbers_of_replicas_bit_for_bit(tmp_path: Path) -> None:
    settings: Any = recipe(**FIVE_HEADS)
    expected = sum(run_ranks(4, _train_and_save, settings, DEGREES["tp2 pp2"], tmp_path))
    stored = tensors(open_newest_good(tmp_path, refuse))
    for name, meshes in DEGREES.items():
        num_ranks = len({rank for mesh in meshes.values() for rank in mesh.ranks})
        seen = run_ranks(num_ranks, _restore_and_train, settings, meshes, tmp_path)
        held = whole([shard for _, shards in seen for shard in shards])
        assert held.keys() == stored.keys(), name
        assert all(torch.equal(held[tensor], stored[tensor]) for tensor in stored), name
        assert sum(loss for loss, _ in seen) == pytest.approx(expected, rel=1e-6), name


def test_a_run_with_replicas_goes_on_without_them(data: Path, tmp_path: Path) -> None:
    """The search proposes the replicas, a rank is killed behind the first checkpoint, and another plan continues."""
    heads = ("model.vision.heads=5", "model.vision.hidden=20", "parallel.placement=unified")
    replicas = request_for(data, tmp_path / "run", *heads, "parallel.llm.tp=2", "cluster.ranks=2")
    with pytest.raises(RanksFailed, match="rank 1: died without a word"):
        run_all(replicas, replicas, faults=FailAt(1, 3, "kill", action=Backward))
    units = load_plan(tmp_path / "run" / PLAN_FILE).units
    assert [(units[name].tp, units[name].dp) for name in ("vision", "llm")] == [(1, 2), (2, 1)]
    whole_heads = (*heads, "parallel.llm.tp=1", "cluster.ranks=2")
    resumed = request_for(data, tmp_path / "run", *whole_heads, resume=True)
    assert run_all(resumed, resumed) == ["", ""]
    unbroken = request_for(data, tmp_path / "unbroken", *whole_heads)
    assert run_all(unbroken, unbroken) == ["", ""]
    losses, expected = ([step["loss"] for step in read_metrics(tmp_path / run)] for run in ("run", "unbroken"))
    assert len(losses) == NUM_STEPS
    assert losses == pytest.approx(expected, rel=1e-5)
