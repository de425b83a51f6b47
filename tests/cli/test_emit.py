"""`mmtrain plan --emit` writes a plan for another trainer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmtrain.planning.emit.emit_plan import TRAINERS
from tests.cli.conftest import RunMmtrain
from tests.planning.read_emitted import started_arguments, write_recipes

LAYOUT = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--pipeline-model-parallel-layout")
SETTINGS = ("--placement", "unified", "--set", "parallel.llm.pp=2", "--set", "parallel.llm.vpp=2")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_recipes(tmp_path)
    return tmp_path / "text.yaml"


def test_the_script_alone_goes_to_standard_output(recipe: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mmtrain", "plan", str(recipe), *SETTINGS, "--emit", "megatron-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    arguments = started_arguments(done.stdout, tmp_path)
    assert arguments[""] == []
    assert arguments["--nproc-per-node"] == ["4"]
    assert len(arguments["--pipeline-model-parallel-layout"][0].split("|")) == 4
    assert "What megatron-lm core_v" in done.stderr
    assert "cannot express of the plan" in done.stderr


@pytest.mark.slow
def test_compare_predicts_the_same_step_for_the_emitted_layout(
    run_mmtrain: RunMmtrain, recipe: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    done = run_mmtrain("plan", recipe, *SETTINGS, "--emit", "megatron-lm", "--emit-to", path, "--json")
    plan = json.loads(done.stdout)
    arguments = started_arguments(path.read_text(encoding="utf-8"), tmp_path)
    layout = " ".join(f"{name} {arguments[name][0]}" for name in LAYOUT)
    compared = run_mmtrain("plan", recipe, "--placement", "unified", "--compare", layout, "--json")
    steps = {other["summary"]: other["step_time_s"] for other in json.loads(compared.stdout)["alternatives"]}
    [step_time_s] = [step for summary, step in steps.items() if summary.startswith("your layout")]
    assert step_time_s == plan["predicted"]["step_time_s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--emit", "megatron"], f"--emit megatron: no such trainer; allowed: {', '.join(TRAINERS)}"),
        (["--emit", "megatron-lm", "--json"], "name a file with --emit-to"),
        (["--emit-to", "x.sh"], "--emit-to x.sh: name the trainer too, like --emit megatron-lm"),
        (["--emit", "megatron-lm", "--gpus", "2,4"], "--gpus compares clusters: leave out --out, --emit"),
        (["--emit", "megatron-lm", "--diff", "x.json"], "leave out --emit"),
        (["--emit", "megatron-lm", "--emit-to", "no/x.sh"], "--emit-to no/x.sh"),
    ],
)
def test_wrong_options_give_one_message(
    run_mmtrain: RunMmtrain, recipe: Path, options: list[str], message: str
) -> None:
    done = run_mmtrain("plan", recipe, *options)
    assert done.returncode == 2
    assert message in done.stderr
