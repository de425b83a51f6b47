"""`mmtrain report` of a plan, a recipe and a run, as text, page and figure; and the arguments it rejects."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mmtrain.cli.app import app
from mmtrain.errors import MmtrainError
from mmtrain.planning import load_plan
from mmtrain.recipe import dump_recipe, load_recipe
from mmtrain.runtime.run_folder import PLAN_FILE, RECIPE_FILE, TRACE_FILE
from tests.report.conftest import metrics

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


@pytest.fixture
def other_run(run_dir: Path, tmp_path: Path) -> Path:
    """A run with another learning rate, which logged two steps more and lost less."""
    folder = tmp_path / "lower_lr"
    shutil.copytree(run_dir, folder)
    recipe = load_recipe(folder / RECIPE_FILE, ["train.optimizer.lr=0.0001"]).recipe
    (folder / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
    logged = [metrics(step, loss=3 - step / 10, step_time_s=0.25).to_json() for step in range(1, 6)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in logged), encoding="utf-8")
    return folder


def test_two_runs_are_compared(run_dir: Path, other_run: Path, tmp_path: Path) -> None:
    text = report(run_dir, other_run).stdout
    assert re.search(r"train\.optimizer\.lr +│ +0\.\d+ │ +0\.0001", text)
    assert re.search(r"steps +│ +3 │ +5 │ +1\.67x", text)
    assert re.search(r"median step +│ +500 ms │ +250 ms │ +0\.50x", text)
    assert re.search(r"\n│ 3 +│ +3\.9\d+ │ +2\.7000 │", text)
    assert "│ 4 " not in text, "a step that one of them has not reached"
    assert "Both runs have the same plan." in text
    output = json.loads(report(run_dir, other_run, "--json").stdout)
    assert (output["first"], output["second"], output["same_plan"]) == ("try", "lower_lr", True)
    assert [row["setting"] for row in output["settings"]] == ["train.optimizer.lr"]
    assert [row["step"] for row in output["losses"]] == [1, 2, 3]
    out = tmp_path / "two.html"
    assert report(run_dir, other_run, "-o", out).output == f"{out} written\n"
    page = out.read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert page.count("<h1>") == 1


def test_a_run_compared_with_itself_has_no_difference(run_dir: Path, tmp_path: Path) -> None:
    same = tmp_path / "elsewhere" / run_dir.name
    shutil.copytree(run_dir, same)
    text = report(run_dir, same).stdout
    assert text.startswith("Both runs have the same settings.")
    output = json.loads(report(run_dir, same, "--json").stdout)
    assert (output["first"], output["second"]) == (str(run_dir), str(same)), "folders of one name"
    assert all(row["first"] == row["second"] for row in output["figures"])


def test_runs_with_other_plans_say_how_these_differ(run_dir: Path, other_run: Path) -> None:
    plan = load_plan(other_run / PLAN_FILE)
    faster = plan.predicted.model_copy(update={"step_time_s": plan.predicted.step_time_s / 2})
    plan.model_copy(update={"predicted": faster}).save(other_run / PLAN_FILE)
    text = " ".join(report(run_dir, other_run).stdout.split())
    assert "A step of plan of lower_lr is predicted to take 0.50x the time" in text


def test_the_stages_of_a_run_follow_one_another(run_dir: Path, tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    for name in ("1-align", "2-sft"):
        shutil.copytree(run_dir, staged / name)
    text = report(staged).stdout
    assert text.index("staged: stage 1-align") < text.index("staged: stage 2-sft")
    assert text.count("Loss          ") == 2
    output = json.loads(report(staged, "--json").stdout)
    assert [stage["name"] for stage in output["stages"]] == ["staged: stage 1-align", "staged: stage 2-sft"]
    out = tmp_path / "staged.html"
    report(staged, "-o", out)
    assert out.read_text(encoding="utf-8").count("<h1>") == 2
    with pytest.raises(MmtrainError, match="has 2 stages; name the folder of one of them"):
        CliRunner().invoke(app, ["report", str(staged), "--png", str(tmp_path / "a.png")], catch_exceptions=False)
    with pytest.raises(MmtrainError, match="it has stages; compare one of them"):
        CliRunner().invoke(app, ["report", str(run_dir), str(staged)], catch_exceptions=False)
