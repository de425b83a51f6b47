"""Published runs: their two halves stay what they are, each has a source and a quotation, and a recipe states it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mmtrain.recipe import load_recipe
from scripts.bench_known import Comparison, errors_of, predicted_seconds, write_recipe
from scripts.known_runs import MAX_QUOTATION, RUNS_FILE, KnownRun, known_runs, mixture_runs, model_flops

# Runs that only judge. A new run joins the half that the hash of its name says. None changes its half: not by hand, and
# not by a new name.
HELD_OUT = {
    "GPT 1.7B on 32 A100",
    "Llama 3 8B on 64 A100",
    "Llama 2 13B on 64 A100",
    "Llama 3.1 8B, compiled on 8 H100",
    "MPT 7B, 2k tokens, on 8 A100",
    "MPT 30B, 2k tokens, on 8 A100",
    "MPT 1B, 32k tokens, on 8 A100",
    "MPT 7B, 2k tokens, on 8 H100",
    "MPT 3B, 8k tokens, on 8 H100",
    "MPT 70B, 2k tokens, on 64 H100",
    "MPT 7B, 8k tokens, on 8 A100",
    "MPT 3B, 2k tokens, on 64 H100",
    "MPT 1B, 2k tokens, on 64 H100",
    "Llama 3.1 8B, cp 2, on 8 H100",
    "Llama 3.1 70B, cp 2, on 64 H100",
    "Llama 3.1 405B, cp 2, on 576 H100",
    "Llama 2 70B, MaxText, on 64 H100",
    "GPT 1.7B on 48 H100",
    "Llama 3 70B, Automodel, on 64 H100",
    "Llama 3.1 70B, tp 8, on 256 H100",
    "Llama 3.1 8B, async TP, on 64 H100",
    "KempnerForge 7B, FSDP 2, on 2 H200",
    "KempnerForge 7B, tp 2, on 2 H200",
    "KempnerForge 7B, tp 2 x FSDP 2, on 4 H200",
    "KempnerForge 13B, tp 4 x FSDP 2, on 8 H200",
    "KempnerForge 7B, tp 4 x FSDP 4, on 16 H200",
    "MPT 70B, 2k tokens, on 32 H100",
    "MPT 7B, 64k tokens, on 8 H100",
    "MPT 125M, 2k tokens, on 8 A100",
    "GPT 3.6B on 64 A100",
    "GPT 39B on 512 A100",
    "GPT 145B on 1536 A100",
    "GPT 530B on 2520 A100",
    "Llama 3 8B, LoongForge, on 8 A800",
    "Qwen3 8B, LoongForge, on 8 A800",
    "Qwen2.5 14B, ms-swift, on 8 A800",
}
SOURCE = re.compile(r"(arXiv \d{4}\.\d{5} table \d.*|[\w.-]+/[\w.-]+@[0-9a-f]{8} .+)")


def run_named(name: str) -> KnownRun:
    """Return one run."""
    (run,) = [run for run in known_runs() if run.name == name]
    return run


def test_names_are_unique() -> None:
    names = [run.name for run in known_runs()]
    assert len(set(names)) == len(names) == 74


def test_the_halves_are_those_of_before() -> None:
    assert {run.name for run in known_runs() if run.held_out} == HELD_OUT


def test_a_run_is_in_a_half_by_its_name_alone() -> None:
    for run in known_runs():
        changed = replace(run, seconds=2 * run.seconds, ranks=1, source="", before="used", mesh={}, kernels="own")
        assert changed.held_out == run.held_out
    halves = {replace(known_runs()[0], name=f"run {number}").held_out for number in range(20)}
    assert halves == {False, True}


def test_what_runs_were_used_for_before_there_were_halves_is_kept() -> None:
    before = [run.before for run in known_runs()]
    assert {word: before.count(word) for word in set(before)} == {"used": 16, "held out": 8, "new": 50}
    assert sum(run.before == "used" for run in known_runs() if run.held_out) == len(HELD_OUT) / 4  # docs/planning.md


@pytest.mark.parametrize("run", [*known_runs(), *mixture_runs()], ids=lambda run: run.name)
def test_a_run_has_a_source_and_a_short_quotation(run: KnownRun) -> None:
    assert SOURCE.fullmatch(run.source)
    assert 0 < len(run.quotation) <= MAX_QUOTATION
    assert run.seconds > 0


@pytest.mark.parametrize("run", [*known_runs(), *mixture_runs()], ids=lambda run: run.name)
def test_a_recipe_states_the_run(run: KnownRun, tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(run, "all", tmp_path)).recipe
    assert recipe.train.global_batch == run.num_microbatches
    llm = recipe.parallel.llm
    if run.is_sharded:
        assert (llm.tp or 1, llm.cp or 1) == (run.mesh.get("tp", 1), run.mesh.get("cp", 1))
        assert run.ranks % ((llm.tp or 1) * (llm.cp or 1)) == 0
    else:
        assert (llm.tp or 1) * (llm.pp or 1) * (llm.dp or 1) * (llm.cp or 1) == run.ranks


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("GPT 530B on 2520 A100", 54.08),  # TFLOP/s with all recomputed
        ("GPT 32B on 384 H100", 0.892),  # TFLOP/s without
        ("MPT 70B, 2k tokens, on 512 H100", 8 * 2048 / 1007),  # tokens a second and GPU
        ("Llama 3.1 8B, async TP, on 64 H100", 12 * 8192 / 8 / 4809.4),
        ("Nemotron-4 15B on 16 H100", 2.83),
    ],
)
def test_seconds_follow_from_what_was_published(name: str, seconds: float) -> None:
    assert run_named(name).seconds == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "samples", "ranks", "seconds", "tflops"),
    [
        ("qwen3-235b-a22b", 2048, 256, 17.6, 276),  # readme.md of Megatron-MoE-ModelZoo states both for these three
        ("qwen3-235b-a22b", 2048, 256, 24.2, 200),
        ("qwen3-235b-a22b", 2048, 256, 29.0, 167),
        ("qwen3-30b-a3b", 1024, 16, 24.7138, 244.039),  # and Megatron-Bridge's SKILL.md for this one
    ],
)
def test_flops_of_mixtures_are_those_that_their_sources_count(
    model: str, samples: int, ranks: int, seconds: float, tflops: float
) -> None:
    llm = yaml.safe_load(RUNS_FILE.read_text(encoding="utf-8"))["models"][model]["llm"]
    counted = samples * model_flops(llm, 4096) / (ranks * seconds) / 1e12
    assert counted == pytest.approx(tflops, rel=0.006)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("GPT 530B on 2520 A100", "a100-80g, pipeline"),
        ("Llama 3.1 70B, cp 2, on 64 H100", "h100-80g, pipeline"),
        ("Llama 3.1 8B, cp 2, on 8 H100", "h100-80g, cp"),
        ("KempnerForge 7B, tp 2 x FSDP 2, on 4 H200", "h200-141g, FSDP"),
        ("Llama 2 13B on 64 A100", "a100-80g, FSDP"),
        ("InternVL2.5 8B on 8 A800", "a800-80g, tp x dp, with an encoder"),
    ],
)
def test_groups_are_of_hardware_layout_and_encoder(name: str, group: str) -> None:
    assert run_named(name).group == group


def test_plans_are_told_of_the_runs_that_only_judge_with_their_kernels() -> None:
    runs = [*known_runs(), *mixture_runs()]
    errors = errors_of([Comparison(run, seconds=run.seconds, own_seconds=1.25 * run.seconds) for run in runs])
    mixtures = {run.name for run in mixture_runs()}
    assert {error.name for error in errors.runs} == HELD_OUT | mixtures
    assert {error.name for error in errors.runs if error.has_experts} == mixtures
    assert {error.ratio for error in errors.runs} == {1.0}
    judging = [run for run in runs if run.held_out or run.has_experts]
    assert {(error.hardware, error.layout) for error in errors.runs} == {
        (run.hardware.name, run.layout) for run in judging
    }


def test_a_share_of_recomputed_layers_lies_between_none_and_all() -> None:
    run = run_named("KempnerForge 7B on 1 H200")
    none, half, everything = (
        predicted_seconds(replace(run, recompute=share), run.execution) for share in (0.0, 0.5, 1.0)
    )
    assert half == pytest.approx((none + everything) / 2)
    assert none < half < everything


def test_links_of_a_run_are_those_of_its_profile() -> None:
    """KempnerForge's: 205 reduce-scatters in fp32, of 40 blocks and of what lies outside, on each of six nodes."""
    run = run_named("KempnerForge 70B, tp 4 x FSDP 8, on 32 H200")
    blocks = 40 * (2 * 5120**2 + 2 * 5120 * 1024 + 3 * 5120 * 17920 + 2 * 5120) / 4
    outside = (2 * 128256 * 5120 + 5120) / 4
    sent = 5 * 4 * (blocks + outside) * 5 / 6
    assert run.hardware.inter_node.bytes_per_s == pytest.approx(sent / 2.9534, rel=0.01)
    assert run.execution.reduces_once


@pytest.mark.parametrize(
    ("kernels", "source", "num_runs", "grad_reduce"),
    [
        ("megatron 2021, fp16", "examples/sc21/run_table_1.sh", 7, "bf16"),  # CONFIG.sh: --fp16
        ("llm-foundry, flash", "scripts/train/benchmarking/README.md", 2, "fp32"),  # sweep.py: --attn_impl flash
    ],
)
def test_runs_of_one_source_have_the_settings_that_it_states(
    kernels: str, source: str, num_runs: int, grad_reduce: str
) -> None:
    runs = [run for run in known_runs() if run.kernels == kernels]
    assert len(runs) == num_runs
    assert all(source in run.source and run.grad_reduce == grad_reduce for run in runs)


def test_tensor_parallel_runs_of_the_table_of_megatron_hide_messages() -> None:
    """README.md beside the table: `--tp-comm-overlap`."""
    runs = [run for run in known_runs() if "images/model_table.png" in run.source]
    assert {run.execution.user_buffers for run in runs if run.mesh["tp"] > 1} == {True}
    assert {run.execution.user_buffers for run in runs if run.mesh["tp"] == 1} == {False}
