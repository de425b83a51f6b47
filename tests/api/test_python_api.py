"""`import mmtrain as mm`: the same plans and runs as the command line, in a process that stays light."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import mmtrain as mm
from mmtrain.api.shown_plan import ShownPlan
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.errors import RecipeError, UserError
from mmtrain.planning import Plan, load_plan
from mmtrain.recipe import dump_recipe
from mmtrain.runtime.run_folder import PLAN_FILE, RECIPE_FILE
from tests.flow.runs import SMALL
from tests.report.conftest import metrics

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "demo.yaml"
FUNCTIONS = [
    *("copy_recipe", "evaluate", "export", "load_plan", "load_recipe"),
    *("open_run", "plan", "show_data", "simulate", "train", "verify"),
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = tmp_path_factory.mktemp("demo") / "data"
    generate_demo(data, seed=3, train=40, heldout=8)
    return [
        f"data.sources.0.path={data}/train.json",
        f"data.validation.0.path={data}/heldout.json",
        f"data.tokenizer={data}/tokenizer.json",
        *SMALL,
    ]


@pytest.fixture(scope="module")
def plan(settings: list[str]) -> mm.Plan:
    return mm.plan(RECIPE, set=settings)


@pytest.fixture(scope="module")
def run(settings: list[str], plan: mm.Plan, tmp_path_factory: pytest.TempPathFactory) -> mm.Run:
    return mm.train(RECIPE, set=settings, plan=plan, run_dir=tmp_path_factory.mktemp("runs") / "small")


def python(code: str, *arguments: object) -> "subprocess.Popen[str]":
    """Start Python in a process group of its own, as a notebook's kernel runs."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, process_group=0,
    )  # fmt: skip


def succeed(code: str, *arguments: object) -> str:
    process = python(code, *arguments)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def command_line(command: str, recipe: Path, settings: Sequence[str], *options: object) -> str:
    """Run a command in a process of its own; return what it prints."""
    overrides = [part for setting in settings for part in ("--set", setting)]
    words = [sys.executable, "-m", "mmtrain", command, str(recipe), *overrides, *map(str, options)]
    env = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT, env=env).stdout


def test_the_import_is_light_and_lists_its_functions() -> None:
    printed = succeed(
        "import sys, mmtrain as mm\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'typer', 'yaml', 'pandas'} & set(sys.modules)\n"
        "print(sorted(heavy), sorted(set(dir(mm)) & set(mm.__all__)))"
    )
    names = sorted([*FUNCTIONS, "Plan", "Recipe", "Run", "__version__"])
    assert printed == f"[] {names}\n"


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        mm.plann  # noqa: B018  # type: ignore[attr-defined]


@pytest.mark.slow
def test_functions_stay_functions_whatever_module_was_imported() -> None:
    """A submodule called `plan` would take the function's place in the package when it is imported."""
    succeed(
        "import importlib, pkgutil, mmtrain as mm\n"
        "for module in pkgutil.walk_packages(mm.__path__, 'mmtrain.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)\n"
        f"for name in {FUNCTIONS!r}:\n"
        "    assert callable(getattr(mm, name)), name\n"
        "    assert getattr(mm, name).__name__ == name\n"
    )


