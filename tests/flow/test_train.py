"""Whole runs of `train` on a small demo: resuming after a kill, and rejecting what does not fit."""

import gzip
import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mmtrain.checkpoint import find
from mmtrain.data import build_index
from mmtrain.errors import LaunchError, PlanError, UserError
from mmtrain.models.kernels.choice import kernel_choices
from mmtrain.planning import load_plan
from mmtrain.program import Backward, Forward
from mmtrain.recipe import load_recipe
from mmtrain.report import StepMetrics, read_metrics
from mmtrain.runtime.execution.attention_choice import AttentionChoice
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, PLAN_FILE, QUARANTINE_FILE, RECIPE_FILE
from mmtrain.runtime.training.choose_plan import ChosenPlan
from mmtrain.runtime.training.start_run import introduce_run
from tests.distributed import RanksFailed
from tests.faults import FailAt
from tests.flow.runs import NUM_STEPS, assert_same_end, assert_same_weights, request_for, run_all


def test_a_run_writes_its_metrics_plan_recipe_and_checkpoints(unbroken: Path) -> None:
    steps = read_metrics(unbroken)
    assert [s["step"] for s in steps] == list(range(1, NUM_STEPS + 1))
    assert steps[-1]["loss"] < steps[0]["loss"]
    optional = {"val_loss", "val_exact", "bound_sample", "resume_s", "peak_reserved_bytes", "sources", "extra"}
    optional |= {"padding", "drawing_loss", "val_drawing_loss", "dispatch", "experts"}  # of what this run has not
    assert set(StepMetrics.__dataclass_fields__) - optional <= set(steps[0])
    assert all(0 < s["mfu"] < 1 for s in steps)
    plan = load_plan(unbroken / PLAN_FILE)
    assert (plan.placement, plan.world_size) == ("disaggregated", 2)
    assert load_recipe(unbroken / RECIPE_FILE).recipe.train.steps == NUM_STEPS
    assert list((unbroken / "tensorboard").iterdir())
    assert [f.name for f in find(unbroken / CHECKPOINTS_FOLDER)] == ["step-00000006", "step-00000004"], "keeps two"


