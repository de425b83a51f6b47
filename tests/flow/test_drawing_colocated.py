"""A generator on the LLM's ranks, its passes between the LLM's (`colocated`), computes what one process does."""

import json
from pathlib import Path
from typing import Any

import pytest

from mmtrain.planning import Plan
from tests.flow.cases import Mesh
from tests.flow.drawing import UNET, recipe, write_samples
from tests.flow.test_drawing import Meshes, assert_equals_one_process, command, freeze
from tests.tiers import mostly_long

U_NET: dict[str, Any] = {"model__generator": UNET}
PIPELINE = Mesh((2,), (0, 1))
ON_BOTH: Meshes = {"vision": Mesh((), (0, 1), dp=2), "llm": PIPELINE, "generator": Mesh((), (0, 1), dp=2)}
# name -> (recipe changes, meshes)
CASES: dict[str, tuple[dict[str, Any], Meshes]] = {
    "a transformer on both ranks of a pipeline": ({}, ON_BOTH),
    "a u-net on both ranks of a pipeline": (U_NET, ON_BOTH),
    "without an encoder's replica on the last rank": ({}, {**ON_BOTH, "vision": Mesh((), (0,))}),
    "generator tp2 of one microbatch for two of the llm's, llm tp2 pp2, all recomputed": (
        {},
        {
            "vision": Mesh((), (0, 1, 2, 3), dp=4, n=2),
            "llm": Mesh((2,), (0, 1, 2, 3), tp=2, sp=True, recompute=(0, 1, 2, 3)),
            "generator": Mesh((), (0, 1, 2, 3), tp=2, dp=2, n=2, recompute=tuple(range(5))),
        },
    ),
    "a transformer of two stages, llm tp2 pp2": (
        {"model__generator__context_dropout": 0.5, "model__generator__loss_weight": 0.3},
        {
            "vision": Mesh((), (0, 1, 2, 3), dp=4),
            "llm": Mesh((2,), (0, 1, 2, 3), tp=2),
            "generator": Mesh((3,), (0, 1, 2, 3), dp=2),
        },
    ),
    "a u-net on each rank of a tensor-parallel group, two replicas of the llm": (
        U_NET,
        {
            "vision": Mesh((), (0, 1, 2, 3), dp=4),
            "llm": Mesh((), (0, 1, 2, 3), tp=2, dp=2),
            "generator": Mesh((), (0, 1, 2, 3), dp=4),
        },
    ),
    "model chunks, tied": (
        {"model__llm__tie_embeddings": True},
        {**ON_BOTH, "llm": Mesh((1, 2, 3), (0, 1), vpp=2)},
    ),
    "encoder only": (freeze("llm", "generator"), ON_BOTH),
    "llm only": (freeze("vision", "generator"), ON_BOTH),
    "generator only": (freeze("vision", "llm"), ON_BOTH),
    "projectors only": (U_NET | freeze("vision", "llm", "generator"), ON_BOTH),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write samples that answer and draw."""
    folder = tmp_path_factory.mktemp("drawing")
    write_samples(folder)
    return folder


@pytest.mark.parametrize("case", mostly_long(CASES, every=2))
def test_passes_between_the_llms_compute_what_one_process_computes(folder: Path, case: str) -> None:
    assert_equals_one_process(folder, *CASES[case], kind="coarse")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {**U_NET, "model__vision": None}], ids=["three units", "without an encoder"])
def test_a_planned_order_trains_as_one_process_does(changes: dict[str, Any], tmp_path: Path) -> None:
    write_samples(tmp_path, shows_images="model__vision" not in changes)
    path = tmp_path / "recipe.json"
    path.write_text(recipe(tmp_path, **changes).model_dump_json(exclude_unset=True))
    settings = ("cluster.ranks=2", "cluster.hardware=cpu-core", "parallel.placement=colocated", "parallel.llm.pp=2")
    arguments = [word for setting in settings for word in ("--set", setting)]
    command(tmp_path, "plan", str(path), *arguments, "--out", "plan.json")
    chosen = Plan.model_validate_json((tmp_path / "plan.json").read_text())
    assert (chosen.placement, chosen.schedule.kind) == ("colocated", "explicit")
    assert chosen.units["generator"].dp == 2
    steps = json.loads(command(tmp_path, "verify", str(path), *arguments, "--json"))
    for step in steps:
        assert step["differences"] == []
        assert step["loss"] == pytest.approx(step["expected_loss"], rel=1e-5)
