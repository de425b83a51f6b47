"""A run continues on another plan: the same weights and moments, cut anew, and the same next loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmtrain.checkpoint import Checkpoint, ShardSpec, open_newest_good
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.checkpointing import BackgroundSaver, SavedRank, restore_checkpoint
from mmtrain.runtime.execution.rank_context import RankContext, build_rank_context
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import Mesh, plan, recipe, step_data
from tests.flow.gather import copy, whole

LR, STEPS_BEFORE = 0.01, 2
TIED = {"model__llm__tie_embeddings": True}
PLANS: dict[str, dict[str, Mesh]] = {
    "one rank": {"vision": Mesh((), (0,)), "llm": Mesh((), (0,))},
    "disaggregated, llm pp2 dp2": {"vision": Mesh((), (0,)), "llm": Mesh((2,), (1, 2, 3, 4), dp=2)},
    "disaggregated, both tp2, encoder microbatches merged": {
        "vision": Mesh((), (0, 1), tp=2, n=2),
        "llm": Mesh((), (2, 3), tp=2),
    },
    "unified pp2 dp2": {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((3,), (0, 1, 2, 3), dp=2)},
}
Seen = tuple[float, list[NamedShard]]


def _world() -> World:
    return World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))


def _save(root: Path, job: RankContext, next_step: int) -> None:
    """Save while standing still."""
    saver = BackgroundSaver(root, SavedRank.of(job), lambda: {"facts": {}})
    saver.start(next_step, copy=False)
    saver.finish()


def _train_and_save(settings: Recipe, meshes: dict[str, Mesh], root: Path) -> float:
    """Train, save, and return this rank's part of the loss of one step more."""
    job = build_rank_context(settings, plan(settings, **meshes), _world())
    for step in range(STEPS_BEFORE):
        job.train(step_data(job, step), LR)
    _save(root, job, STEPS_BEFORE)
    return job.train(step_data(job, STEPS_BEFORE), LR).loss


def _restore_and_train(settings: Recipe, meshes: dict[str, Mesh], root: Path) -> Seen:
    """Restore, and return this rank's part of the next loss and all that it holds."""
    job = build_rank_context(settings, plan(settings, **meshes), _world())
    restore_checkpoint(root, job, on_bad=_refuse)
    held = [copy(s) for unit in job.optimizer.units.values() for s in unit.shards()]
    return job.train(step_data(job, STEPS_BEFORE), LR).loss, held


def _refuse(text: str) -> None:
    raise AssertionError(text)


def _ranks(meshes: dict[str, Mesh]) -> int:
    return len({r for mesh in meshes.values() for r in mesh.ranks})


def _stored(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {n: checkpoint.read(n, ShardSpec(checkpoint.full_shape(n))) for n in checkpoint.names()}


@pytest.mark.parametrize(
    "before",
    [
        "disaggregated, llm pp2 dp2",
        pytest.param("disaggregated, both tp2, encoder microbatches merged", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_on_any_plan(tmp_path: Path, before: str) -> None:
    settings: Any = recipe(**TIED)
    expected = sum(run_ranks(_ranks(PLANS[before]), _train_and_save, settings, PLANS[before], tmp_path))
    stored = _stored(open_newest_good(tmp_path, _refuse))
    for name, meshes in PLANS.items():
        seen: list[Seen] = run_ranks(_ranks(meshes), _restore_and_train, settings, meshes, tmp_path)
        held = whole([shard for _, shards in seen for shard in shards])
        assert held.keys() == stored.keys(), name
        assert all(torch.equal(held[tensor], stored[tensor]) for tensor in stored), name
        assert sum(loss for loss, _ in seen) == pytest.approx(expected, rel=1e-6), name


def _save_both_ways(settings: Recipe, meshes: dict[str, Mesh], root: Path) -> None:
    """Save while standing still, then from a copy while the next step runs."""
    job = build_rank_context(settings, plan(settings, **meshes), _world())
    job.train(step_data(job, 0), LR)
    _save(root / "still", job, 1)
    saver = BackgroundSaver(root / "moving", SavedRank.of(job), lambda: {"facts": {}})
    saver.start(1, copy=True)
    job.train(step_data(job, 1), LR)
    assert saver.finish() == root / "moving" / "step-00000001"
    assert not saver.pending


def test_saving_in_the_background_writes_the_same_bytes(tmp_path: Path) -> None:
    meshes = PLANS["disaggregated, llm pp2 dp2"]
    run_ranks(_ranks(meshes), _save_both_ways, recipe(**TIED), meshes, tmp_path)
    still, moving = (tmp_path / way / "step-00000001" for way in ("still", "moving"))
    names = sorted(file.name for file in still.iterdir())
    assert len(names) == 2 * _ranks(meshes) + 1, "a tensor file and a state for each rank, and the manifest"
    assert sorted(file.name for file in moving.iterdir()) == names
    assert all((still / name).read_bytes() == (moving / name).read_bytes() for name in names)
