"""Plans for other trainers: the emitted file states the plan's layout, in settings that the trainer accepts."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from mmtrain.api.plans import make_plan
from mmtrain.api.recipe_index import index_recipe
from mmtrain.errors import MmtrainError, PlanError
from mmtrain.planning import Plan
from mmtrain.planning.emit.accepted_settings import accepted_settings
from mmtrain.planning.emit.emit_plan import TRAINERS, emit
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.recipe import Recipe, load_recipe
from tests.planning.read_emitted import megatron_layout, started_arguments, write_recipes

SHELLCHECK = shutil.which("shellcheck")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_recipes(tmp_path)
    return tmp_path


def planned(path: Path, settings: list[str]) -> tuple[Plan, Recipe]:
    recipe = load_recipe(path, settings).recipe
    return make_plan(recipe, index_recipe(recipe).lengths, PlanRequest(num_alternatives=1)).plan, recipe


def settings_of(options: str) -> list[str]:
    """Return `--placement` and `--set` of a message as settings."""
    words = shlex.split(options)
    pairs = zip(words[::2], words[1::2], strict=True)
    return [f"parallel.placement={value}" if name == "--placement" else value for name, value in pairs]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("text", ["parallel.llm.pp=2", "parallel.llm.vpp=2"]),
        ("text", ["parallel.llm.tp=2", "parallel.llm.pp=2", "parallel.llm.vpp=1", "parallel.llm.recompute=all"]),
        ("moe", ["parallel.llm.pp=2", "parallel.llm.ep=2"]),
    ],
)
def test_the_layout_read_back_from_megatron_lm_takes_as_long(folder: Path, name: str, settings: list[str]) -> None:
    path = folder / f"{name}.yaml"
    plan, recipe = planned(path, ["parallel.placement=unified", *settings])
    arguments = started_arguments(emit(plan, recipe, "megatron-lm").text, folder)
    read_back, _ = planned(path, megatron_layout(arguments))
    assert read_back.predicted.step_time_s == plan.predicted.step_time_s
    assert read_back.units == plan.units


def test_an_encoder_that_megatron_lm_cannot_place_has_options_that_it_can(folder: Path) -> None:
    plan, recipe = planned(folder / "vision.yaml", ["parallel.placement=disaggregated", "parallel.llm.pp=2"])
    with pytest.raises(PlanError, match="cannot run this plan:\n  the placement is disaggregated") as caught:
        emit(plan, recipe, "megatron-lm")
    options = settings_of(str(caught.value).rpartition("is found with ")[2])
    plan, recipe = planned(folder / "vision.yaml", options)
    emitted = emit(plan, recipe, "megatron-lm")
    arguments = started_arguments(emitted.text, folder)
    assert arguments["--vision-model-type"] == ["clip"]
    assert arguments["--img-h"] == ["336"]
    read_back, _ = planned(folder / "vision.yaml", megatron_layout(arguments, encoder_layers=24))
    assert read_back.predicted.step_time_s == plan.predicted.step_time_s


@pytest.mark.parametrize("name", ["text", "moe"])
@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
def test_shellcheck_has_no_remark(folder: Path, name: str) -> None:
    plan, recipe = planned(folder / f"{name}.yaml", ["parallel.placement=unified"])
    path = folder / "emitted.sh"
    path.write_text(emit(plan, recipe, "megatron-lm").text, encoding="utf-8")
    assert subprocess.run([str(SHELLCHECK), str(path)], capture_output=True, text=True).stdout == ""


def test_an_unknown_trainer_is_refused_with_the_known_ones(folder: Path) -> None:
    plan, recipe = planned(folder / "text.yaml", [])
    with pytest.raises(MmtrainError, match=f"--emit tranier: no such trainer; allowed: {', '.join(TRAINERS)}"):
        emit(plan, recipe, "tranier")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("--tensor-model-parallel-size", 8, None),
        ("--tensor-model-parallel-size", 1.5, "is 1.5; allowed: int"),
        ("--tensor-parallel", 8, "has no --tensor-parallel"),
        ("--lr", 1, None),
        ("--swiglu", True, None),
        ("--swiglu", "true", "takes no value"),
        ("--normalization", "RMSNorm", None),
        ("--normalization", "rms", "allowed: LayerNorm, RMSNorm"),
        ("--recompute-modules", ["mlp"], None),
        ("--num-layers", [1, 2], "allowed: one int"),
    ],
)
def test_what_the_trainer_would_reject_is_found(name: str, value: object, problem: str | None) -> None:
    found = accepted_settings("megatron-lm").problem(name, value)
    assert found is None if problem is None else problem in (found or "")
