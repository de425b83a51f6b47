"""`mmtrain verify`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile

if TYPE_CHECKING:
    from mmtrain.runtime.verification.verify_plan import Verification

MAX_DIFFERENCES_IN_MESSAGE = 5


def verify(
    recipe: RecipeFile,
    overrides: Overrides,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Plan file. Default: make a plan.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.")] = 2,
    whole: Annotated[
        bool, typer.Option("--whole", help="Train the model at its own widths. Default: narrow, with as many layers.")
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use processes on the CPU, even where there are GPUs.")] = False,
    ranks_here: Annotated[
        int, typer.Option(min=1, help="Most processes to start. A plan with more ranks is cut.")
    ] = 64,
    as_json: AsJson = False,
) -> None:
    """Verify that a plan computes what one process computes.

    Trains the recipe's model for a few steps on some of its samples: by the plan, with a process for each rank, and in
    one process, sample by sample. Compares the losses and every gradient. The model starts from random weights and
    computes in fp32; its layers, heads and meshes are those of the plan, its widths are small. Exits with 1 if
    anything differs, and names the parameter nearest to the loss that does. A plan with more ranks than processes
    may be started is cut to two replica groups or one, with the same meshes, schedule and ratios.
    """
    import json
    from dataclasses import asdict

    from mmtrain.api.simulated_steps import index_and_plan
    from mmtrain.planning.artifact.plan_files import with_planned_groups
    from mmtrain.recipe import load_recipe, require_runnable

    if cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for devices
    loaded = load_recipe(recipe, overrides).recipe
    require_runnable(loaded, "verify")
    index, chosen = index_and_plan(loaded, plan)
    from mmtrain.runtime.verification.verify_plan import VerifyRequest, verify_plan

    verified = verify_plan(VerifyRequest(with_planned_groups(loaded, chosen), chosen, index, steps, whole, ranks_here))
    if verified.cut.note is not None:
        typer.echo(verified.cut.note, err=as_json)
    if as_json:
        typer.echo(json.dumps([asdict(step) for step in verified.steps]))
    else:
        typer.echo("\n".join(_lines(verified)))
    if not verified.is_equal:
        raise typer.Exit(1)


def _lines(verified: "Verification") -> "list[str]":
    from mmtrain.runtime.verification.compare_gradients import MAX_ROUNDED_DISTANCE

    lines = []
    num_ranks = verified.cut.plan.world_size
    for number, step in enumerate(verified.steps, 1):
        losses = f"loss {step.loss:.6f} on {num_ranks} ranks, {step.expected_loss:.6f} in one process"
        verdict = f"all {step.num_parameters} gradients are equal"
        if step.differences:
            verdict = f"{len(step.differences)} of {step.num_parameters} gradients differ"
        lines.append(f"Step {number}: {losses}; {verdict}.")
        lines += [f"  {difference}" for difference in step.differences[:MAX_DIFFERENCES_IN_MESSAGE]]
    if any(step.is_rounded for step in verified.steps):
        lines.append(
            f"train.grad_reduce is bf16, so a gradient is equal within {MAX_ROUNDED_DISTANCE:.1%} of its norm."
        )
    if not verified.is_equal:
        lines.append("The plan does NOT compute what one process computes. Errors spread from the first one named.")
    elif verified.cut.note is None:
        lines.append("The plan computes what one process computes.")
    else:
        lines.append("The plan, cut so, computes what one process computes.")
    return lines
