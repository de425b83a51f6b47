"""Go on with another plan in the same processes, from the checkpoint that the run has just saved.

Nothing does so by itself yet. A run whose ranks stay alive while others go can use it in the place of a restart.
"""

import gc
import sys
from pathlib import Path

import torch

from mmtrain.checkpoint.folders import step_of
from mmtrain.durable_files import write_whole
from mmtrain.errors import PlanError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.runtime.resilience.out_of_memory import smallest_device_memory
from mmtrain.runtime.run_folder import PLAN_FILE, REPLANNED_FOLDER
from mmtrain.runtime.training.choose_plan import ChosenPlan, require_fit
from mmtrain.runtime.training.rank_session import RankSession
from mmtrain.runtime.training.standby_plans import save_standby_plan


def switch_plan(session: RankSession, before: Plan, plan: Plan, checkpoint: Path) -> ChosenPlan:
    """Make `plan` the plan of the run, and return it on all ranks; the one before if it cannot be.

    That is so if it does not fit into what the devices have now, which may be less than when it was made, or if the
    disk cannot hold it. Nothing of the plan before is in use any more. Its memory is given back before a plan is built.
    `train_on_plan` then trains on it, in a session that resumes.

    Raises FolderTaken, on all ranks, if another run owns the folder now.
    """
    free_unused_memory()
    request = session.request
    device = smallest_device_memory(request.recipe, plan.hardware, session.patient_world)

    def keep() -> bool:
        session.claim.require()
        try:
            require_fit(request.recipe, plan, device)
        except PlanError as error:
            print(
                f"mmtrain: the run goes on with its present plan, since the other one is refused: {error}",
                file=sys.stderr,
            )
            return False
        try:
            keep_switch(request.run_dir, before, plan, step_of(checkpoint) or 0)
            if request.elastic:
                save_standby_plan(request.run_dir, plan)
        except OSError as error:
            print(f"mmtrain: the run goes on with its plan, since no other can be kept: {error}", file=sys.stderr)
            return False
        return True

    return ChosenPlan(plan if session.patient_world.on_first(keep) else before)


def free_unused_memory() -> None:
    """Give back the memory of a model that is not in use any more, also that of a GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def keep_switch(run_dir: Path, before: Plan, plan: Plan, step: int) -> None:
    """Make `plan` the plan of the run after `step` steps, and keep the one before.

    The plan's file is replaced last: a run that is killed in between resumes on the plan before. Raises OSError.
    """
    folder = run_dir / REPLANNED_FOLDER
    folder.mkdir(exist_ok=True)
    write_whole(folder / f"plan-until-step-{step:08d}.json", before.file_text())
    write_whole(run_dir / PLAN_FILE, plan.file_text())
