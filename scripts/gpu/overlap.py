"""What runs beside compute on one device, and what that saves.

    python -m scripts.gpu.overlap rows.json [--dry-run]

One model is trained from the same start as its plan says; then colocated, where the encoder's passes run in the middle
of the LLM's; with layers recomputed; and with activations in host memory. All must have the losses of the first. Rows
state the step by the device's clock, the host's share of it, and memory beside the plan's table. Run it alone: it is
timed. All compute is on one stream, so what a colocated step saves is what the host and the gaps between kernels cost;
copies of inputs and activations have streams of their own.
"""

import argparse
import gc
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmtrain.costs.hardware import GIB
from mmtrain.planning.artifact.plan import Plan
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.input_arena import copier_for
from mmtrain.runtime.execution.rank_context import RankContext, build_rank_context
from mmtrain.runtime.execution.recorder import HostClock, StepRecorder, clock_for
from mmtrain.runtime.execution.step_prefetcher import StepPrefetcher
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.resilience.out_of_memory import held_memory_bytes, is_out_of_memory, peak_memory_bytes
from mmtrain.runtime.world import Address, detect_hardware, join, leave, limit_threads
from scripts.gpu.cases import BenchCase
from scripts.gpu.findings import Finding
from scripts.gpu.synthetic import DRY_SIZES, SIZES, SyntheticSamples
from scripts.plans import fastest_plan

CASE, DRY_CASE = BenchCase("0.6B + 1.5B", 4096, "auto"), BenchCase("tiny", 128, "auto", dry=True)
NUM_WARM_UP, NUM_TIMED, LEARNING_RATE = 2, 4, 1e-5
MAX_LOSS_DIFFERENCE = 1e-3  # relative; in bf16, of runs that add up gradients in another order
SNAPSHOT = "memory.pickle"  # of a step, for pytorch.org/memory_viz
MAX_SNAPSHOT_EVENTS = 100_000


@dataclass(frozen=True)
class Variant:
    """One way to run the same steps."""

    name: str
    is_colocated: bool = False
    recomputes: bool = False
    offload: str = "none"  # `parallel.UNIT.offload`


@dataclass(frozen=True)
class Outcome:
    """What the steps of a variant took, and their losses."""

    step_s: float  # median, by the device's clock
    host_s: float  # median; at most this is the host's work, which also waits where the device's queue is full
    built_gib: float
    peak_gib: float
    losses: tuple[float, ...]


AS_PLANNED = Variant("as planned")
VARIANTS = (
    Variant("colocated", is_colocated=True),
    Variant("colocated, recomputed", is_colocated=True, recomputes=True),
    Variant("recomputed", recomputes=True),
    Variant("inputs in host memory", recomputes=True, offload="inputs"),
    Variant("all activations in host memory", recomputes=True, offload="all"),
)


def main() -> None:
    """Write the rows to a file after each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with a tiny model")
    options = parser.parse_args()
    findings: list[Finding] = []
    for finding in rows(options.dry_run, options.out.parent / SNAPSHOT):
        findings.append(finding)
        print(finding, flush=True)
        options.out.write_text(json.dumps([asdict(finding) for finding in findings]), encoding="utf-8")


def rows(dry: bool, snapshot: Path) -> Iterator[Finding]:
    """Yield the rows of all variants; those of a dry run say so."""
    case = DRY_CASE if dry else CASE
    recipe = case.recipe()
    samples = SyntheticSamples(recipe, DRY_SIZES if dry else SIZES)
    plan = fastest_plan(recipe, samples.lengths, 1, detect_hardware())
    note = "dry: " if dry else ""
    expected = run_variant(recipe, plan, samples, snapshot)
    yield Finding(f"{note}{AS_PLANNED.name}, {case.name}", describe(expected))
    yield Finding(f"{note}memory of {case.name}", describe_memory(expected, plan, snapshot))
    for variant in VARIANTS:
        try:
            outcome = run_variant(recipe_of(recipe, variant), plan_of(plan, variant), samples)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            yield Finding(f"{note}{variant.name}", "out of memory", "left out")
            continue
        yield compare(f"{note}{variant.name}", outcome, expected)


def compare(name: str, outcome: Outcome, expected: Outcome) -> Finding:
    """Return the row of a variant, which must have the losses of the plan."""
    pairs = zip(outcome.losses, expected.losses, strict=True)
    difference = float(np.max([abs(loss - other) / abs(other) for loss, other in pairs]))  # NaN if a loss is none
    text = f"{describe(outcome)}; {outcome.step_s / expected.step_s - 1:+.1%} time, losses differ by {difference:.1e}"
    return Finding(name, text, "ok" if difference <= MAX_LOSS_DIFFERENCE else "WRONG")


def describe(outcome: Outcome) -> str:
    return (
        f"step {outcome.step_s * 1e3:,.1f} ms, of which the host works at most {outcome.host_s * 1e3:,.1f} ms; peak "
        f"{outcome.peak_gib:.2f} GiB"
    )


def describe_memory(outcome: Outcome, plan: Plan, snapshot: Path) -> str:
    """State what was held beside what the plan says of each kind, and where the allocator's snapshot is."""
    [kinds] = plan.predicted.memory_kinds_gib.values()
    planned = ", ".join(f"{kind} {gib:.2f}" for kind, gib in kinds.items())
    where = f"; {snapshot.name}" if snapshot.exists() else ""
    return (
        f"GiB when built {outcome.built_gib:.2f}, in a step {outcome.peak_gib:.2f}; planned {sum(kinds.values()):.2f}: "
        f"{planned}{where}"
    )


