"""`mmtrain verify` trains a plan beside one process, and names what a broken runtime computes wrongly."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mmtrain.families.registry import FAMILIES
from mmtrain.models.megatron.zero_adamw import ZeroAdamW
from mmtrain.weights.tiny_model import write_tiny_model
from tests.distributed import fork_ranks
from tests.flow.runs import RECIPE, SMALL
from tests.flow.test_pretrained_omni import write_model_and_media
from tests.forked_command import main_here, run_forked

pytestmark = pytest.mark.slow

EXPERTS = (
    "model.llm.moe={experts: 4, top_k: 2, ffn: 16, shared_ffn: 16, scores: sigmoid, selection_bias: true, "
    "selection_bias_rate: 0.01, balance_loss: 0.01, z_loss: 0.001}"
)
MUON = "train.optimizer={lr: 0.001, kind: muon, layer_lr_decay: 0.8}"
EIGHT_GPUS = ("cluster.hardware=h100-80g", "cluster.ranks=8")


def _arguments(data: Path, *changes: str) -> tuple[str, ...]:
    paths = [f"data.sources.0.path={data}/train.json", f"data.validation.0.path={data}/heldout.json"]
    settings = [*paths, f"data.tokenizer={data}/tokenizer.json", *SMALL, "train.global_batch=8", *changes]
    return ("verify", str(RECIPE), *(part for setting in settings for part in ("--set", setting)))


@pytest.mark.parametrize("placement", ["unified", "replicated"])
def test_gradients_that_travel_in_bf16_are_equal_within_a_stated_part(
    data: Path, tmp_path: Path, placement: str
) -> None:
    parallel = (f"parallel.placement={placement}", "parallel.llm.tp=1", "cluster.ranks=4", "train.grad_reduce=bf16")
    if placement == "unified":
        parallel += ("parallel.llm.dp=4",)
    done = run_forked(tmp_path, *_arguments(data, "cluster.hardware=h100-80g", *parallel))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train.grad_reduce is bf16, so a gradient is equal within 0.8% of its norm." in done.stdout


@pytest.mark.parametrize(
    "parallel",
    [
        ("parallel.placement=disaggregated", "parallel.llm.tp=2"),
        ("parallel.placement=colocated", "parallel.llm.pp=2", "parallel.llm.tp=2"),
        ("parallel.placement=unified", "parallel.llm.cp=2", "parallel.llm.cp_method=ulysses"),
        ("parallel.placement=disaggregated", "parallel.llm.cp=2", "parallel.llm.cp_method=ring"),
        ("parallel.placement=colocated", "parallel.llm.tp=2", "parallel.llm.pp=2", "parallel.llm.ep=2", EXPERTS),
        ("parallel.placement=replicated", "parallel.shard=4", "parallel.llm.ep=2", EXPERTS),
        ("parallel.placement=colocated", "parallel.llm.tp=2", "parallel.llm.pp=2", "parallel.llm.ep=2", EXPERTS, MUON),
        ("parallel.llm.tp=2", "parallel.vision.tp=2", "model.vision.projector={kind: resampler, queries: 4, heads: 2}"),
    ],
)
def test_plans_for_gpus_that_are_not_here_compute_what_one_process_computes(
    data: Path, tmp_path: Path, parallel: tuple[str, ...]
) -> None:
    done = run_forked(tmp_path, *_arguments(data, *EIGHT_GPUS, *parallel))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 8 ranks" in done.stdout
    assert "The plan computes what one process computes." in done.stdout


def test_the_whole_model_of_a_folder_with_positions_of_its_own(tmp_path: Path) -> None:
    write_tiny_model(FAMILIES["qwen2_5_vl"], tmp_path / "tiny", seed=0)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        """
name: verify
model: {hf: tiny}
data:
  sources: [{path: tiny/conversations/train.json}]
  seq_len: 512
  image: {max_pixels: 4096}
