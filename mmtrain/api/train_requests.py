"""What to train for a recipe, one run after another: the command and `mmtrain.train` start exactly these."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.api.stage_runs import StageRun, require_one_stage, stage_runs
from mmtrain.errors import UserError
from mmtrain.recipe import WrittenRecipe, require_runnable

if TYPE_CHECKING:
    from mmtrain.runtime.training.train_request import TrainRequest


@dataclass(frozen=True)
class TrainOptions:
    """What the caller says about every run that is started; `mmtrain train --help` explains each."""

    plan: Path | None = None
    resume: bool = False
    resume_from: str | None = None
    skip_steps: str | None = None
    max_restarts: int = 0
    elastic: bool = False
    force_unlock: bool = False
    resume_command: str | None = None  # what continues the run, for messages; None: not started by a command


def runs_to_train(written: WrittenRecipe, run_dir: Path | None, options: TrainOptions) -> list[StageRun]:
    """Load the recipe of every run, and hold the options to them, before anything slow is imported.

    Raises:
        UserError: options exclude each other, or are for one stage of several.
        RecipeError: with all problems of the recipe, or a recipe that can be planned only.
    """
    if options.skip_steps is not None and options.resume_from is None:
        raise UserError("--skip-steps: needs --resume-from, which says where to go back to")
    single = "--plan" if options.plan is not None else "--resume-from" if options.resume_from is not None else None
    require_one_stage(written, single)
    runs = stage_runs(written, run_dir)
    for stage in runs:
        require_runnable(stage.loaded.recipe, "train")
    return runs


def train_requests(
    runs: list[StageRun], options: TrainOptions, announce: Callable[[str], object]
) -> "Iterator[TrainRequest]":
    """Yield what to train, one run after another; the next one when the one before has ended.

    In a recipe with stages that goes on, pass over those that are done. All ranks of a launcher decide alike: a stage
    starts and ends for all of them together. announce: hears on the first rank which stage comes.

    Raises:
        UserError: a folder holds a run already, or a plan does not match.
    """
    from mmtrain.checkpoint import find
    from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, read_run_state
    from mmtrain.runtime.training.train import require_started_ranks
    from mmtrain.runtime.world import find_address

    if runs[0].stage is None:
        yield _request(runs[0], options, may_be_new=False)
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
            announce(f"stage {run.stage}: {done}in {run.folder}")
        if not is_done:
            yield _request(run, options, may_be_new=bool(held) or is_restart or run is not runs[0])


def _request(run: StageRun, options: TrainOptions, may_be_new: bool) -> "TrainRequest":
    """Return what the runtime is to train; `may_be_new`: with `resume`, start the run if there is none."""
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
        resume_command=options.resume_command,
    )
