"""`mmtrain train`."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import Overrides, RecipeFile

if TYPE_CHECKING:
    from mmtrain.api.train_requests import TrainOptions


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

    By itself, `train` starts its own local processes. Under torchrun or SLURM each started process is one rank. The
    stages of a recipe run one after another, there in the same processes; `--set stage=NAME` runs one of them.
    """
    from mmtrain.api.train_requests import TrainOptions, runs_to_train, train_requests
    from mmtrain.recipe import read_recipe
    from mmtrain.runtime.resilience.lost_output import ignore_lost_output

    ignore_lost_output()
    options = TrainOptions(plan, resume, resume_from, skip_steps, max_restarts, elastic, force_unlock)
    options = replace(options, resume_command=_resume_command(recipe, overrides, run_dir, options))
    runs = runs_to_train(read_recipe(recipe, overrides), run_dir, options)  # report a wrong recipe before torch loads
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":  # or nothing is seen for some seconds
        typer.echo("starting: loading torch", err=True)
    from mmtrain.runtime.training.train import start_training  # loads torch

    for request in train_requests(runs, options, typer.echo):
        start_training(request)


def _resume_command(recipe: Path, overrides: list[str], run_dir: Path | None, options: "TrainOptions") -> str:
    """Write the command that continues this run, quoted for a shell.

    It goes back to no earlier checkpoint, and takes no folder by force: the run that was stopped has done both.
    """
    words = ["mmtrain", "train", str(recipe)]
    for setting in overrides:
        words += ["--set", setting]
    for option, path in (("--plan", options.plan), ("--run-dir", run_dir)):
        if path is not None:
            words += [option, str(path)]
    if options.max_restarts:
        words += ["--max-restarts", str(options.max_restarts)]
    if options.elastic:
        words.append("--elastic")
    return join([*words, "--resume"])
