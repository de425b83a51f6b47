"""`mmtrain report` of a plan, a recipe and a run, as text, page and figure; and the arguments it rejects."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mmtrain.cli.app import app
from mmtrain.errors import MmtrainError
from mmtrain.planning import load_plan
from mmtrain.runtime.run_folder import PLAN_FILE, RECIPE_FILE, TRACE_FILE

DEMO = Path(__file__).parents[2] / "recipes" / "demo.yaml"


def report(*arguments: object) -> Result:
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done


def test_a_run_as_a_page_and_a_figure(run_dir: Path, tmp_path: Path) -> None:
    out, png = tmp_path / "page.html", tmp_path / "a.pdf"
    done = report(run_dir, "-o", out, "--png", png)
    assert done.output == f"{out} written\n{png} written\n"
    assert "Step 1, measured" in out.read_text()
    assert png.read_bytes().startswith(b"%PDF")


def test_a_run_as_text_and_as_json(run_dir: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    text = report(run_dir).stdout
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before, "a run may be training there"
    assert "Step 1, measured" in text
    assert "over 3 steps" in text
    assert "Cost, logged: 3 steps: " in text
    assert "Cost, predicted: " not in text
    priced = report(run_dir, "--set", "cluster.price_per_gpu_hour=2").stdout
    assert "at 2 a GPU-hour" in " ".join(priced.partition("Cost, predicted: ")[2].split())
    output = json.loads(report(run_dir, "--json").stdout)
    assert output["name"] == "try"
    assert [row["error"] for row in output["seconds"]] == pytest.approx([-0.5] * len(output["seconds"]))
    assert output["training"]["steps"] == 3


def test_a_run_without_a_trace_has_only_simulated_steps(run_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(run_dir, bare)
    (bare / TRACE_FILE).unlink()
    (bare / "metrics.jsonl").unlink()
    output = json.loads(report(bare, "--json").stdout)
    assert output["idle"]["measured"] is None
    assert {row["measured_s"] for row in output["seconds"]} == {None}
    assert output["training"] == {"steps": 0}
    report(bare, "-o", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "Simulated step" in text
    assert "No step was logged." in text


def test_a_plan_by_itself_and_a_recipe_with_it(run_dir: Path) -> None:
    alone = json.loads(report(run_dir / PLAN_FILE, "--json").stdout)
    assert alone["name"] == "plan"
    assert alone["seconds"] == []
    assert alone["training"] is None
    assert alone["idle"]["predicted"] == pytest.approx(load_plan(run_dir / PLAN_FILE).predicted.bubbles)
    with_recipe = json.loads(report(run_dir / RECIPE_FILE, "--plan", run_dir / PLAN_FILE, "--json").stdout)
    assert with_recipe["plan_sha256"] == alone["plan_sha256"]
    assert with_recipe["name"] == "demo"
    assert with_recipe["seconds"][-1]["what"] == "step"
    replanned = json.loads(report(run_dir / RECIPE_FILE, "--set", "train.global_batch=2", "--json").stdout)
    assert replanned["plan_sha256"] != alone["plan_sha256"]


def test_wrong_arguments_give_one_message(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("no")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    untraced = tmp_path / "untraced"
    shutil.copytree(run_dir, untraced)
    (untraced / TRACE_FILE).write_text("{}")
    plan, recipe, nowhere = run_dir / PLAN_FILE, run_dir / RECIPE_FILE, tmp_path / "none" / "x.html"
    for arguments, message in (
        ([tmp_path / "gone.json"], r"gone.json: cannot read the plan \(No such file"),
        ([tmp_path / "gone.yaml"], r"gone.yaml"),
        ([tmp_path / "empty"], r"empty/recipe.yaml"),
        ([tmp_path / "text.json"], r"not a plan file, since it is not JSON"),
        ([tmp_path / "other.json"], r"the plan file is of format None, written by an unknown version"),
        ([untraced], r"trace.json: not the trace of a run"),
        ([recipe, "--plan", tmp_path / "gone.json"], r"gone.json: cannot read the plan"),
        ([recipe, "--plan", plan, "--set", "model.llm.layers=2"], r"does not match this run:\n  the recipe"),
        ([run_dir, "--plan", plan], r"--plan FILE goes with a recipe"),
        ([plan, "--set", "train.steps=2"], r"--set changes a recipe"),
        ([run_dir, "-o", nowhere], r"--out .*x.html: cannot write the page: No such file"),
        ([plan, "--png", tmp_path / "x.jpg"], r"found suffix `.jpg`, allowed: .png, .pdf, .svg"),
    ):
        done = CliRunner().invoke(app, ["report", *map(str, arguments)])
        assert isinstance(done.exception, MmtrainError), (arguments, done.output)
        assert done.exception.exit_code == 2
        assert done.exc_info is not None
        with pytest.raises(MmtrainError, match=message):
            raise done.exception
