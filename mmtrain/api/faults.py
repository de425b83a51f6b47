"""Say what a run of a plan does when a rank becomes slow, loses a message, or dies."""

import contextlib
from dataclasses import dataclass
from typing import Literal, cast

from mmtrain.errors import UserError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.program import ModelTiming, build_program, simulate
from mmtrain.program.simulation.simulate import SlowRankTiming
from mmtrain.recipe import Recipe
from mmtrain.report.plain_text import seconds_text
from mmtrain.runtime.resilience.stragglers import MIN_LOST_STEP_SHARE, MIN_STRAGGLER_SLOWDOWN, STRAGGLER_WINDOW_STEPS

FaultKind = Literal["slow", "lost", "dead", "dead_node"]
TORCH_TIMEOUT_S = 600  # of collectives, which ends a run without a watchdog
FAULT_FORMS = "slow:RANK:FACTOR, lost:RANK, dead:RANK or dead_node:NODE"
RESTARTS = "`--max-restarts`, torchrun's `--max-restarts` or SLURM's requeue"


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong on a rank or a node, numbered as in the plan."""

    kind: FaultKind
    number: int  # of the rank, or of the node that is dead
    factor: float = 1.0  # how many times as long a slow rank computes


@dataclass(frozen=True)
class FaultOutcome:
    """What a fault does to a run."""

    step_time_s: float | None  # of a step with the fault; None where the run ends
    unbroken_s: float  # of a step without it
    consequences: str  # in a sentence or two


def parse_fault(text: str) -> Fault:
    """Read a fault in one of `FAULT_FORMS`, such as `slow:3:1.5`. Raises UserError."""
    kind, *numbers = text.split(":")
    with contextlib.suppress(ValueError):
        if kind == "slow":
            rank, factor = numbers
            return Fault("slow", int(rank), float(factor))
        if kind in ("lost", "dead", "dead_node"):
            [number] = numbers
            return Fault(cast(FaultKind, kind), int(number))
    raise UserError(f"--fault {text}: allowed: {FAULT_FORMS}, for example slow:3:1.5")


def simulate_fault(recipe: Recipe, plan: Plan, timing: ModelTiming, unbroken_s: float, fault: Fault) -> FaultOutcome:
    """Return what a run of the plan does when the fault happens to it.

    timing: of the plan's actions in the step that is simulated. unbroken_s: that step without the fault.

    Raises:
        UserError: the plan has no such rank or node.
    """
    _require_rank(plan, timing.ranks_per_node, fault)
    if fault.kind != "slow":
        return FaultOutcome(None, unbroken_s, _describe_end(recipe, plan, timing.ranks_per_node, unbroken_s, fault))
    program = build_program(timing.graph, kind=plan.schedule.kind, order=plan.schedule.order)
    slowed = SlowRankTiming(timing, fault.number, fault.factor)
    step_time_s = simulate(program, slowed, timing.graph.num_groups, timing.waits).step_time_s
    return FaultOutcome(step_time_s, unbroken_s, _describe_slow(fault, step_time_s, unbroken_s))


def _require_rank(plan: Plan, ranks_per_node: int, fault: Fault) -> None:
    num_nodes = -(-plan.world_size // ranks_per_node)
    what, count = ("node", num_nodes) if fault.kind == "dead_node" else ("rank", plan.world_size)
    if not 0 <= fault.number < count:
        raise UserError(f"--fault: {what} {fault.number} found; allowed: a {what} of the plan, 0 to {count - 1}")
    if fault.kind == "slow" and fault.factor < 1:
        raise UserError(f"--fault: factor {fault.factor:g} found; allowed: 1 or more, as in slow:3:1.5")


def _describe_slow(fault: Fault, step_time_s: float, unbroken_s: float) -> str:
    return (
        f"A run goes on: each step takes {seconds_text(step_time_s)} instead of {seconds_text(unbroken_s)} "
        f"({step_time_s / unbroken_s - 1:+.0%}). If other ranks do the same work, it names rank {fault.number} after "
        f"{STRAGGLER_WINDOW_STEPS} steps, once it takes {MIN_STRAGGLER_SLOWDOWN:g} times their time and loses "
        f"{MIN_LOST_STEP_SHARE:.0%} of a step."
    )


def _describe_end(recipe: Recipe, plan: Plan, ranks_per_node: int, step_s: float, fault: Fault) -> str:
    watchdog_s = recipe.train.watchdog_s or TORCH_TIMEOUT_S
    restart = _describe_restart(recipe, step_s)
    match fault.kind:
        case "lost":
            return (
                f"A run stands still for {watchdog_s:.0f} s (train.watchdog_s). Then every rank reports what it waits "
                f"for, and the run ends. {restart}"
            )
        case "dead":
            return f"A run ends at once: the launcher ends the other ranks. {restart}"
        case _:
            return (
                f"A run ends as soon as its launcher notices, or after {watchdog_s:.0f} s (train.watchdog_s). "
                f"{restart} The plan needs all its {plan.world_size} ranks: without a node in the place of node "
                f"{fault.number}, `--resume` with a plan for {ranks_per_node} ranks fewer goes on from the same "
                "checkpoint."
            )


def _describe_restart(recipe: Recipe, step_s: float) -> str:
    every = recipe.train.checkpoint.every
    if not every:
        return (
            f"Started again by {RESTARTS}, it begins with the first step: train.checkpoint.every is 0, so it saves "
            "only at its end."
        )
    return (
        f"Started again by {RESTARTS}, it continues from the newest checkpoint: up to {every} steps "
        f"({seconds_text(every * step_s)}, train.checkpoint.every) and those beside an unfinished save are lost."
    )