def test_plan_is_the_plan_of_the_command(settings: list[str], plan: mm.Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    command_line("plan", RECIPE, settings, "--out", file)
    assert load_plan(file) == plan
    plan.save(tmp_path / "same.json")
    assert (tmp_path / "same.json").read_bytes() == file.read_bytes()
    assert mm.load_plan(file) == plan
    assert mm.load_plan(file).sha256 == plan.sha256


def test_a_loaded_recipe_plans_as_its_file_does(settings: list[str], plan: mm.Plan) -> None:
    recipe = mm.load_recipe(RECIPE, set=settings)
    assert recipe.train.steps == 6
    assert "\n  steps: 6\n" in recipe._repr_html_()
    assert mm.plan(recipe) == plan
    assert mm.plan(recipe, set=["data.seq_len=256"]) == mm.plan(RECIPE, set=[*settings, "data.seq_len=256"])
    assert mm.plan(recipe, alternatives=1).alternatives == plan.alternatives[:1]


def test_a_shipped_recipe_is_copied_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = mm.copy_recipe("demo")
    assert path == Path("recipes/demo.yaml")
    assert mm.load_recipe(path).data.sources[0].path == tmp_path / "demo-data/train.json"


def test_wrong_settings_are_errors_of_the_recipe() -> None:
    with pytest.raises(RecipeError, match=r"train\.stepz"):
        mm.plan(RECIPE, set=["train.stepz=3"])


def test_a_plan_shows_itself(plan: mm.Plan) -> None:
    assert repr(plan).startswith(f"Plan({plan.placement} on 2 x cpu-core, ")
    assert str(plan).startswith(f"Plan: {plan.placement} on 2 x cpu-core ")
    html = plan._repr_html_()
    assert "<svg" in html
    assert f"<summary>{len(plan.alternatives)} alternatives</summary>" in html
    style = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert len(style) == 1
    assert re.fullmatch(r"\.mmtrain-view\{.*\}", style[0], re.DOTALL), "its rules hold in its output alone"
    assert style[0].count("{") == style[0].count("}")
    assert "<script" not in html
    assert "http" not in html


def test_a_plan_equals_a_plan_of_the_same_content(plan: mm.Plan) -> None:
    read_back = Plan.model_validate_json(plan.model_dump_json())
    assert read_back == plan
    assert plan == read_back
    assert plan != read_back.model_copy(update={"world_size": 3})
    assert plan != "a plan"
    assert isinstance(mm.Plan.of(read_back), ShownPlan)


def test_a_plan_as_data_frames(plan: mm.Plan) -> None:
    stages = plan.to_frame()
    assert [*stages["unit"].unique()] == [*plan.units]
    for name, unit in plan.units.items():
        of_unit = stages[stages["unit"] == name]
        assert of_unit["num_layers"].sum() == unit.stages[-1].layers[1]
        assert sorted(rank for ranks in of_unit["ranks"] for rank in ranks) == sorted(unit.ranks)
    assert [*plan.to_frame("alternatives")["reason"]] == [other.reason for other in plan.alternatives]
    memory = plan.to_frame("memory").set_index("ranks")
    assert memory["peak_gib"].to_dict() == plan.predicted.peak_memory_gib
    with pytest.raises(UserError, match="allowed: stages, alternatives, memory"):
        plan.to_frame("ranks")  # type: ignore[arg-type]


def test_a_data_frame_without_pandas_names_the_extra(plan: mm.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"Plan.to_frame needs .* pip install 'mmtrain\[notebook\]'"):
        plan.to_frame()


def test_a_simulated_step_is_the_one_of_the_command(settings: list[str], plan: mm.Plan) -> None:
    steps = mm.simulate(RECIPE, set=settings, plan=plan)
    assert f"{steps.step_time_s:.4g} s per step" in repr(steps)
    assert str(steps).strip() == command_line("simulate", RECIPE, settings).strip()
    assert "<svg" in steps._repr_html_()
    slowed = mm.simulate(RECIPE, set=settings, plan=plan, fault="slow:1:2")
    assert slowed.fault is not None
    assert slowed.fault.step_time_s is not None
    assert slowed.fault.step_time_s > slowed.fault.unbroken_s
    assert slowed.fault.consequences in slowed._repr_html_()


def test_the_stages_of_a_run_are_runs(settings: list[str], plan: mm.Plan, tmp_path: Path) -> None:
    recipe = mm.load_recipe(RECIPE, set=settings)
    for number, (name, num_steps) in enumerate((("align", 3), ("sft", 2)), start=1):
        folder = tmp_path / "staged" / f"{number}-{name}"
        folder.mkdir(parents=True)
        (folder / RECIPE_FILE).write_text(dump_recipe(recipe.model_copy(update={"name": name})), encoding="utf-8")
        plan.save(folder / PLAN_FILE)
        lines = [json.dumps(metrics(step).to_json()) + "\n" for step in range(1, num_steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    run = mm.open_run(tmp_path / "staged")
    assert [stage.folder.name for stage in run.stages] == ["1-align", "2-sft"]
    assert run.recipe.name == "sft"
    assert run.plan == plan
    assert len(run.metrics) == 2, "of the last stage"
    assert [len(stage.to_frame()) for stage in run.stages] == [3, 2]
    assert run._repr_html_().count('mmtrain-view">') == 2
    assert "after step 2" in repr(run)
    unfinished = tmp_path / "staged" / "2-sft" / RECIPE_FILE
    unfinished.unlink()
    assert [stage.folder.name for stage in mm.open_run(tmp_path / "staged").stages] == ["1-align"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the folder of a run"):
        mm.open_run(tmp_path)


def test_what_cannot_train_is_refused_before_a_process_starts(settings: list[str]) -> None:
    with pytest.raises(UserError, match="train"):
        mm.train(ROOT / "recipes/whatif/optimus_14b.yaml")
    with pytest.raises(UserError, match=r"recipes/none\.yaml"):
        mm.train(ROOT / "recipes/none.yaml")


@pytest.mark.slow
def test_a_type_checker_knows_the_functions(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import mmtrain as mm\n"
        "plan = mm.plan('x.yaml', set=['a=1'])\n"
        "seconds: float = plan.predicted.step_time_s\n"
        "run: mm.Run = mm.train('x.yaml', plan=plan, resume='last-good')\n"
        "mm.train('x.yaml', resum=True)\n"
        "mm.plann\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--config-file", "pyproject.toml", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = [
        re.sub(r"^.*?:(\d+): error: .*\[(.*)\]$", r"\1 \2", line)
        for line in done.stdout.splitlines()
        if "error" in line
    ]
    assert found == ["5 call-arg", "6 attr-defined"], done.stdout


@pytest.mark.slow
def test_training_leaves_nothing_behind_and_its_run_shows_itself(run: mm.Run, plan: mm.Plan) -> None:
    assert run.status == "done"
    assert run.plan == plan
    assert run.recipe.train.steps == 6
    assert [step["step"] for step in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert [*run.to_frame()["loss"]] == [step["loss"] for step in run.metrics]
    assert repr(run).startswith(f"Run('{run.folder}', done after step 6, loss ")
    assert run._repr_html_().count("<svg") >= 2
    assert mm.open_run(run.folder) == run


@pytest.mark.slow
def test_the_other_functions_take_the_run(run: mm.Run, settings: list[str], plan: mm.Plan, tmp_path: Path) -> None:
    result = mm.evaluate(run, limit=3)
    assert result.step == 6
    assert result.total.questions == 3
    assert "<table" in result._repr_html_()
    assert mm.evaluate(run.folder, limit=3, ranks=2).total.questions == 3
    folder = mm.export(run, tmp_path / "exported", dtype="bf16")
    assert (folder / "config.json").is_file()
    verified = mm.verify(RECIPE, set=settings, plan=plan, steps=1)
    assert verified.is_equal
    assert "computes what one process computes" in verified._repr_html_()


@pytest.mark.slow
def test_no_memory_stays_with_the_caller(settings: list[str], tmp_path: Path) -> None:
    printed = succeed(
        "import sys, psutil, mmtrain as mm\n"
        "recipe, folder, *settings = sys.argv[1:]\n"
        "run = mm.train(recipe, set=settings, run_dir=folder)\n"
        "print(run.status, 'torch' in sys.modules, len(psutil.Process().children(recursive=True)))",
        RECIPE, tmp_path / "run", *settings,
    )  # fmt: skip
    assert printed.splitlines()[-1] == "done False 0"


@pytest.mark.slow
def test_an_interrupt_saves_and_the_run_goes_on(settings: list[str], tmp_path: Path) -> None:
    """The stop button of a notebook interrupts the whole process group of its kernel."""
    code = (
        "import sys, mmtrain as mm\n"
        "from mmtrain.errors import StoppedAndSaved\n"
        "recipe, folder, resume, *settings = sys.argv[1:]\n"
        "try:\n"
        "    print('ended:', mm.train(recipe, set=settings, run_dir=folder, resume=resume == 'resume').status)\n"
        "except StoppedAndSaved as stopped:\n"
        "    print('stopped:', stopped)"
    )
    folder = tmp_path / "run"
    many_steps = [*settings, "train.steps=100000", "train.checkpoint.every=0"]
    with python(code, RECIPE, folder, "new", *many_steps) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step"):
                break
        os.killpg(process.pid, signal.SIGINT)
        output = process.stdout.read()
    assert re.search(rf"^stopped: .*saved {folder}/checkpoints/step-", output, re.MULTILINE), output
    assert mm.open_run(folder).status == "stopped"
    num_steps = len(mm.open_run(folder).metrics)
    short = [*settings, f"train.steps={num_steps + 2}", "train.checkpoint.every=0"]
    output, _ = python(code, RECIPE, folder, "resume", *short).communicate()
    assert "ended: done" in output, output
    assert [step["step"] for step in mm.open_run(folder).metrics] == [*range(1, num_steps + 3)]
