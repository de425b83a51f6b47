"""The commands that a user types, on the demo's pictures and a model of 0.5B parameters, for `first_gpu.py`.

Plan, train with a trace and background checkpoints, stop by SIGTERM, resume, evaluate; predictions stand beside
measurements. Later, as far as there is time: profile, and the plan that the measured table gives.
"""

import shutil
import statistics
from pathlib import Path
from typing import Any

import yaml

from mmtrain.costs.hardware import GIB
from mmtrain.errors import StoppedAndSaved
from mmtrain.planning import load_plan
from mmtrain.planning.artifact.plan import Prediction
from mmtrain.report import read_metrics
from scripts.gpu.findings import first_json, predicted_allocation_gib
from scripts.gpu.session import Session

NUM_STEPS, SAVE_EVERY, STOP_AFTER, NUM_WARM_UP = 40, 20, 11, 3  # steps
NUM_SAMPLES, NUM_HELDOUT = 600, 8
DATA_LIMIT_S, PLAN_LIMIT_S, TRAIN_LIMIT_S, EVALUATE_LIMIT_S, PROFILE_LIMIT_S = 60, 40, 90, 60, 150
MAX_STEP_ERROR, MAX_MEMORY_ERROR = 0.10, 0.05  # the goals for predictions
# A checkpoint takes 12 bytes for each of 0.49e9 parameters: 5.9 GB. Two are kept, beside the one that is being written.
NEEDED_DISK_GIB, DRY_NEEDED_DISK_GIB = 18, 1

Settings = dict[str, Any]
VISION: Settings = {
    "layers": 12,
    "hidden": 768,
    "heads": 12,
    "ffn": 3072,
    "patch": 14,
    "max_side": 32,
    "positions": "grid",
    "downsample": "pixel_shuffle",
    "merge": 2,
}
LLM: Settings = {"layers": 16, "hidden": 1536, "heads": 12, "kv_heads": 4, "ffn": 4096, "vocab": 512}
TINY_VISION: Settings = {**VISION, "layers": 1, "hidden": 32, "heads": 2, "ffn": 32, "patch": 12, "max_side": 4}
TINY_LLM: Settings = {**LLM, "layers": 2, "hidden": 64, "heads": 16, "kv_heads": 8, "ffn": 32}


def make_data(session: Session) -> bool:
    """Make the run's pictures, if an earlier step has not, and its recipe; return whether they are there."""
    data, recipe = session.work / "data", session.work / "recipe.yaml"
    arguments = ["data", "demo", "--out", data, "--samples", NUM_SAMPLES, "--heldout", NUM_HELDOUT]
    if not (data / "train.json").exists() and not session.mmtrain("data", arguments, DATA_LIMIT_S):
        return False
    write_recipe(recipe, data, session.dry)
    keep(session, recipe)
    return True


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


def keep(session: Session, *files: Path) -> None:
    """Copy small files from where the steps work to the results."""
    for file in files:
        if file.exists() and file.parent.absolute() != session.folder.absolute():
            shutil.copy(file, session.folder)


def has_disk(session: Session) -> bool:
    """Return whether the run's checkpoints find room; say so if not, for the run would end in the middle."""
    free_gib = shutil.disk_usage(session.work).free / GIB
    needed_gib = DRY_NEEDED_DISK_GIB if session.dry else NEEDED_DISK_GIB
    found = f"{free_gib:.1f} GiB are free in {session.work}, and the run's checkpoints take {needed_gib} GiB"
    if free_gib < needed_gib:
        session.add("disk", f"{found}: no run. Name a folder with more by --work", "failed")
        return False
    session.add("disk", found, "ok")
    return True