def recipe_of(recipe: Recipe, variant: Variant) -> Recipe:
    """Return the recipe with the variant's offload for both units."""
    parallel = recipe.parallel
    units: dict[str, Any] = {
        name: getattr(parallel, name).model_copy(update={"offload": variant.offload}) for name in ("vision", "llm")
    }
    return recipe.model_copy(update={"parallel": parallel.model_copy(update=units)})


def plan_of(plan: Plan, variant: Variant) -> Plan:
    """Return the plan with the variant's schedule, and all layers recomputed or as they were."""
    changes: dict[str, Any] = {}
    if variant.is_colocated:
        schedule = plan.schedule.model_copy(update={"kind": "explicit", "order": {0: colocated_order(plan)}})
        changes |= {"placement": "colocated", "schedule": schedule}
    if variant.recomputes:
        changes["units"] = {
            name: unit.model_copy(
                update={
                    "stages": tuple(s.model_copy(update={"recompute": tuple(range(*s.layers))}) for s in unit.stages)
                }
            )
            for name, unit in plan.units.items()
        }
    return plan.model_copy(update=changes)


def colocated_order(plan: Plan) -> tuple[str, ...]:
    """Return an order in which the encoder's passes of the next and the last microbatch split the LLM's."""
    num_layers = {name: unit.stages[-1].layers[1] for name, unit in plan.units.items()}
    last = plan.schedule.num_microbatches["llm"] - 1
    middle, encoder = num_layers["llm"] // 2, f"0:{num_layers['vision']}"
    lines = ["F vision.0 vision:0.0"]
    for i in range(last + 1):
        ahead = f" |{middle}| PF vision.0 vision:0.{i + 1} {encoder}" if i < last else ""
        behind = f" |{middle}| PB vision.0 vision:0.{i - 1} {encoder}" if i > 0 else ""
        lines += [f"F llm.0 llm:0.{i}{ahead}", f"B llm.0 llm:0.{i}{behind}"]
    return (*lines, f"B vision.0 vision:0.{last}")


def run_variant(recipe: Recipe, plan: Plan, samples: SyntheticSamples, snapshot: Path | None = None) -> Outcome:
    """Build the plan on this device as a run does, and train; leave nothing behind."""
    address = Address(0, 1, 0, "127.0.0.1", free_port(), "mmtrain")
    world = join(address)
    limit_threads(address)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        # By the host's clock, which tells when the host has started everything.
        context = build_rank_context(recipe, plan, world, Activity(recorder=StepRecorder(HostClock())))
        built = held_memory_bytes(world.device) / GIB
        outcome = replace(_train(context, plan, samples), built_gib=built)
        if snapshot is not None and world.device.type == "cuda":
            write_snapshot(context, plan, samples, snapshot)
        return outcome
    finally:
        context = None  # type: ignore[assignment]
        leave()
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def _train(context: RankContext, plan: Plan, samples: SyntheticSamples) -> Outcome:
    device = context.world.device
    clock = clock_for(device)
    clock.start()
    marks, host_s, losses = [clock.mark()], [], []
    steps = samples.steps(context, plan, NUM_WARM_UP + NUM_TIMED)
    with StepPrefetcher(steps, context.host_input, copier_for(device), ahead=True) as prepared_steps:
        for prepared in prepared_steps:
            outcome = context.train_executor.run(replace(prepared.input, lr=LEARNING_RATE))
            host_s.append(outcome.record.end_s - outcome.record.start_s)
            losses.append(outcome.loss)
            marks.append(clock.mark())
    moments = clock.seconds(marks)
    step_s = [end - start for start, end in zip(moments[NUM_WARM_UP:], moments[NUM_WARM_UP + 1 :], strict=False)]
    host = statistics.median(host_s[NUM_WARM_UP:])
    return Outcome(statistics.median(step_s), host, 0.0, peak_memory_bytes(device) / GIB, tuple(losses))


def write_snapshot(context: RankContext, plan: Plan, samples: SyntheticSamples, path: Path) -> None:
    """Write what the CUDA allocator did in one step, with the lines of code that asked for memory."""
    [data] = samples.steps(context, plan, 1)
    torch.cuda.memory._record_memory_history(max_entries=MAX_SNAPSHOT_EVENTS)
    try:
        context.train(data, LEARNING_RATE)
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


if __name__ == "__main__":
    main()
