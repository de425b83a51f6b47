"""`mmtrain train`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import Overrides, RecipeFile


def train(
    recipe: RecipeFile,
    overrides: Overrides,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan file, saved by `plan --out`. Default: make a plan first.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the run. Default: the recipe's `run_dir`, else runs/NAME."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest good checkpoint in the run's folder.")
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Restart up to N times from the newest good checkpoint after a failure."),
    ] = 0,
    force_unlock: Annotated[
        bool,
        typer.Option(
            "--force-unlock",
            help="Take the folder from the run that owns it. For an owner that is certainly gone; one that is alive "
            "ends without saving.",
        ),
    ] = False,
) -> None:
    """Train a recipe with a parallel plan.

    By itself, `train` starts its own local processes. Under torchrun or SLURM each started process is one rank.
    """
    from mmtrain.recipe import load_recipe, require_runnable

    loaded = load_recipe(recipe, overrides)  # report a wrong recipe before torch loads
    require_runnable(loaded.recipe, "train")
    from mmtrain.cli.local_cluster import plan_for_started_ranks, resolve_cluster
    from mmtrain.plan import load_plan
    from mmtrain.plan.artifact.plan_files import ranks_to_start
    from mmtrain.runtime.training.train import run
    from mmtrain.runtime.training.train_request import TrainRequest

    folder = run_dir or loaded.recipe.run_dir or Path("runs") / loaded.recipe.name
    ranks, hardware = resolve_cluster(loaded.recipe)
    if plan is not None:
        ranks = ranks_to_start(load_plan(plan), loaded.recipe, ranks)
    run(
        TrainRequest(
            loaded,
            plan_for_started_ranks,
            hardware,
            ranks,
            folder,
            plan_path=plan,
            resume=resume,
            max_restarts=max_restarts,
            force_unlock=force_unlock,
        )
    )