def train_and_resume(session: Session) -> None:
    """Plan, train, stop, resume and evaluate."""
    if not (make_data(session) and has_disk(session)):
        return
    recipe, plan, run = session.work / "recipe.yaml", session.work / "plan.json", session.work / "run"
    shutil.rmtree(run, ignore_errors=True)  # of an earlier call
    if not session.mmtrain("plan", ["plan", recipe, "--out", plan], PLAN_LIMIT_S):
        return
    train = ["train", recipe, "--plan", plan, "--run-dir", run]
    stops = {"verdicts": {StoppedAndSaved.exit_code: "ok"}, "stop_when": lambda: num_steps_done(run) >= STOP_AFTER}
    stopped = session.mmtrain("train, then SIGTERM", train, TRAIN_LIMIT_S, **stops)
    resumed = stopped and session.mmtrain("resume", [*train, "--resume"], TRAIN_LIMIT_S)
    keep(session, plan, run / "metrics.jsonl", run / "trace.json")
    if not resumed:
        return
    compare_with_prediction(session, run, load_plan(plan).predicted)
    session.add("trace of a step", "trace.json", "ok" if (run / "trace.json").exists() else "failed")
    answer = session.folder / "evaluation.json"
    arguments = ["evaluate", run, "--limit", NUM_HELDOUT, "--json"]
    if session.mmtrain("evaluate", arguments, EVALUATE_LIMIT_S, stdout=answer):
        found = first_json(answer.read_text(encoding="utf-8"))
        session.add("held-out questions", f"{found['exact']:.0%} of {found['questions']} answered right")


def num_steps_done(run: Path) -> int:
    """Return how many steps the run has logged so far."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text(encoding="utf-8").count("\n") if metrics.exists() else 0


def compare_with_prediction(session: Session, run: Path, predicted: Prediction) -> None:
    """Report the median step and the peak memory of a finished run beside those that a plan predicts."""
    steps = read_metrics(run)
    session.add("steps", f"{steps[-1]['step']}, loss {steps[0]['loss']:.3f} to {steps[-1]['loss']:.3f}")
    step_s = statistics.median(step["step_time_s"] for step in steps[NUM_WARM_UP:])
    session.add(
        f"step, predicted from {predicted.cost_source}",
        f"{step_s:.4g} s, predicted {predicted.step_time_s:.4g} s: {predicted.step_time_s / step_s - 1:+.1%} (goal: "
        f"within {MAX_STEP_ERROR:.0%}); MFU {statistics.median(step['mfu'] for step in steps[NUM_WARM_UP:]):.1%}",
    )
    allocated = max(step["peak_memory_bytes"] for step in steps) / GIB
    predicted_gib, with_margin_gib = predicted_allocation_gib(predicted), max(predicted.peak_memory_gib.values())
    session.add(
        "peak memory",
        f"{allocated:.2f} GiB, predicted {predicted_gib:.2f} GiB: {predicted_gib / allocated - 1:+.1%} (goal: within "
        f"{MAX_MEMORY_ERROR:.0%}); {with_margin_gib:.2f} GiB with margin and communicators",
    )
    reserved = [step["peak_reserved_bytes"] for step in steps if step.get("peak_reserved_bytes")]
    if reserved:
        session.add("reserved by the allocator", f"{max(reserved) / GIB:.2f} GiB")


def profile_and_plan(session: Session) -> None:
    """Measure the layers of the run's model; compare the run, if there was one, with what their table predicts."""
    if not make_data(session):
        return
    recipe, run = session.work / "recipe.yaml", session.work / "run"
    costs, plan = session.work / "costs.json", session.work / "measured-plan.json"
    for unit in ("llm", "vision"):
        arguments = ["profile", recipe, "--only", unit, "--out", costs, "--tp", 1]
        if not session.mmtrain(f"profile-{unit}", arguments, PROFILE_LIMIT_S):
            return
    keep(session, costs)
    measured = ["plan", recipe, "--set", f"cluster.costs={costs.absolute()}", "--out", plan]
    if session.mmtrain("measured-plan", measured, PLAN_LIMIT_S) and num_steps_done(run) == NUM_STEPS:
        compare_with_prediction(session, run, load_plan(plan).predicted)
