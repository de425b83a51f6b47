"""`mmtrain verify`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile

if TYPE_CHECKING:
    from mmtrain.runtime.verification.verify_plan import VerifiedStep

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
    ranks_here: Annotated[int, typer.Option(min=1, help="Most processes to start on this machine.")] = 64,
    as_json: AsJson = False,
) -> None:
    """Verify that a plan computes what one process computes.

    Trains the recipe's model for a few steps on some of its samples: by the plan, with a process for each rank, and in
    one process, sample by sample. Compares the losses and every gradient. The model starts from random weights and
    computes in fp32; its layers, heads and meshes are those of the plan, its widths are small. Exits with 1 if
    anything differs, and names the parameter nearest to the loss that does.
    """
    import json
    from dataclasses import asdict

    from mmtrain.cli.simulated_steps import index_and_plan
    from mmtrain.recipe import load_recipe, require_runnable

    if cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for devices
    loaded = load_recipe(recipe, overrides).recipe
    require_runnable(loaded, "verify")
    index, chosen = index_and_plan(loaded, plan)
    from mmtrain.runtime.verification.verify_plan import VerifyRequest, verify_plan

    verified = verify_plan(VerifyRequest(loaded, chosen, index, steps, whole, ranks_here))
    if as_json:
        typer.echo(json.dumps([asdict(step) for step in verified]))
    else:
        typer.echo("\n".join(_lines(verified, chosen.world_size)))
    if not all(step.is_equal for step in verified):
        raise typer.Exit(1)


def _lines(steps: "list[VerifiedStep]", num_ranks: int) -> "list[str]":
    lines = []
    for number, step in enumerate(steps, 1):
        losses = f"loss {step.loss:.6f} on {num_ranks} ranks, {step.expected_loss:.6f} in one process"
        verdict = f"all {step.num_parameters} gradients are equal"
        if step.differences:
            verdict = f"{len(step.differences)} of {step.num_parameters} gradients differ"
        lines.append(f"Step {number}: {losses}; {verdict}.")
        lines += [f"  {difference}" for difference in step.differences[:MAX_DIFFERENCES_IN_MESSAGE]]
    if all(step.is_equal for step in steps):
        lines.append("The plan computes what one process computes.")
    else:
        lines.append("The plan does NOT compute what one process computes. Errors spread from the first one named.")
    return lines
