"""A U-Net trains beside an LLM: as `diffusers` computes it, and alike under every plan."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from diffusers import UNet2DConditionModel

from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from tests.flow.cases import Mesh
from tests.flow.drawing import UNET, recipe, write_samples
from tests.flow.test_drawing import APART, Meshes, assert_equals_one_process, command, freeze, steps_of
from tests.tiers import mostly_long

# name -> (recipe changes, meshes). A U-Net is whole on each of its ranks.
CASES: dict[str, tuple[dict[str, Any], Meshes]] = {
    "one rank": ({}, {unit: Mesh((), (0,)) for unit in APART}),
    "unified, a stage of its own at the end": (
        {},
        {"vision": Mesh((), (0,)), "llm": Mesh((2,), (0, 1)), "generator": Mesh((), (2,))},
    ),
    "unified, two replicas, all recomputed": (
        {},
        {
            "vision": Mesh((), (0, 1), dp=2, recompute=(0, 1, 2)),
            "llm": Mesh((2,), (0, 1, 2, 3), dp=2, recompute=(0, 1, 2, 3)),
            "generator": Mesh((), (2, 3), dp=2, recompute=tuple(range(17))),
        },
    ),
    "unified, whole on both ranks of a tensor-parallel group": (
        {},
        {unit: Mesh((), (0, 1), tp=2) for unit in APART},
    ),
    "disaggregated 1:1:1": ({}, APART),
    "disaggregated 1:2:1": (
        {},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), dp=2), "generator": Mesh((), (3,))},
    ),
    "disaggregated 2:1:2": (
        {},
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (2,)), "generator": Mesh((), (3, 4), dp=2)},
    ),
    "llm tp2, u-net of two replicas": (
        {},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (0, 1), tp=2, sp=True), "generator": Mesh((), (2, 3), dp=2)},
    ),
    "images in buckets of two sizes": (
        {"model__generator": UNET | {"image_size": 12, "bucket_step": 4}},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), dp=2), "generator": Mesh((), (3,), n=2)},
    ),
    "encoder only": (freeze("llm", "generator"), APART),
    "llm only": (freeze("vision", "generator"), APART),
    "generator only": (freeze("vision", "llm"), APART),
    "projectors only": (freeze("vision", "llm", "generator"), APART),
}
QUICK = ("unified, a stage of its own at the end",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write samples that answer and draw."""
    folder = tmp_path_factory.mktemp("drawing")
    write_samples(folder)
    return folder


def assert_case(folder: Path, case: str) -> None:
    changes, meshes = CASES[case]
    assert_equals_one_process(folder, {"model__generator": dict(UNET), **changes}, meshes)


@pytest.mark.parametrize("case", QUICK)
def test_every_plan_computes_what_one_process_computes(folder: Path, case: str) -> None:
    assert_case(folder, case)


@pytest.mark.parametrize("case", mostly_long((case for case in CASES if case not in QUICK), every=2))
def test_more_plans_compute_what_one_process_computes(folder: Path, case: str) -> None:
    assert_case(folder, case)


@pytest.mark.slow
def test_a_run_goes_on_under_another_plan_and_is_exported(folder: Path, tmp_path: Path) -> None:
    """Save a U-Net that both ranks of a tensor-parallel group hold whole, and continue it on ranks of its own."""
    path, run = tmp_path / "recipe.json", tmp_path / "run"
    settings = recipe(folder, model__generator=dict(UNET), train__checkpoint__every=2)
    path.write_text(settings.model_dump_json(exclude_unset=True))
    train = ("train", str(path), "--run-dir", str(run))
    together = ("cluster.ranks=2", "parallel.placement=unified", "parallel.llm.tp=2")
    command(tmp_path, *train, *(word for setting in together for word in ("--set", setting)))
    unbroken = steps_of(run)
    shutil.rmtree(run / CHECKPOINTS_FOLDER / "step-00000004")
    apart = ("--set", "cluster.ranks=3", "--set", "parallel.placement=disaggregated")
    command(tmp_path, *train, "--resume", *apart)
    resumed = steps_of(run)
    assert resumed[:2] == unbroken[:2]
    for step, expected in zip(resumed[2:], unbroken[2:], strict=True):
        for key in ("loss", "drawing_loss", "grad_norm"):
            assert step[key] == pytest.approx(expected[key], rel=1e-4), key
    command(tmp_path, "export", str(run), "--out", str(tmp_path / "unet"), "--generator")
    exported = UNet2DConditionModel.from_pretrained(tmp_path / "unet")
    assert exported.config.block_out_channels == [8, 16]
