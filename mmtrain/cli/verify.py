"""`mmtrain verify`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile


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

    from mmtrain.api.verified_plan import use_cpu, verify_recipe
    from mmtrain.recipe import load_recipe

    if cpu:
        use_cpu()
    verified = verify_recipe(load_recipe(recipe, overrides).recipe, plan, steps, whole, ranks_here)
    if verified.note is not None:
        typer.echo(verified.note, err=as_json)
    if as_json:
        typer.echo(json.dumps([asdict(step) for step in verified.steps]))
    else:
        typer.echo("\n".join(verified.sentences()))
    if not verified.is_equal:
        raise typer.Exit(1)
