"""Go on with another plan in the same processes, from the checkpoint that the run has just saved."""

import gc
import sys
from pathlib import Path

import torch

from mmtrain.checkpoint.folders import step_of
from mmtrain.plan.artifact.plan import Plan
from mmtrain.runtime.training.choose_plan import ChosenPlan
from mmtrain.runtime.training.replanned_run import keep_switch
from mmtrain.runtime.training.run_steps import RankSession
from mmtrain.runtime.training.standby_plans import save_standby_plan


def switch_plan(session: RankSession, before: Plan, plan: Plan, checkpoint: Path) -> ChosenPlan:
    """Make `plan` the plan of the run, and return it on all ranks; the one before if the disk cannot hold it.

    Nothing of the plan before is in use any more. Its memory is given back before the new plan is built.

    Raises FolderTaken, on all ranks, if another run owns the folder now.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    request = session.request

    def keep() -> bool:
        session.claim.require()
        try:
            keep_switch(request.run_dir, before, plan, step_of(checkpoint) or 0)
            if request.elastic:
                save_standby_plan(request.run_dir, plan)
        except OSError as error:
            print(f"mmtrain: the run goes on with its plan, since no other can be kept: {error}", file=sys.stderr)
            return False
        return True

    is_kept = session.patient_world.on_first(keep)
    return ChosenPlan(plan, is_switched_to=True) if is_kept else ChosenPlan(before)
