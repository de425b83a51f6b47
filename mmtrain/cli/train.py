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
    resume_from: Annotated[
        str | None,
        typer.Option(
            metavar="STEP|last-good",
            help="Go back to the checkpoint of this step, or to the newest one from before a stretch of unusual steps, "
            "and continue from there. What came after it moves to the folder `abandoned` of the run.",
        ),
    ] = None,
    skip_steps: Annotated[
        str | None,
        typer.Option(
            metavar="A-B",
            help="With --resume-from: do not train again on the samples of steps A to B, but go on behind them.",
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Restart up to N times from the newest good checkpoint after a failure."),
    ] = 0,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Go on with fewer ranks when some are gone for good, and with more when they are back. Plans for "
            "these numbers of ranks are made ahead, beside the training.",
        ),
    ] = False,
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
    from mmtrain.errors import UserError
    from mmtrain.recipe import load_recipe, require_runnable
    from mmtrain.runtime.resilience.lost_output import ignore_lost_output

    ignore_lost_output()
    loaded = load_recipe(recipe, overrides)  # report a wrong recipe before torch loads
    require_runnable(loaded.recipe, "train")
    from mmtrain.cli.local_cluster import plan_for_started_ranks, resolve_cluster
    from mmtrain.plan import load_plan
    from mmtrain.plan.artifact.plan_files import ranks_to_start
    from mmtrain.plan.plan_again import plan_again
    from mmtrain.runtime.training.go_back import parse_go_back
    from mmtrain.runtime.training.train import run
    from mmtrain.runtime.training.train_request import TrainRequest

    if skip_steps is not None and resume_from is None:
        raise UserError("--skip-steps: needs --resume-from, which says where to go back to")
    go_back = parse_go_back(resume_from, skip_steps) if resume_from is not None else None
    folder = run_dir or loaded.recipe.run_dir or Path("runs") / loaded.recipe.name
    ranks, hardware = resolve_cluster(loaded.recipe)
    if plan is not None:
        ranks = ranks_to_start(load_plan(plan), loaded.recipe, ranks)
    run(
        TrainRequest(
            loaded,
            plan_for_started_ranks,
            plan_again,
            hardware,
            ranks,
            folder,
            plan_path=plan,
            resume=resume or go_back is not None,
            go_back=go_back,
            max_restarts=max_restarts,
            elastic=elastic,
            force_unlock=force_unlock,
        )
    )
