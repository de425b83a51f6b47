"""Block 3 of `first_gpu.py`: commands as a user types them, on the demo's pictures and a model of 1.4B parameters.

Profile, plan with the measured table, train with a trace and background checkpoints, stop by SIGTERM, resume, evaluate;
then run out of memory on purpose. Predicted step and memory stand beside the measured ones.
"""

import signal
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mmtrain.costs.hardware import GIB
from mmtrain.errors import StoppedAndSaved
from mmtrain.planning import load_plan
from mmtrain.report import read_metrics
from scripts.gpu.blocks import BlockContext
from scripts.gpu.findings import BlockReport, predicted_allocation_gib
from scripts.gpu.limited import CommandResult, python_command

NUM_STEPS, SAVE_EVERY, STOP_AFTER, NUM_WARM_UP = 20, 8, 11, 3  # steps
DEMO_SAMPLES, HELDOUT, DRY_SAMPLES, DRY_HELDOUT = 3000, 64, 600, 4
PROFILE_LIMIT_S, TRAIN_LIMIT_S, OTHER_LIMIT_S = 150, 150, 90
MAX_STEP_ERROR, MAX_MEMORY_ERROR = 0.10, 0.05  # the goals for predictions

Settings = dict[str, Any]
VISION: Settings = {
    "layers": 24,
    "hidden": 1024,
    "heads": 16,
    "ffn": 4096,
    "patch": 14,
    "max_side": 32,
    "positions": "grid",
    "downsample": "pixel_shuffle",
    "merge": 2,
}
LLM: Settings = {"layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 8, "ffn": 5632, "vocab": 512}
TINY_VISION: Settings = {**VISION, "layers": 1, "hidden": 32, "heads": 2, "ffn": 32, "patch": 12, "max_side": 4}
TINY_LLM: Settings = {**LLM, "layers": 2, "hidden": 64, "heads": 16, "kv_heads": 8, "ffn": 32}
# The reference backend keeps the scores of all tokens with all tokens: 137 GB for the LLM on a GPU, 7 GB dry.
TOO_MANY_TOKENS, DRY_TOO_MANY_TOKENS = 65_536, 16_384
DRY_ADDRESS_SPACE_GIB = 8  # of a process that is to run out of memory on a CPU


def train_and_resume(context: BlockContext, report: BlockReport) -> None:
    """Run block 3."""
    data, recipe, run = context.folder / "data", context.folder / "recipe.yaml", context.folder / "run"
    write_recipe(recipe, data, context.dry)
    num, heldout = (DRY_SAMPLES, DRY_HELDOUT) if context.dry else (DEMO_SAMPLES, HELDOUT)
    made = ["data", "demo", "--out", data, "--samples", num, "--heldout", heldout]
    if not _mmtrain(context, report, "data", made, OTHER_LIMIT_S):
        return
    costs = context.folder / "costs.json"
    for unit in ("llm", "vision"):
        _mmtrain(context, report, f"profile-{unit}", ["profile", recipe, "--only", unit, "--out", costs, "--tp", 1])
    measured = ["--set", f"cluster.costs={costs.absolute()}"] if costs.exists() else []
    plan = context.folder / "plan.json"
    if not _mmtrain(context, report, "plan", ["plan", recipe, *measured, "--out", plan], OTHER_LIMIT_S):
        return
    train = ["train", recipe, *measured, "--plan", plan, "--run-dir", run]
    stopped = context.run("train", _command(train), TRAIN_LIMIT_S, stop_when=lambda: num_steps_done(run) >= STOP_AFTER)
    saved = stopped.code == StoppedAndSaved.exit_code
    report.add("train, then SIGTERM", f"{_ended(stopped)}; {num_steps_done(run)} steps", "ok" if saved else "failed")
    if not saved:
        return
    if _mmtrain(context, report, "resume", [*train, "--resume"], TRAIN_LIMIT_S):
        compare_with_prediction(report, run, plan)
        _mmtrain(context, report, "evaluate", ["evaluate", run, "--limit", heldout, "--json"], OTHER_LIMIT_S)
        trace = run / "trace.json"
        report.add("trace", f"{trace}", "ok" if trace.exists() else "failed")
    run_out_of_memory(context, report, recipe)


def write_recipe(path: Path, data: Path, dry: bool) -> None:
    """Write the recipe of the run, with everything that is not a default."""
    recipe = {
        "name": "first-gpu",
        "model": {
            "vision": TINY_VISION if dry else VISION,
            "llm": {**(TINY_LLM if dry else LLM), "tie_embeddings": True},
        },
        "data": {
            "sources": [{"path": str(data.absolute() / "train.json")}],
            "validation": [{"path": str(data.absolute() / "heldout.json")}],
            "tokenizer": str(data.absolute() / "tokenizer.json"),
            "seq_len": 256 if dry else 8192,
            "image": {"scheme": "fixed", "size": 48 if dry else 448},
        },
        "parallel": {"placement": "unified"},
        "cluster": {"ranks": 1},
        "train": {
            "steps": NUM_STEPS,
            "global_batch": 4,
            "optimizer": {"lr": 3e-4, "warmup_steps": 5},
            "checkpoint": {"every": SAVE_EVERY},
            "trace_steps": [NUM_STEPS - 1],
        },
    }
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")


def num_steps_done(run: Path) -> int:
    """Return how many steps the run has logged so far."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text(encoding="utf-8").count("\n") if metrics.exists() else 0


def compare_with_prediction(report: BlockReport, run: Path, plan: Path) -> None:
    """Report the median step and the peak memory of a finished run beside those that its plan predicts."""
    steps = read_metrics(run)
    report.add("steps", f"{steps[-1]['step']}, loss {steps[0]['loss']:.3f} to {steps[-1]['loss']:.3f}")
    predicted = load_plan(plan).predicted
    step_s = statistics.median(step["step_time_s"] for step in steps[NUM_WARM_UP:])
    report.add(
        f"step, predicted from {predicted.cost_source}",
        f"{step_s:.4g} s, predicted {predicted.step_time_s:.4g} s: {predicted.step_time_s / step_s - 1:+.1%} (goal: "
        f"within {MAX_STEP_ERROR:.0%}); MFU {statistics.median(step['mfu'] for step in steps[NUM_WARM_UP:]):.1%}",
    )
    allocated = max(step["peak_memory_bytes"] for step in steps) / GIB
    predicted_gib, with_margin_gib = predicted_allocation_gib(predicted), max(predicted.peak_memory_gib.values())
    report.add(
        "peak memory",
        f"{allocated:.2f} GiB, predicted {predicted_gib:.2f} GiB: {predicted_gib / allocated - 1:+.1%} (goal: within "
        f"{MAX_MEMORY_ERROR:.0%}); {with_margin_gib:.2f} GiB with margin and communicators",
    )
    reserved = [step["peak_reserved_bytes"] for step in steps if step.get("peak_reserved_bytes")]
    if reserved:
        report.add("reserved by the allocator", f"{max(reserved) / GIB:.2f} GiB")


def run_out_of_memory(context: BlockContext, report: BlockReport, recipe: Path) -> None:
    """Train with more tokens than fit; the message must name the stage and the samples."""
    tokens = DRY_TOO_MANY_TOKENS if context.dry else TOO_MANY_TOKENS
    changes = {
        "data.seq_len": tokens,
        "train.attention": "reference",
        "train.global_batch": 1,
        "cluster.memory_gib": 1_000_000,
    }
    settings = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    command = _command(["train", recipe, *settings, "--run-dir", context.folder / "run-out-of-memory"])
    if context.dry:
        command = ["bash", "-c", f'ulimit -v {DRY_ADDRESS_SPACE_GIB * 2**20}; exec "$@"', "bash", *command]
    ended = context.run("out-of-memory", command, TRAIN_LIMIT_S)
    lines = [line for line in ended.output.splitlines() if "out of memory in stage" in line and "; samples " in line]
    report.add("out of memory, on purpose", lines[-1] if lines else _ended(ended), "ok" if lines else "failed")


def _command(arguments: Sequence[object]) -> list[str]:
    return python_command("-m", "mmtrain", *arguments)


def _mmtrain(
    context: BlockContext, report: BlockReport, name: str, arguments: Sequence[object], limit_s: float = PROFILE_LIMIT_S
) -> bool:
    """Run a command of mmtrain, report how it ended, and return whether it succeeded."""
    ended = context.run(name, _command(arguments), limit_s)
    report.add(name, f"{ended.seconds:.0f} s, {_ended(ended)}", "ok" if ended.code == 0 else "failed")
    return ended.code == 0


def _ended(ended: CommandResult) -> str:
    if ended.code is None:
        return f"its time was over: {ended.last_line}"
    how = signal.Signals(-ended.code).name if ended.code < 0 else f"exit code {ended.code}"
    return f"{how}: {ended.last_line}"