train: {steps: 10, global_batch: 4, optimizer: {lr: 1.0e-3}}
cluster: {hardware: cpu-core, ranks: 2}
""",
        encoding="utf-8",
    )
    done = run_forked(tmp_path, "verify", str(recipe), "--whole", "--steps", "1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    [step] = json.loads(done.stdout)
    assert step["differences"] == []
    assert step["loss"] == pytest.approx(step["expected_loss"], rel=1e-5)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_the_recipe_of_a_mixture_computes_what_one_process_computes(tmp_path: Path, ep: int) -> None:
    """As docs/models.md shrinks it, with four replicas of the LLM that hold its experts together or apart."""
    write_tiny_model(FAMILIES["qwen3_vl_moe"], tmp_path / "tiny", seed=0)
    settings = (
        f"model.hf={tmp_path / 'tiny'}", f"data.sources.0.path={tmp_path / 'tiny' / 'conversations' / 'train.json'}",
        "data.seq_len=512", "data.image.max_pixels=4096", "data.video.max_pixels=8192", "train.global_batch=8",
        "cluster.hardware=cpu-core", "cluster.ranks=4", "parallel.placement=unified", "parallel.llm.dp=4",
        f"parallel.llm.ep={ep}",
    )  # fmt: skip
    options = (part for setting in settings for part in ("--set", setting))
    recipe = RECIPE.parent / "qwen3_vl_moe_sft.yaml"
    done = run_forked(tmp_path, "verify", str(recipe), *options, "--steps", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    for step in json.loads(done.stdout):
        assert step["differences"] == []
        assert step["num_parameters"] > 0
        assert step["loss"] == pytest.approx(step["expected_loss"], rel=1e-5)


@pytest.mark.parametrize(("method", "cp"), [("ulysses", 2), ("ring", 4)])
def test_ranks_that_share_videos_and_clips_compute_what_one_process_computes(
    method: str, cp: int, tmp_path: Path
) -> None:
    write_model_and_media(tmp_path / "tiny")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
name: verify
model: {{hf: tiny}}
data:
  sources: [{{path: tiny/conversations/watched.json}}]
  seq_len: 512
  video: {{min_pixels: 1024, max_pixels: 4096}}
parallel: {{placement: unified, llm: {{cp: {cp}, cp_method: {method}, cp_split: even}}}}
train: {{steps: 10, global_batch: 4, optimizer: {{lr: 1.0e-3}}}}
cluster: {{hardware: cpu-core, ranks: {cp}}}
""",
        encoding="utf-8",
    )
    done = run_forked(tmp_path, "verify", str(recipe), "--steps", "1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    [step] = json.loads(done.stdout)
    assert step["differences"] == []
    assert step["num_parameters"] > 0


def _without_tp_reduction(
    rank: int, size: int, scratch: Path, folder: Path, arguments: tuple[str, ...]
) -> CompletedProcess[str]:
    """Run `mmtrain` where ranks keep the gradients of their own slices of the tokens; the loss falls all the same."""
    ZeroAdamW._reduce_sequence_parallel_grads = lambda self: None  # type: ignore[method-assign]
    return main_here(rank, size, scratch, folder, arguments)


def test_a_lost_reduction_is_found_and_named(data: Path, tmp_path: Path) -> None:
    parallel = ("parallel.llm.tp=2", "parallel.llm.sp=true", "parallel.placement=unified", "cluster.ranks=2")
    arguments = _arguments(data, "cluster.hardware=h100-80g", *parallel)
    [done] = fork_ranks(1, _without_tp_reduction, tmp_path, arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    first, *_ = [line.strip() for line in done.stdout.splitlines() if line.startswith("  ")]
    # The last norm, next to the loss.
    assert first.startswith("llm.layers.3.norm.weight of stage llm.0: its gradient on rank")
    assert "The plan does NOT compute what one process computes." in done.stdout


SIXTY_FOUR_GPUS = ("cluster.hardware=h100-80g", "cluster.ranks=64", "train.global_batch=64")
COLOCATED = ("parallel.placement=colocated", "parallel.llm.tp=2", "parallel.llm.pp=2")
DISAGGREGATED = (
    "parallel.placement=disaggregated",
    "parallel.llm.tp=2",
    "parallel.llm.sp=true",
    "parallel.vision.dp=16",
    "parallel.vision.pp=2",
    "parallel.llm.dp=8",
)
SHARED = ("parallel.placement=unified", "parallel.llm.cp=4", "parallel.llm.tp=2", "parallel.llm.pp=1")


@pytest.mark.parametrize(
    ("parallel", "left"),
    [
        (COLOCATED, "Cut to 8 of the plan's 64 ranks: 2 of its 16 replica groups"),
        (DISAGGREGATED, "Cut to 8 of the plan's 64 ranks: 1 of its 8 replica groups"),
        (SHARED, "Cut to 8 of the plan's 64 ranks: 1 of its 8 replica groups"),
    ],
)
def test_a_plan_for_64_gpus_is_cut_to_8_processes(
    data: Path, tmp_path: Path, parallel: tuple[str, ...], left: str
) -> None:
    done = run_forked(tmp_path, *_arguments(data, *SIXTY_FOUR_GPUS, *parallel), "--ranks-here", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(left)
    assert "The plan, cut so, computes what one process computes." in done.stdout


def _without_dp_reduction(
    rank: int, size: int, scratch: Path, folder: Path, arguments: tuple[str, ...]
) -> CompletedProcess[str]:
    """Run `mmtrain` where every replica keeps its own gradients."""
    ZeroAdamW.reduce_grads = lambda self, chunk, bucket: None  # type: ignore[method-assign]
    ZeroAdamW.finish_reduction = lambda self: None  # type: ignore[method-assign]
    return main_here(rank, size, scratch, folder, arguments)


def test_a_reduction_lost_between_replica_groups_is_found_in_a_cut_plan(data: Path, tmp_path: Path) -> None:
    arguments = (*_arguments(data, *SIXTY_FOUR_GPUS, *COLOCATED), "--ranks-here", "8", "--json")
    [done] = fork_ranks(1, _without_dp_reduction, tmp_path, arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("Cut to 8 of the plan's 64 ranks") == 1
    [step] = json.loads(done.stdout)
    assert step["loss"] == pytest.approx(step["expected_loss"], rel=1e-5)
    assert len(step["differences"]) == step["num_parameters"]


def test_a_plan_that_cannot_be_cut_to_the_processes_allowed_says_what_to_do(data: Path, tmp_path: Path) -> None:
    done = run_forked(tmp_path, *_arguments(data, *SIXTY_FOUR_GPUS, *COLOCATED), "--ranks-here", "3")
    assert done.returncode == 2
    assert "has 4, and --ranks-here allows 3 processes" in done.stderr
    assert "--set cluster.ranks=N" in done.stderr
