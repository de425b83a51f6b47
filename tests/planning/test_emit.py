"""Plans for other trainers: the emitted file states the plan's layout, in settings that the trainer accepts."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from _pytest.mark import ParameterSet

from mmtrain.api.plans import make_plan
from mmtrain.api.recipe_index import index_recipe
from mmtrain.api.shown_plan import ShownPlan
from mmtrain.errors import PlanError
from mmtrain.planning import Plan
from mmtrain.planning.emit.accepted_settings import accepted_settings
from mmtrain.planning.emit.emit_plan import TRAINERS, emit
from mmtrain.planning.emit.emitted_plan import EmittedPlan
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.recipe import Recipe, load_recipe
from tests.planning.read_emitted import (
    automodel_layout,
    bridge_layout,
    megatron_layout,
    mimo_layout,
    started_arguments,
    veomni_layout,
    write_recipes,
)

YAML_LAYOUTS = {"automodel": automodel_layout, "veomni": veomni_layout}
WHAT_IF = Path(__file__).parents[2] / "recipes/whatif"
MAX_REFUSALS = 3  # by then its options have led to a plan that is written
SHELLCHECK = shutil.which("shellcheck")


def slow(*values: object) -> ParameterSet:
    return pytest.param(*values, marks=pytest.mark.slow)


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


def read_back(emitted: EmittedPlan, folder: Path, recipe: Recipe) -> list[str]:
    """Return the settings that fix the layout of an emitted file, read as its trainer would."""
    vision = recipe.model.vision
    if emitted.trainer in YAML_LAYOUTS:
        return YAML_LAYOUTS[emitted.trainer](emitted.text)
    arguments = started_arguments(emitted.text, folder)
    if emitted.trainer == "mimo":
        return mimo_layout(arguments)
    encoder_layers = 0 if vision is None else vision.layers
    if emitted.trainer == "megatron-bridge":
        return bridge_layout(arguments, recipe.model.llm.layers, encoder_layers)
    return megatron_layout(arguments, encoder_layers)


@pytest.mark.parametrize(
    ("trainer", "name", "settings"),
    [
        ("megatron-lm", "text", ["parallel.llm.pp=2", "parallel.llm.vpp=2"]),
        slow("megatron-lm", "text", ["parallel.llm.tp=2", "parallel.llm.recompute=all"]),
        slow("megatron-lm", "moe", ["parallel.llm.pp=2", "parallel.llm.ep=2"]),
        slow("megatron-bridge", "text", ["parallel.llm.tp=2", "parallel.llm.pp=2"]),
        ("automodel", "text", ["parallel.shard=2", "parallel.zero=2"]),
        slow("automodel", "text", ["parallel.shard=1"]),
        slow("automodel", "text", ["parallel.llm.tp=2", "parallel.shard=2", "parallel.llm.recompute=all"]),
        slow("veomni", "text", ["parallel.shard=2"]),
    ],
)
def test_the_layout_read_back_takes_as_long(folder: Path, trainer: str, name: str, settings: list[str]) -> None:
    path = folder / f"{name}.yaml"
    of_trainer = ["parallel.placement=unified"]
    if trainer in YAML_LAYOUTS:
        of_trainer = ["parallel.placement=replicated", "parallel.dispatch=none", "parallel.schedule=1f1b"]
    plan, recipe = planned(path, [*of_trainer, *settings])
    again, _ = planned(path, read_back(emit(plan, recipe, trainer), folder, recipe))
    assert again.predicted.step_time_s == plan.predicted.step_time_s
    assert again.units == plan.units


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_plan_that_cannot_be_expressed_comes_with_options_of_one_that_can(folder: Path, trainer: str) -> None:
    path = folder / "vision.yaml"
    placement = "colocated" if trainer == "mimo" else "disaggregated"
    plan, recipe = planned(path, [f"parallel.placement={placement}", "parallel.llm.pp=2"])
    with pytest.raises(PlanError, match=f"cannot run this plan:\n  the placement is {placement}"):
        emit(plan, recipe, trainer)
    for _ in range(MAX_REFUSALS):
        try:
            emitted = emit(plan, recipe, trainer)
        except PlanError as error:
            plan, recipe = planned(path, settings_of(str(error).rpartition(" can run with ")[2]))
    again, _ = planned(path, read_back(emitted, folder, recipe))
    assert again.predicted.step_time_s == plan.predicted.step_time_s
    assert again.units == plan.units
    assert all(str(part.what) in " ".join(emitted.text.replace("\n#", "").split()) for part in emitted.inexpressible)


def test_the_layout_of_nvidias_tutorial_is_written_for_its_script(tmp_path: Path) -> None:
    """Compare the components with those of tutorials/megatron_mimo/qwen35-vl-non-colocated-sft.md."""
    mesh = "tp: 4, pp: 2, dp: 2, vpp: 1, sp: false, recompute: none, layers_per_chunk: [32, 32]"
    layout = [
        "parallel.placement=disaggregated",
        f"parallel.llm={{{mesh}}}",
        "parallel.vision={tp: 1, pp: 1, dp: 1, recompute: none}",
    ]
    plan, recipe = planned(WHAT_IF / "qwen3_5_vl_27b.yaml", layout)
    arguments = started_arguments(emit(plan, recipe, "mimo").text, tmp_path)
    assert arguments["--component"] == [
        "language=tp=4,pp=2,cp=1,dp=2,rank_offset=0",
        "images=tp=1,pp=1,cp=1,dp=1,rank_offset=16",
    ]
    sizes = [arguments[f"--{name}"] for name in ("global-batch-size", "micro-batch-size", "seq-length")]
    assert sizes == [["32"], ["2"], ["2048"]]
    unified = ["cluster.ranks=16", "parallel.placement=unified", f"parallel.llm={{{mesh}}}", "parallel.vision={pp: 1}"]
    plan, recipe = planned(WHAT_IF / "qwen3_5_vl_27b.yaml", unified)
    for trainer in ("megatron-lm", "megatron-bridge"):
        with pytest.raises(PlanError, match="the LLM has delta_net or attention_gate"):
            emit(plan, recipe, trainer)


def test_a_plan_in_python_is_written_as_by_the_command(folder: Path) -> None:
    lora = "train.lora={rank: 16, alpha: 32, scaling: rslora}"
    settings = ["parallel.placement=unified", "cluster.ranks=1", lora]
    plan, recipe = planned(folder / "text.yaml", settings)
    assert "peft.alpha=128" in emit(plan, recipe, "megatron-bridge").text, "32 / sqrt(16) = 128 / 16"
    shown = ShownPlan.of(plan)
    assert shown.emit("megatron-bridge", recipe).text == emit(plan, recipe, "megatron-bridge").text
    with pytest.raises(PlanError, match=r"train\.lora"):
        shown.emit("megatron-lm", folder / "text.yaml", set=settings)
    with pytest.raises(PlanError, match="recipe"):
        shown.emit("megatron-bridge", folder / "text.yaml")


def test_muon_and_rates_of_layers_are_named_as_missing(folder: Path) -> None:
    optimizer = ["train.optimizer.kind=muon", "train.optimizer.layer_lr_decay=0.75"]
    settings = ["parallel.placement=unified", "cluster.ranks=1", *optimizer]
    plan, recipe = planned(folder / "text.yaml", settings)
    missing = {part.what for part in emit(plan, recipe, "megatron-bridge").inexpressible}
    named = {"Muon trains the linears", "the learning rate decays from block to block by 0.75"}
    assert named <= missing
    plain = recipe.model_copy(update={"train": load_recipe(folder / "text.yaml", settings[:2]).recipe.train})
    assert not named & {part.what for part in emit(plan, plain, "megatron-bridge").inexpressible}


@pytest.mark.slow
def test_adapters_are_written_for_automodel(folder: Path) -> None:
    sharded = ["parallel.placement=replicated", "parallel.dispatch=none", "parallel.schedule=1f1b"]
    plan, recipe = planned(folder / "text.yaml", [*sharded, "train.lora.rank=8"])
    assert yaml.safe_load(emit(plan, recipe, "automodel").text)["peft"]["dim"] == 8


ROUTER = (
    "experts: 8, top_k: 4, ffn: 1024, scores: sigmoid, selection_bias: true, selection_bias_rate: 0.001, groups: 4, "
    "top_groups: 2, weight_scale: 2.5, shared_ffn: 512, shared_gate: true, balance_loss: 0.0001, z_loss: 0.002"
)
ON_ONE_RANK = ["parallel.placement=unified", "cluster.ranks=1"]


@pytest.mark.slow
def test_routers_are_written_for_megatron_lm(folder: Path) -> None:
    settings = [f"model.llm.moe={{{ROUTER}}}", "model.llm.rope_width=32"]
    plan, recipe = planned(folder / "moe.yaml", [*ON_ONE_RANK, *settings])
    emitted = emit(plan, recipe, "megatron-lm")
    arguments = started_arguments(emitted.text, folder)
    assert {name: values for name, values in arguments.items() if "router" in name or "shared-expert" in name} == {
        "--moe-router-topk": ["4"],
        "--moe-router-score-function": ["sigmoid"],
        "--moe-router-dtype": ["fp32"],
        "--moe-router-enable-expert-bias": [],
        "--moe-router-bias-update-rate": ["0.001"],
        "--moe-router-num-groups": ["4"],
        "--moe-router-group-topk": ["2"],
        "--moe-router-topk-scaling-factor": ["2.5"],
        "--moe-router-load-balancing-type": ["seq_aux_loss"],
        "--moe-shared-expert-intermediate-size": ["512"],
        "--moe-shared-expert-gate": [],
    }
    head_dim = recipe.model.llm.head_dim or recipe.model.llm.hidden // recipe.model.llm.heads
    assert (arguments["--moe-aux-loss-coeff"], arguments["--moe-z-loss-coeff"]) == (["0.0001"], ["0.002"])
    assert arguments["--rotary-percent"] == [str(32 / head_dim)]
    assert "loads of experts count in each sample" in [part.what for part in emitted.inexpressible]
    of_bridge = [part.what for part in emit(plan, recipe, "megatron-bridge").inexpressible]
    assert "routers train with balance_loss 0.0001, z_loss 0.002 and bias rate 0.001" in of_bridge


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("scores: sigmoid", "scores: softmax"), "it has biases for sigmoid scores"),
        (("top_groups: 2", "top_groups: 4"), "a group scores as much as its best 2 experts; there it is its best 1"),
    ],
)
def test_a_router_that_megatron_lm_has_not_is_refused(folder: Path, change: tuple[str, str], problem: str) -> None:
    plan, recipe = planned(folder / "moe.yaml", [*ON_ONE_RANK, f"model.llm.moe={{{ROUTER.replace(*change)}}}"])
    with pytest.raises(PlanError, match=problem):
        emit(plan, recipe, "megatron-lm")


@pytest.mark.slow
def test_queries_that_grow_are_refused_by_megatron_lm(folder: Path) -> None:
    llama3 = "{kind: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_positions: 8192}"
    settings = [f"model.llm.rope_scaling={llama3}", "model.llm.query_growth=0.1"]
    plan, recipe = planned(folder / "text.yaml", [*ON_ONE_RANK, *settings])
    with pytest.raises(PlanError, match=r"queries grow with their positions \(query_growth\)"):
        emit(plan, recipe, "megatron-lm")


@pytest.mark.slow
def test_an_encoder_that_megatron_lm_knows_is_named(folder: Path) -> None:
    plan, recipe = planned(folder / "vision.yaml", ["parallel.placement=unified", "cluster.ranks=1"])
    arguments = started_arguments(emit(plan, recipe, "megatron-lm").text, folder)
    assert arguments["--vision-model-type"] == ["clip"]
    assert arguments["--img-h"] == ["336"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text", "moe"])
@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
def test_shellcheck_has_no_remark(folder: Path, name: str) -> None:
    plan, recipe = planned(folder / f"{name}.yaml", ["parallel.placement=unified"])
    path = folder / "emitted.sh"
    path.write_text(emit(plan, recipe, "megatron-lm").text, encoding="utf-8")
    assert subprocess.run([str(SHELLCHECK), str(path)], capture_output=True, text=True).stdout == ""


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
        ("--num-layers", None, "is None; allowed: int"),
    ],
)
def test_what_the_trainer_would_reject_is_found(name: str, value: object, problem: str | None) -> None:
    found = accepted_settings("megatron-lm").problem(name, value)
    assert found is None if problem is None else problem in (found or "")
