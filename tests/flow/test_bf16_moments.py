"""Runs whose optimizer keeps its moments in bf16: resumed and converted."""

from pathlib import Path

import pytest

from mmtrain.checkpoint import open_newest_good
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.runtime.training.restore_run import describe_converted_moments
from tests.flow.cases import Mesh, plan, recipe
from tests.flow.equality import assert_equals_one_process
from tests.flow.runs import NUM_STEPS, kill_and_resume, refuse, request_for, run_all

BF16 = "train.optimizer.moments=bf16"


def moments_dtypes(run_dir: Path) -> set[str]:
    """Return the types of all moments in the newest checkpoint."""
    checkpoint = open_newest_good(run_dir / CHECKPOINTS_FOLDER, refuse)
    return {stored.dtype for name, stored in checkpoint.manifest.tensors.items() if "#" in name}


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit_and_moments_can_be_converted(data: Path, tmp_path: Path) -> None:
    killed = kill_and_resume(data, tmp_path, BF16, "train.deterministic=true")
    assert moments_dtypes(killed.run_dir) == {"bfloat16"}
    checkpoint = open_newest_good(killed.run_dir / CHECKPOINTS_FOLDER, refuse)
    assert describe_converted_moments(checkpoint, "bf16") is None
    expected = "the checkpoint has bf16, and the recipe sets train.optimizer.moments to fp32"
    assert expected in (describe_converted_moments(checkpoint, "fp32") or "")

    more = request_for(data, killed.run_dir, f"train.steps={NUM_STEPS + 1}", resume=True)
    assert run_all(more, more) == ["", ""]
    assert moments_dtypes(killed.run_dir) == {"float32"}


@pytest.mark.slow
def test_a_plan_with_bf16_moments_trains_like_one_process_with_fp32_moments() -> None:
    settings = recipe(train__optimizer__moments="bf16", model__llm__tie_embeddings=True)
    meshes = {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), tuple(range(2, 10)), tp=2, dp=2)}
    assert_equals_one_process(settings, plan(settings, **meshes), later_tolerance=2e-3)
