"""Units with a generator behind them, sharded over all ranks (`replicated`), compute what one process does."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from mmtrain.program import DispatchMode
from mmtrain.program.schedules.builder import ScheduleKind
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from tests.flow.cases import Mesh
from tests.flow.drawing import DIT, UNET, recipe, write_samples
from tests.flow.test_drawing import APART, assert_equals_one_process, command, freeze, steps_of

ALL = tuple(range(20))  # layers
TIED: dict[str, Any] = {"model__llm__tie_embeddings": True}
U_NET: dict[str, Any] = {"model__generator": UNET}
# name -> (recipe changes, ranks, shard, recomputed layers, dispatch, schedule)
CASES: dict[str, tuple[dict[str, Any], int, int, tuple[int, ...], DispatchMode, ScheduleKind]] = {
    "two ranks, one copy": ({}, 2, 2, (), "none", "1f1b"),
    "u-net, two ranks, one copy": (U_NET, 2, 2, (), "none", "1f1b"),
    "four ranks, two copies, all recomputed, tied": (TIED, 4, 2, ALL, "llm", "1f1b"),
    "u-net, four ranks, one copy, all recomputed": (U_NET, 4, 4, ALL, "llm", "1f1b"),
    "two copies": ({}, 2, 1, (), "none", "1f1b"),
    "encoder first": ({}, 2, 2, (), "llm", "encoder_first"),
    "some drawn without context": (
        {"model__generator": {**DIT, "context_dropout": 0.5, "loss_weight": 0.3}}, 2, 2, (), "none", "1f1b"
    ),
    "encoder only": (freeze("llm", "generator"), 2, 2, (), "none", "1f1b"),
    "generator only": (freeze("vision", "llm"), 2, 2, (), "none", "1f1b"),
    "llm only": (freeze("vision", "generator"), 2, 2, (), "none", "1f1b"),
    "u-net, projectors only": (U_NET | freeze("vision", "llm", "generator"), 2, 2, (), "none", "1f1b"),
}  # fmt: skip
QUICK = ("two ranks, one copy",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write samples that answer and draw."""
    folder = tmp_path_factory.mktemp("drawing")
    write_samples(folder)
    return folder


def assert_case(folder: Path, case: str) -> None:
    changes, num_ranks, shard, recompute, dispatch, kind = CASES[case]
    mesh = Mesh((), tuple(range(num_ranks)), dp=num_ranks, recompute=recompute)
    meshes = dict.fromkeys(APART, mesh)
    assert_equals_one_process(folder, changes, meshes, kind=kind, shard=shard, dispatch=dispatch)


@pytest.mark.parametrize("case", QUICK)
def test_sharded_units_compute_what_one_process_computes(folder: Path, case: str) -> None:
    assert_case(folder, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK])
def test_more_sharded_units_compute_what_one_process_computes(folder: Path, case: str) -> None:
    assert_case(folder, case)


@pytest.mark.slow
def test_a_run_goes_on_with_sharded_units(folder: Path, tmp_path: Path) -> None:
    path, run = tmp_path / "recipe.json", tmp_path / "run"
    path.write_text(recipe(folder, train__checkpoint__every=2).model_dump_json(exclude_unset=True))
    train = ("train", str(path), "--run-dir", str(run))
    command(tmp_path, *train, "--set", "cluster.ranks=2", "--set", "parallel.placement=unified")
    unbroken = steps_of(run)
    shutil.rmtree(run / CHECKPOINTS_FOLDER / "step-00000004")
    sharded = ("cluster.ranks=2", "parallel.placement=replicated", "parallel.shard=all")
    command(tmp_path, *train, "--resume", *(word for setting in sharded for word in ("--set", setting)))
    for step, expected in zip(steps_of(run)[2:], unbroken[2:], strict=True):
        for key in ("loss", "drawing_loss", "grad_norm"):
            assert step[key] == pytest.approx(expected[key], rel=1e-4), key
