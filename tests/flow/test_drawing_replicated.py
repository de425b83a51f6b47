"""Units with a generator behind them, sharded over all ranks (`replicated`), compute what one process does."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmtrain.data import build_index
from mmtrain.program import DispatchMode
from mmtrain.program.schedules.builder import ScheduleKind
from mmtrain.recipe.settings.modalities import GENERATOR
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from tests.flow.cases import Mesh
from tests.flow.drawing import DIT, UNET, recipe, write_samples
from tests.flow.test_drawing import (
    ALL_SAMPLES,
    APART,
    Samples,
    assert_equals_one_process,
    batch,
    command,
    freeze,
    steps_of,
)
from tests.tiers import mostly_long

ALL = tuple(range(20))  # layers
TIED: dict[str, Any] = {"model__llm__tie_embeddings": True}
U_NET: dict[str, Any] = {"model__generator": UNET}
BY_ALL_GATHER: dict[str, Any] = {"parallel": {"placement": "replicated", "exchange": "all_gather"}}
# name -> (recipe changes, ranks, shard or None for whole weights, recomputed layers, dispatch, schedule)
CASES: dict[str, tuple[dict[str, Any], int, int | None, tuple[int, ...], DispatchMode, ScheduleKind]] = {
    "two ranks, one copy": ({}, 2, 2, (), "none", "1f1b"),
    "u-net, two ranks, one copy": (U_NET, 2, 2, (), "none", "1f1b"),
    "four ranks, two copies, all recomputed, tied": (TIED, 4, 2, ALL, "llm", "1f1b"),
    "u-net, four ranks, one copy, all recomputed": (U_NET, 4, 4, ALL, "llm", "1f1b"),
    "two copies": ({}, 2, 1, (), "none", "1f1b"),
    "u-net, all dispatched": (U_NET, 2, 2, (), "all", "1f1b"),
    "all dispatched, four ranks, two copies, all recomputed, tied": (TIED, 4, 2, ALL, "all", "1f1b"),
    "all dispatched by all-gather, four ranks": (BY_ALL_GATHER, 4, 4, (), "all", "1f1b"),
    "u-net, all dispatched, two copies, encoder first": (U_NET, 4, 1, (), "all", "encoder_first"),
    "all dispatched, generator only": (freeze("vision", "llm"), 2, 2, (), "all", "1f1b"),
    "all dispatched, all but the generator": (freeze("generator"), 2, 1, (), "all", "1f1b"),
    "all dispatched, whole weights": ({}, 4, None, (), "all", "1f1b"),
    "encoder first": ({}, 2, 2, (), "llm", "encoder_first"),
    "some drawn without context": (
        {"model__generator": {**DIT, "context_dropout": 0.5, "loss_weight": 0.3}}, 2, 2, (), "none", "1f1b"
    ),
    "encoder only": (freeze("llm", "generator"), 2, 2, (), "none", "1f1b"),
    "generator only": (freeze("vision", "llm"), 2, 2, (), "none", "1f1b"),
    "llm only": (freeze("vision", "generator"), 2, 2, (), "none", "1f1b"),
    "u-net, projectors only": (U_NET | freeze("vision", "llm", "generator"), 2, 2, (), "none", "1f1b"),
}  # fmt: skip
# The same, of TP groups of two ranks, with whether these share tokens between GEMMs.
PAIRS: dict[str, tuple[bool, dict[str, Any], int, int | None, tuple[int, ...], DispatchMode, ScheduleKind]] = {
    "all dispatched, all recomputed, tied": (True, TIED, 4, 2, ALL, "all", "1f1b"),
    "u-net, all dispatched, encoder first": (False, U_NET, 4, 2, (), "all", "encoder_first"),
    "two copies": (True, {}, 4, 1, (), "none", "1f1b"),
    "u-net, whole weights": (False, U_NET, 4, None, (), "all", "1f1b"),
}
QUICK = ("two ranks, one copy",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write samples that answer and draw."""
    folder = tmp_path_factory.mktemp("drawing")
    write_samples(folder)
    return folder