def test_a_run_that_is_killed_twice_and_resumed_ends_in_the_same_weights(
    data: Path, unbroken: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    request = request_for(data, run_dir)
    resumed = replace(request, resume=True)
    with pytest.raises(RanksFailed, match="rank 0: died without a word"):
        run_all(request, request, faults=FailAt(0, 3, "kill", action=Forward))
    with pytest.raises(RanksFailed, match="rank 1: died without a word"):
        run_all(resumed, resumed, faults=FailAt(1, 4, "kill", action=Backward))
    assert run_all(resumed, resumed) == ["", ""]
    assert_same_end(run_dir, unbroken)
    assert [s["step"] for s in read_metrics(run_dir)] == list(range(1, NUM_STEPS + 1))


def test_a_damaged_checkpoint_is_passed_over(data: Path, unbroken: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken, run_dir)
    file = next((run_dir / CHECKPOINTS_FOLDER / "step-00000006").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    request = request_for(data, run_dir, resume=True)
    assert run_all(request, request) == ["", ""]
    assert_same_weights(run_dir, unbroken)


def test_a_folder_that_holds_a_run_is_rejected(data: Path, unbroken: Path) -> None:
    request = request_for(data, unbroken)
    for message in run_all(request, request):
        assert message.startswith("UserError")
        assert "holds a run already: continue it with --resume" in message


def test_resuming_with_other_data_names_the_fields(data: Path, unbroken: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken, run_dir)
    request = request_for(data, run_dir, "train.seed=99", "data.image.std=[0.25,0.25,0.4]", resume=True)
    for message in run_all(request, request):
        assert "train.seed: 1 then, 99 now" in message
        assert "data.image.std.2: 0.25 then, 0.4 now" in message, "the weights have learned from other numbers"


def test_a_plan_for_another_recipe_or_number_of_ranks_is_rejected(data: Path, unbroken: Path, tmp_path: Path) -> None:
    other = request_for(data, tmp_path / "a", "model.llm.layers=3", plan_path=unbroken / PLAN_FILE)
    for message in run_all(other, other):
        assert message.startswith(PlanError.__name__)
        assert "the recipe" in message
    [message] = run_all(request_for(data, tmp_path / "b", plan_path=unbroken / PLAN_FILE))
    assert "the number of ranks: plan 2, now 1" in message


@pytest.mark.slow
def test_a_plan_file_that_does_not_fit_the_device_is_refused_before_anything_is_built(
    data: Path, unbroken: Path, tmp_path: Path
) -> None:
    plan = json.loads((unbroken / PLAN_FILE).read_text())
    plan["data"]["largest_microbatch"]["llm"]["tokens"] = 10**8
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    request = request_for(data, tmp_path / "run", plan_path=tmp_path / "plan.json")
    messages = run_all(request, request)
    refused = [message for message in messages if message.startswith("PlanError: the plan does not fit this device")]
    assert refused == messages
    assert "most of it activations, and cpu-core (see cluster.memory_gib) has 4 GiB" in messages[0]


@pytest.mark.parametrize("longer", [1.0, 1.5])
def test_a_plan_for_other_data_is_reported(data: Path, unbroken: Path, tmp_path: Path, longer: float) -> None:
    request = request_for(data, tmp_path)
    plan = load_plan(unbroken / PLAN_FILE)
    screen = StringIO()
    shorter = plan.data.model_copy(update={"tokens": {unit: n / longer for unit, n in plan.data.tokens.items()}})
    index = build_index(request.loaded.recipe)
    chosen = ChosenPlan(plan.model_copy(update={"data": shorter}))
    attention = AttentionChoice("attention: sdpa", ())
    kernels = kernel_choices("auto", torch.device("cpu"), torch.float32)
    introduce_run(Console(file=screen), request, chosen, index, 0, attention, kernels)
    assert "kernels: torch; loss: torch, for tokens with a target only" in screen.getvalue()
    assert ("the plan was made for other data" in screen.getvalue()) == (longer > 1)


def test_ranks_with_different_recipes_are_rejected(data: Path, tmp_path: Path) -> None:
    requests = [request_for(data, tmp_path / "run", f"train.optimizer.lr={lr}") for lr in (0.001, 0.002)]
    for message in run_all(*requests):
        assert message.startswith(LaunchError.__name__)
        assert "recipe.train.optimizer.lr: 0.001 on rank 0, 0.002 on rank 1" in message


def test_a_number_of_ranks_other_than_the_recipes_is_rejected(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path / "run", "cluster.ranks=3")
    for message in run_all(request, request):
        assert "cluster.ranks: 3 in the recipe, but 2 processes were started" in message


def test_bad_samples_are_named_and_do_not_stop_a_run(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    samples = json.loads((folder / "train.json").read_text())
    with_image = [s for s in samples if s.get("image")]
    with_image[0]["image"][0] = "images/gone.png"
    with_image[1]["conversations"][0]["value"] += "<image>"
    (folder / "train.json").write_text(json.dumps(samples))
    # A good header with broken pixels inside is only found while training.
    broken = folder / with_image[2]["image"][0]
    content = bytearray(broken.read_bytes())
    at = content.index(b"IDAT") + 8
    content[at : at + 8] = bytes(8)
    broken.write_bytes(content)
    changes = ["data.max_bad_rate=0.1", "train.steps=12", "train.global_batch=8", "train.checkpoint.every=0"]
    request = request_for(folder, tmp_path / "run", *changes)
    assert run_all(request, request) == ["", ""]
    quarantined = [json.loads(line) for line in (tmp_path / "run" / QUARANTINE_FILE).read_text().splitlines()]
    assert {with_image[0]["id"], with_image[1]["id"]} <= {entry["id"] for entry in quarantined}
    assert len(quarantined) == 3
    assert len(read_metrics(tmp_path / "run")) == 12
    request = request_for(folder, tmp_path / "strict")  # the demo's recipe allows none
    for message in run_all(request, request):
        assert message.startswith("TooManyBadSamples")
        assert with_image[0]["id"] in message


def test_resuming_without_a_run_is_rejected(data: Path, tmp_path: Path) -> None:
    [message] = run_all(request_for(data, tmp_path / "none", "parallel.placement=unified", resume=True))
    assert message.startswith(UserError.__name__)
    assert "holds no run" in message


@pytest.mark.slow  # 4 s
def test_a_run_that_broke_before_its_first_checkpoint_starts_again(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path / "run", "train.steps=2")
    with pytest.raises(RanksFailed):
        run_all(request, request, faults=FailAt(1, 1, "kill"))
    assert run_all(request, request) == ["", ""], "without --resume there is nothing to lose"
    shutil.rmtree(tmp_path / "run" / CHECKPOINTS_FOLDER)
    again = replace(request, resume=True)
    assert run_all(again, again) == ["", ""], "a job that is requeued with --resume needs no checkpoint"


@pytest.mark.slow
def test_a_run_whose_chunks_are_reduced_apart_is_resumed_bit_for_bit(data: Path, tmp_path: Path) -> None:
    """The LLM has two replicas of a pipeline of two ranks with two model chunks each."""
    meshes = [f"parallel.llm.{size}=2" for size in ("pp", "dp", "vpp")]
    settings = ("parallel.placement=disaggregated", "cluster.ranks=5", "parallel.vision.tp=1", *meshes)
    unbroken, killed = (request_for(data, tmp_path / name, *settings) for name in ("unbroken", "killed"))
    assert run_all(*[unbroken] * 5) == [""] * 5
    assert load_plan(unbroken.run_dir / PLAN_FILE).units["llm"].vpp == 2
    with pytest.raises(RanksFailed, match="died without a word"):
        run_all(*[killed] * 5, faults=FailAt(3, 3, "kill", action=Backward))
    resumed = replace(killed, resume=True)
    assert run_all(*[resumed] * 5) == [""] * 5
    assert_same_end(killed.run_dir, unbroken.run_dir)


def test_steps_are_profiled_on_every_rank(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, "train.profile={steps: [2, 3], memory: true}", "train.steps=4")
    assert run_all(request, request) == ["", ""]
    for rank in (0, 1):
        with gzip.open(tmp_path / "profile" / f"rank-{rank}.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        names = {event["name"] for event in events}
        assert {"aten::linear", "[memory]"} <= names or {"aten::mm", "[memory]"} <= names
