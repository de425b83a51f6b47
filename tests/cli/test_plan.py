"""`mmtrain plan` reads a recipe and data files and gives a table and a plan file."""

import json
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from mmtrain.api.plans import make_plan
from mmtrain.api.simulated_steps import index_and_plan
from mmtrain.data import build_index
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.families import FAMILIES
from mmtrain.planning import load_plan
from mmtrain.recipe import load_recipe
from mmtrain.runtime.run_folder import PLAN_FILE
from tests.cli.conftest import RunMmtrain

RECIPE = Path(__file__).parents[2] / "recipes/demo.yaml"
WHATIF_RECIPE = RECIPE.parent / "whatif/optimus_14b.yaml"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "data"
    generate_demo(folder, seed=1, train=60, heldout=4)
    return folder


@pytest.fixture
def plan(run_mmtrain: RunMmtrain, data: Path) -> RunMmtrain:
    """Return a function that plans the demo recipe on small data."""
    settings = [f"data.sources.0.path={data}/train.json", f"data.tokenizer={data}/tokenizer.json"]
    overrides = [part for setting in settings for part in ("--set", setting)]
    return partial(run_mmtrain, "plan", RECIPE, *overrides)


@pytest.fixture
def whatif(run_mmtrain: RunMmtrain) -> RunMmtrain:
    """Return a function that plans a recipe of stated lengths."""
    return partial(run_mmtrain, "plan", WHATIF_RECIPE)


