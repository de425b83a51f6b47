"""`mmtrain rehearse`."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from mmtrain.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mmtrain.program import BubbleKind
    from mmtrain.runtime.rehearsal.rehearse import FaultKind, RehearsalFault, RehearsalRequest, RehearsalResult

FAULT_FORMS = "slow:RANK:FACTOR, lost:RANK, dead:RANK or dead_node:NODE"
BYTES_PER_GB = 1e9


def rehearse(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe of the plan.")],
    overrides: Overrides,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Plan file. Default: make a plan.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to rehearse.")] = 2,
    stretch: Annotated[
        float | None,
        typer.Option(min=1.0, help="Run so many times slower than planned. Default: as slow as this machine needs."),
    ] = None,
    fault: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT",
            help=f"Make a rank slow, lose its first message of the second step, or end it or its node: {FAULT_FORMS}.",
        ),
    ] = None,
    disk: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            min=1e-3,
            help="Rehearse a checkpoint too, on a disk to which each rank writes so many GB a second while all write.",
        ),
    ] = None,
    ranks_here: Annotated[int, typer.Option(min=1, help="Most processes to start on this machine.")] = 64,
    as_json: AsJson = False,
) -> None:
    """Run a plan's program before its GPUs are there.

    Starts a process for each rank of the first replica group. Each runs the program as in training, with stand-ins for
    the model: they take the predicted time and send messages without features. Shows how far the step is from the
    simulator's prediction, or what the ranks report of a fault and what a run would do. With --disk also how long a
    checkpoint takes, whether it delays steps, and what a kill would cost.
    """
    import json
    from dataclasses import asdict

    from mmtrain.api.simulated_steps import index_and_plan, step_batches
    from mmtrain.planning.evaluate.simulate_plan import plan_timing
    from mmtrain.recipe import load_recipe
    from mmtrain.runtime.rehearsal.rehearse import RehearsalRequest
    from mmtrain.runtime.rehearsal.rehearse import rehearse as run_rehearsal

    parsed_fault = None if fault is None else _parse_fault(fault)
    loaded = load_recipe(recipe, overrides).recipe
    index, chosen = index_and_plan(loaded, plan)
    [batch] = step_batches(loaded, index, chosen)
    timing = plan_timing(loaded, chosen, batch)
    request = RehearsalRequest(
        loaded,
        chosen,
        timing,
        steps,
        stretch,
        parsed_fault,
        disk_bytes_per_s=None if disk is None else disk * BYTES_PER_GB,
        max_processes=ranks_here,
    )
    result = run_rehearsal(request)
    typer.echo(json.dumps(asdict(result)) if as_json else _text(request, result))


def _parse_fault(text: str) -> "RehearsalFault":
    from mmtrain.errors import UserError
    from mmtrain.runtime.rehearsal.rehearse import RehearsalFault

    kind, *numbers = text.split(":")
    with contextlib.suppress(ValueError):
        if kind == "slow":
            rank, factor = numbers
            return RehearsalFault("slow", int(rank), float(factor))
        if kind in ("dead", "dead_node", "lost"):
            [number] = numbers
            return RehearsalFault(cast("FaultKind", kind), int(number))
    raise UserError(f"--fault {text}: allowed: {FAULT_FORMS}, for example slow:3:1.5")


def _text(request: "RehearsalRequest", result: "RehearsalResult") -> str:
    from mmtrain.report.idle_time import idle_text
    from mmtrain.report.plain_text import seconds_text
    from mmtrain.runtime.rehearsal.consequences import describe_checkpoint, describe_consequences

    lines = [
        f"Rehearsed {len(result.ranks)} of {request.plan.world_size} ranks (the first replica group), "
        f"{result.stretch:.3g} times slower than planned.",
        f"Predicted step: {seconds_text(result.predicted_s)}. Idle: {idle_text(_by_kind(result.predicted_bubbles))}.",
    ]
    if result.failure is not None:
        ranks = ", ".join(map(str, result.ranks))
        lines.append(f"The fault ended the rehearsal. The ranks, numbered from 0 in place of {ranks}, report:")
        lines.append(result.failure)
    else:
        steps = ", ".join(map(seconds_text, result.steps_s))
        idle = idle_text(_by_kind(result.bubbles))
        lines.append(f"Rehearsed steps: {steps}; the prediction is off by {result.error:+.1%}. Idle: {idle}.")
    if result.checkpoint is not None and request.disk_bytes_per_s is not None:
        lines.append(describe_checkpoint(result.checkpoint, request.disk_bytes_per_s))
    if request.fault is not None:
        lines.append(describe_consequences(request, result))
    return "\n".join(lines)


def _by_kind(shares: "Mapping[BubbleKind, float]") -> dict[str, float]:
    return {str(kind): share for kind, share in shares.items()}