def assert_case(folder: Path, case: str, samples: Samples = ALL_SAMPLES) -> None:
    changes, num_ranks, shard, recompute, dispatch, kind = CASES[case]
    mesh = Mesh((), tuple(range(num_ranks)), dp=num_ranks, recompute=recompute)
    meshes = dict.fromkeys(APART, mesh)
    assert_equals_one_process(folder, changes, meshes, samples, kind=kind, shard=shard, dispatch=dispatch)


@pytest.mark.parametrize("case", QUICK)
def test_sharded_units_compute_what_one_process_computes(folder: Path, case: str) -> None:
    assert_case(folder, case)


@pytest.mark.parametrize("case", mostly_long(PAIRS, every=2))
def test_sharded_parts_of_units_compute_what_one_process_computes(folder: Path, case: str) -> None:
    sp, changes, num_ranks, shard, recompute, dispatch, kind = PAIRS[case]
    mesh = Mesh((), tuple(range(num_ranks)), tp=2, dp=num_ranks // 2, recompute=recompute, sp=sp)
    meshes = dict.fromkeys(APART, mesh) | {GENERATOR: replace(mesh, sp=False)}
    assert_equals_one_process(folder, changes, meshes, ALL_SAMPLES, kind=kind, shard=shard, dispatch=dispatch)


@pytest.mark.parametrize("case", mostly_long((case for case in CASES if case not in QUICK), every=2))
def test_more_sharded_units_compute_what_one_process_computes(folder: Path, case: str) -> None:
    assert_case(folder, case)


# Every fifth sample draws one image, of those that draw; others are text alone, or about an image.
IN_WORDS = tuple(number for number in ALL_SAMPLES if number % 5 in (0, 3))
UNEVEN: dict[str, Samples] = {"one image to draw": (1, *IN_WORDS[:9]), "none to draw": IN_WORDS}


@pytest.mark.slow
@pytest.mark.parametrize("uneven", UNEVEN)
@pytest.mark.parametrize("case", ["all dispatched, whole weights", "u-net, all dispatched, two copies, encoder first"])
def test_phases_of_the_generator_that_are_empty_on_some_ranks_or_on_all(folder: Path, case: str, uneven: str) -> None:
    assert_case(folder, case, UNEVEN[uneven])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_dispatched_steps_draw_images_on_other_ranks_than_those_of_their_samples(folder: Path, num_ranks: int) -> None:
    """Else the cases would show nothing: images leave their sample's rank, and the fullest rank has fewer patches."""
    settings = recipe(folder, train__global_batch=4)
    index = build_index(settings)
    dp, counts = dict.fromkeys(APART, num_ranks), dict.fromkeys(APART, 4 // num_ranks)
    fullest = []
    for dispatch in (False, True):
        meta = batch(settings, index, 0, dp, counts, dispatch=dispatch)
        images = meta.items[GENERATOR]
        assert (meta.replica[images.sample] != images.replica).any() == dispatch
        fullest.append(int(np.bincount(images.index * num_ranks + images.replica, images.tokens).max()))
    assert fullest[1] < fullest[0]


@pytest.mark.slow
def test_a_run_goes_on_with_sharded_units(folder: Path, tmp_path: Path) -> None:
    path, run = tmp_path / "recipe.json", tmp_path / "run"
    path.write_text(recipe(folder, train__checkpoint__every=2).model_dump_json(exclude_unset=True))
    train = ("train", str(path), "--run-dir", str(run))
    command(tmp_path, *train, "--set", "cluster.ranks=2", "--set", "parallel.placement=unified")
    unbroken = steps_of(run)
    shutil.rmtree(run / CHECKPOINTS_FOLDER / "step-00000004")
    settings = ("placement=replicated", "shard=all", "dispatch=all")
    sharded = ("cluster.ranks=2", *(f"parallel.{setting}" for setting in settings))
    command(tmp_path, *train, "--resume", *(word for setting in sharded for word in ("--set", setting)))
    for step, expected in zip(steps_of(run)[2:], unbroken[2:], strict=True):
        for key in ("loss", "drawing_loss", "grad_norm"):
            assert step[key] == pytest.approx(expected[key], rel=1e-4), key