def test_plan_prints_a_table_and_saves_a_plan_file(
    run_mmtrain: RunMmtrain, plan: RunMmtrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "plan.json"
    remote = ("--set", "train.checkpoint.remote=s3://bucket/run")
    done = plan("--set", "parallel.placement=auto", *remote, "--top", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "\nCheckpoints are copied to s3://bucket/run; `train` tries it before it reads data.\n" in done.stdout
    saved = load_plan(out)
    assert saved.world_size == 2
    assert len(saved.alternatives) <= 2
    assert done.stdout.startswith(f"Plan: {saved.placement} on 2 x cpu-core")
    assert "modelled" in done.stdout
    *_, train, report = done.stdout.splitlines()
    assert train.startswith(f"  mmtrain train {RECIPE} --set ")
    assert train.endswith(f" --set parallel.placement=auto --set train.checkpoint.remote=s3://bucket/run --plan {out}")
    monkeypatch.chdir(tmp_path)
    shown = run_mmtrain(*shlex.split(report)[1:])
    assert shown.stdout == "plan.html written\n", shown.stderr


def test_the_commands_for_a_plan_of_another_cluster_reset_only_what_the_recipe_states(
    run_mmtrain: RunMmtrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--cluster` resets a dozen settings, of which this recipe states one; the plan fits the command's recipe."""
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "linked.yaml"
    recipe.write_text(f"extends: {WHATIF_RECIPE}\ncluster: {{intra_node_gb_per_s: 100}}\n", encoding="utf-8")
    one = ("--set", "parallel.llm.tp=8", "--set", "parallel.llm.pp=1", "--top", 1, "--placement", "unified")
    done = run_mmtrain("plan", recipe, "--cluster", "h100-80g:nodes=1", *one, "--out", "plan.json")
    assert done.returncode == 0, done.stderr
    report = done.stdout.splitlines()[-1]
    assert [word for word in report.split() if word.endswith("=null")] == ["cluster.intra_node_gb_per_s=null"]
    shown = run_mmtrain(*shlex.split(report)[1:])
    assert shown.stdout == "plan.html written\n", shown.stderr


@pytest.mark.slow  # starts two ranks
def test_library_command_and_training_make_the_same_plan(run_mmtrain: RunMmtrain, data: Path, tmp_path: Path) -> None:
    settings = [
        f"data.sources.0.path={data}/train.json",
        f"data.validation.0.path={data}/heldout.json",
        f"data.tokenizer={data}/tokenizer.json",
        "parallel.placement=auto",
        "cluster.ranks=2",
        "train.steps=1",
        "train.validate_every=0",
        "model.vision.layers=1",
        "model.llm.layers=2",
        "data.seq_len=192",
    ]
    overrides = [part for setting in settings for part in ("--set", setting)]
    recipe = load_recipe(RECIPE, settings).recipe
    of_library = make_plan(recipe, build_index(recipe).lengths).plan
    saved, run_dir = tmp_path / "plan.json", tmp_path / "run"
    for command in (["plan", RECIPE, "--out", saved], ["train", RECIPE, "--run-dir", run_dir]):
        done = run_mmtrain(*command, *overrides)
        assert done.returncode == 0, done.stderr
    assert load_plan(saved) == of_library
    assert load_plan(run_dir / PLAN_FILE) == of_library
    assert index_and_plan(recipe, None)[1] == of_library  # what `simulate`, `report` and `verify` call


@pytest.mark.parametrize("command", ["plan", "simulate", "train"])
def test_a_wrong_cost_table_is_named_before_the_data_is_read(
    run_mmtrain: RunMmtrain, tmp_path: Path, command: str
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"version": 1, "hardware": "cpu-core"}')
    changes = ("--set", f"cluster.costs={costs}", "--set", f"data.sources.0.path={tmp_path}/nowhere.json")
    done = run_mmtrain(command, RECIPE, *changes)
    assert done.returncode == 2
    assert "is no cost table of version 1: device: Field required; 3 more errors in this file" in done.stderr


def test_a_baseline_gives_a_plan_file(plan: RunMmtrain, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    done = plan("--set", "parallel.placement=unified", "--baseline", "megatron", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "what is planned without a baseline" in " ".join(done.stdout.split())
    saved = load_plan(out)
    assert saved.placement == "unified"
    assert len(saved.units["vision"].stages) == 1


def test_json_output_is_the_plan_file(plan: RunMmtrain, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    done = plan("--json", "--out", str(out))
    assert done.stdout == out.read_text(encoding="utf-8")
    assert json.loads(done.stdout)["placement"] == "disaggregated"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--set", "cluster.hardware=h100x"], "did you mean `h100-80g`"),
        (["--set", "cluster.memory_gib=1e-4"], "no plan fits 2 ranks of cpu-core"),
        (["--out", "/no/such/folder/plan.json"], "--out /no/such/folder/plan.json: cannot write the plan"),
        (["--set", "data.tokenizer=/no/such.json"], "/no/such.json"),
        (
            ["--baseline", "folklore"],
            "--baseline folklore: no such baseline; allowed: megatron, megatron-extra, balanced",
        ),
        (["--baseline", "flops", "--measure"], "so --measure has nothing to choose from; leave one of them out"),
        (["--baseline", "megatron"], "--baseline megatron: no plan by this rule is possible and fits"),
    ],
)
def test_a_recipe_that_cannot_be_planned_gives_one_message(plan: RunMmtrain, args: list[str], message: str) -> None:
    done = plan(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("mmtrain: ")
    assert "Traceback" not in done.stderr


def test_cluster_plans_for_other_hardware(plan: RunMmtrain) -> None:
    done = plan("--cluster", "h100:nodes=2", "--placement", "unified", "--json", "--top", "1")
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    assert (planned["hardware"], planned["world_size"], planned["placement"]) == ("h100-80g", 16, "unified")
    assert len(planned["alternatives"]) == 1


def test_a_sweep_names_the_largest_worthwhile_cluster(plan: RunMmtrain) -> None:
    shown = plan("--gpus", "4,2")
    as_json = plan("--gpus", "2,4", "--json")
    assert shown.stdout.startswith("Scaling with the same global batch")
    assert "All of these sizes are worthwhile" in shown.stdout
    rows = json.loads(as_json.stdout)
    assert [row["gpus"] for row in rows] == [2, 4]
    assert rows[0]["efficiency"] == 1.0 > rows[1]["efficiency"]
    assert rows[1]["plan"]["world_size"] == 4


def test_a_sweep_chooses_within_limits(plan: RunMmtrain) -> None:
    limits = ("--within-days", "100", "--within-money", "1000", "--set", "cluster.price_per_gpu_hour=0.1")
    shown = plan("--gpus", "2", *limits)
    assert shown.returncode == 0, shown.stderr
    assert "Chosen: 2 GPUs take " in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 120
    shown = plan("--gpus", "2", "--within-days", "0", "--json")
    assert shown.returncode == 2
    assert json.loads(shown.stdout)[0]["chosen"] is False
    assert "none of 2 GPUs runs " in shown.stderr


def test_a_sweep_in_which_nothing_fits_is_an_error(whatif: RunMmtrain) -> None:
    done = whatif("--gpus", "1,2", "--set", "cluster.memory_gib=1", "--placement", "unified")
    assert done.returncode == 2
    assert "--gpus: no plan exists for any of these numbers; for 2: no plan fits 2 ranks" in done.stderr


def test_two_plans_are_compared(run_mmtrain: RunMmtrain, plan: RunMmtrain, data: Path, tmp_path: Path) -> None:
    """Compare a file with the folder of a run that has it, in a process of its own; then with a recipe."""
    saved = tmp_path / PLAN_FILE
    assert plan("--out", saved).returncode == 0
    command = [sys.executable, "-m", "mmtrain", "plan", "--diff", str(saved), str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Both plans are the same")
    done = plan("--diff", saved, "--set", "train.global_batch=8", "--json")
    assert done.returncode == 0, done.stderr
    compared = json.loads(done.stdout)
    assert (compared["first"], compared["second"]) == (str(saved), str(RECIPE))
    settings = [entry for entry in compared["differences"] if entry["part"] == "setting"]
    assert [(entry["what"], entry["first"], entry["second"]) for entry in settings] == [("train.global_batch", 4, 8)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--diff", "a.json", "--gpus", "1,2", "--out", "x"], "--diff compares two plans: leave out --gpus, --out;"),
        (["--diff", "a.json"], "a.json: cannot read the plan"),
        (["--diff", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_plans_that_cannot_be_compared_give_one_message(plan: RunMmtrain, args: list[str], message: str) -> None:
    done = plan(*args)
    assert done.returncode == 2
    assert message in done.stderr


def test_settings_change_no_plan_file(run_mmtrain: RunMmtrain) -> None:
    done = run_mmtrain("plan", "--diff", "a.json", "b.json", "--set", "train.global_batch=8")
    assert done.returncode == 2
    assert "both plans are made already" in done.stderr


def test_the_table_fits_the_terminal(plan: RunMmtrain) -> None:
    done = plan(columns=72)
    assert 60 < max(map(len, done.stdout.splitlines())) <= 72


def test_explain_shows_every_alternative(plan: RunMmtrain) -> None:
    arguments = ["--json", "--set", "parallel.placement=auto", "--top", "1"]
    top = json.loads(plan(*arguments).stdout)["alternatives"]
    explained = json.loads(plan(*arguments, "--explain").stdout)
    assert len(top) == 1 < len(explained["alternatives"])


@pytest.mark.slow
def test_measure_runs_the_best_plans_and_takes_the_fastest(plan: RunMmtrain) -> None:
    done = plan("--measure", "--cuts", "2", "--set", "parallel.placement=auto", "--set", "cluster.ranks=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" per step, predicted ") > 2  # rules of thumb are run beside the plans
    shown = " ".join(done.stdout.split())
    assert "as measured" in shown
    assert "baseline" in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cluster", "h100:node=2"], "--cluster h100:node=2: 'node' is not known; allowed: HARDWARE:KEY=VALUE"),
        (["--cluster", "h100:nodes=two"], "--cluster h100:nodes=two: nodes is 'two'; allowed: a whole number"),
        (["--cluster", "h100:nodes=2,ranks=8"], "nodes and ranks both set the size; give one of them"),
        (["--cluster", "h100:ports_per_node=x"], "ports_per_node is 'x'; allowed: a whole number"),
        (["--cluster", "h100:inter_node_gb_per_s=fast"], "inter_node_gb_per_s is 'fast'; allowed: a number"),
        (["--cluster", "h100:inter_node_gb_per_s=0"], "cluster.inter_node_gb_per_s: found 0.0"),
        (["--cluster", "h100:time_spread.ranks=2"], "cluster.time_spread.ranks: found 2.0"),
        (["--cluster", "h100:rail_optimized=1"], "rail_optimized is '1'; allowed: true or false"),
        (["--cluster", "v100:nodes=2"], "`v100` is not a known preset"),
        (["--cluster", "h100:nodes=0"], "cluster.ranks: found 0, allowed: a whole number of at least 1"),
        (["--gpus", "8,0"], "--gpus 8,0: allowed: numbers of at least 1"),
        (["--gpus", "8", "--out", "plan.json"], "--gpus compares clusters: leave out --out, --emit, --measure"),
        (["--within-days", "7"], "--within-days chooses among numbers of GPUs: name them too, like --gpus 32,64,128"),
        (["--gpus", "8", "--within-money", "7"], "--within-money needs the price of a GPU-hour"),
        (["--placement", "unfied"], "did you mean unified?"),
        (["--measure"], "plan --measure cannot run this recipe"),
    ],
)
def test_wrong_options_give_one_message(whatif: RunMmtrain, args: list[str], message: str) -> None:
    done = whatif(*args)
    assert done.returncode == 2
    assert message in done.stderr


# Recipes that start from a pretrained model, which the user has, and its family.
STARTED_FROM = {
    "text_sft.yaml": "qwen2",
    "text_lora.yaml": "qwen2",
    "llava_align.yaml": "llava",
    "llava_sft.yaml": "llava",
    "qwen2_audio_sft.yaml": "qwen2_audio",
    "qwen2_5_omni_sft.yaml": "qwen2_5_omni",
    "qwen2_5_vl_sft.yaml": "qwen2_5_vl",
    "qwen3_omni_sft.yaml": "qwen3_omni_moe",
    "qwen3_vl_moe_sft.yaml": "qwen3_vl_moe",
    "qwen3_5_sft.yaml": "qwen3_5",
    "gemma4_sft.yaml": "gemma4",
}


@pytest.mark.parametrize("name", [str(path.relative_to(RECIPE.parent)) for path in RECIPE.parent.rglob("*.yaml")])
def test_every_shipped_recipe_loads(name: str, tmp_path: Path) -> None:
    from mmtrain import recipe

    changes = []
    if name in STARTED_FROM:
        for file, content in FAMILIES[STARTED_FROM[name]].tiny.items():
            (tmp_path / file).write_text(json.dumps(content))
        (tmp_path / "tokenizer.json").touch()
        changes = [f"model.hf={tmp_path}"]
    loaded = recipe.load_recipe(RECIPE.parent / name, changes).recipe
    if loaded.data.sources[0].states_lengths:  # other data is made by the user
        assert len(build_index(loaded).lengths)


def test_train_refuses_a_recipe_of_stated_lengths(run_mmtrain: RunMmtrain) -> None:
    done = run_mmtrain("train", WHATIF_RECIPE)
    assert done.returncode == 2
    assert "train cannot run this recipe" in done.stderr
    assert "data.sources.0: " in done.stderr
