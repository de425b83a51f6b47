"""`mmtrain train`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import Overrides, RecipeFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mmtrain.api.stage_runs import StageRun
    from mmtrain.runtime.training.train_request import TrainRequest


@dataclass(frozen=True)
class _Options:
    """What the command line says about every run that it starts."""

    plan: Path | None
    resume: bool
    resume_from: str | None
    skip_steps: str | None
    max_restarts: int
    elastic: bool
    force_unlock: bool


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
    from mmtrain.api.stage_runs import require_one_stage, stage_runs
    from mmtrain.errors import UserError
    from mmtrain.recipe import read_recipe, require_runnable
    from mmtrain.runtime.resilience.lost_output import ignore_lost_output

    ignore_lost_output()
    if skip_steps is not None and resume_from is None:
        raise UserError("--skip-steps: needs --resume-from, which says where to go back to")
    single = "--plan" if plan is not None else "--resume-from" if resume_from is not None else None
    written = read_recipe(recipe, overrides)
    require_one_stage(written, single)
    runs = stage_runs(written, run_dir)  # report a wrong recipe before torch loads
    for stage in runs:
        require_runnable(stage.loaded.recipe, "train")
    from mmtrain.runtime.training.train import start_training  # loads torch

    options = _Options(plan, resume, resume_from, skip_steps, max_restarts, elastic, force_unlock)
    for run, may_be_new in _runs_to_train(runs, options):
        start_training(_request(run, options, may_be_new))


def _runs_to_train(runs: "list[StageRun]", options: _Options) -> "Iterator[tuple[StageRun, bool]]":
    """Yield what to train, one after another, and whether there may be no such run to resume yet.

    In a recipe with stages that goes on, pass over those that are done. All ranks of a launcher decide alike: a stage
    starts and ends for all of them together.
    """
    from mmtrain.checkpoint import find
    from mmtrain.errors import UserError
    from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, read_run_state
    from mmtrain.runtime.training.train import require_started_ranks
    from mmtrain.runtime.world import find_address

    if runs[0].stage is None:
        yield runs[0], False
        return
    address = find_address()
    if address is not None:
        for run in runs:
            require_started_ranks(run.loaded.recipe, address.world_size, options.elastic)
    # torchrun restarts processes with the arguments of the first start.
    is_restart = address is not None and (address.attempt > 0 or (options.elastic and address.launcher == "torchrun"))
    goes_on = options.resume or is_restart
    held = [run.folder for run in runs if find(run.folder / CHECKPOINTS_FOLDER)]
    if held and not goes_on and options.resume_from is None:
        raise UserError(f"{held[0]} holds a run already: continue it with --resume, or choose another --run-dir")
    is_first = address is None or address.rank == 0
    for run in runs:
        is_done = goes_on and read_run_state(run.folder).get("status") == "done"
        if is_first:
            done = "done, " if is_done else ""
            typer.echo(f"stage {run.stage}: {done}in {run.folder}")
        if not is_done:
            yield run, bool(held) or is_restart


def _request(run: "StageRun", options: _Options, may_be_new: bool) -> "TrainRequest":
    """Return what the runtime is to train; `may_be_new`: with `--resume`, start the run if there is none."""
    from mmtrain.api.local_cluster import resolve_cluster
    from mmtrain.api.plans import plan_for_started_ranks
    from mmtrain.costs.choose import costs_of_recipe
    from mmtrain.planning import load_plan
    from mmtrain.planning.artifact.plan_files import ranks_to_start
    from mmtrain.planning.whatif import plan_again
    from mmtrain.runtime.training.go_back import parse_go_back
    from mmtrain.runtime.training.train_request import TrainRequest

    recipe = run.loaded.recipe
    go_back = None if options.resume_from is None else parse_go_back(options.resume_from, options.skip_steps)
    ranks, hardware = resolve_cluster(recipe)
    costs_of_recipe(recipe, hardware)  # report a wrong cost table before ranks start
    if options.plan is not None:
        ranks = ranks_to_start(load_plan(options.plan), recipe, ranks)
    return TrainRequest(
        run.loaded,
        plan_for_started_ranks,
        plan_again,
        hardware,
        ranks,
        run.folder,
        plan_path=options.plan,
        resume=options.resume or go_back is not None,
        may_be_new=may_be_new,
        go_back=go_back,
        max_restarts=options.max_restarts,
        elastic=options.elastic,
        force_unlock=options.force_unlock,
    )
