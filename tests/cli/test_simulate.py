"""`mmtrain simulate` of a recipe, a plan and a run, and the arguments it rejects."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mmtrain.cli.app import app
from mmtrain.errors import MmtrainError
from mmtrain.runtime.run_folder import PLAN_FILE, RECIPE_FILE
from tests.program.trace_format import require_trace


def simulate(*arguments: object) -> Result:
    done = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    if isinstance(done.exception, MmtrainError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


def test_a_run_is_compared_with_its_own_trace(run_dir: Path, tmp_path: Path) -> None:
    """The run took twice as long as predicted, in every stage and in total."""
    out = tmp_path / "both.json"
    output = json.loads(simulate(run_dir, "--json", "--out", out).stdout)
    assert {row["what"] for row in output["seconds"]} >= {"llm.0 forward", "vision.0 backward", "step"}
    assert all(row["error"] == pytest.approx(-0.5) for row in output["seconds"])
    step = next(row["predicted_s"] for row in output["seconds"] if row["what"] == "step")
    path = output["critical_path"]
    assert path[0]["start_s"] == 0
    assert sum(action["seconds"] for action in path) == pytest.approx(step)
    assert sum(part["seconds"] for part in output["critical"]) == pytest.approx(step)
    assert sum(part["actions"] for part in output["critical"]) == len(path)
    trace = json.loads(out.read_text())
    require_trace(trace)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert {"rank 0", "rank 0, simulated"} <= names


def test_recipe_and_plan_against_a_run_print_the_same(run_dir: Path) -> None:
    text = simulate(run_dir).stdout
    assert "-50.0%" in text
    assert "Critical path" in text
    assert simulate(run_dir / PLAN_FILE, "--against", run_dir).stdout == text
    assert simulate(run_dir / RECIPE_FILE, "--against", run_dir).stdout == text


def test_without_a_run_only_predictions_are_printed(run_dir: Path) -> None:
    text = simulate(run_dir / RECIPE_FILE, "--plan", run_dir / PLAN_FILE).stdout
    assert "measured" not in text
    assert "Critical path" in text


def test_a_fault_is_simulated_beside_the_step(run_dir: Path) -> None:
    arguments = [run_dir / RECIPE_FILE, "--plan", run_dir / PLAN_FILE, "--fault", "slow:1:2"]
    fault = json.loads(simulate(*arguments, "--json").stdout)["fault"]
    assert fault["step_time_s"] > fault["unbroken_s"]
    assert simulate(*arguments).stdout.endswith(f"\n\n{fault['consequences']}\n")


@pytest.mark.parametrize("fault", ["slow:1", "lost:first", "late:1", "dead:1:2"])
def test_a_fault_of_no_known_form_is_rejected(run_dir: Path, fault: str) -> None:
    forms = "slow:RANK:FACTOR, lost:RANK, dead:RANK or dead_node:NODE"
    with pytest.raises(MmtrainError, match=f"--fault {fault}: allowed: {forms}, for example slow:3:1.5"):
        simulate(run_dir / RECIPE_FILE, "--plan", run_dir / PLAN_FILE, "--fault", fault)


def test_contradicting_arguments_are_rejected(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(MmtrainError, match=r"names no data; give its recipe .*--against RUN"):
        simulate(run_dir / PLAN_FILE)
    with pytest.raises(MmtrainError, match="--plan FILE goes with a recipe"):
        simulate(run_dir, "--plan", run_dir / PLAN_FILE)
    with pytest.raises(MmtrainError, match="compared with its own trace"):
        simulate(run_dir, "--against", run_dir)
    with pytest.raises(MmtrainError, match="cannot read the trace"):
        simulate(run_dir / RECIPE_FILE, "--plan", run_dir / PLAN_FILE, "--against", tmp_path)
    with pytest.raises(MmtrainError, match="cannot write the trace"):
        simulate(run_dir, "--out", tmp_path / "none" / "trace.json")
