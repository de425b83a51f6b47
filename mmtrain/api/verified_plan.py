"""Compare a recipe's plan with one process, for `mmtrain verify` and `mmtrain.verify`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.api.simulated_steps import index_and_plan
from mmtrain.recipe import Recipe, require_runnable
from mmtrain.recipe.checks.guest_checks import require_own_modules

if TYPE_CHECKING:
    from mmtrain.report.verification import Verification

MAX_PROCESSES = 64  # about 300 MB for each


def use_cpu() -> None:
    """Hide all GPUs from torch, which must not be loaded yet."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def verify_recipe(
    recipe: Recipe,
    plan_path: Path | None = None,
    num_steps: int = 2,
    whole_model: bool = False,
    max_processes: int = MAX_PROCESSES,
) -> "Verification":
    """Train a few steps by the plan and in one process; return what differs.

    Args:
        recipe: whose model is made narrow, unless `whole_model`.
        plan_path: of a plan file; by default a plan is made.
        num_steps: to compare; the first one that differs is the last.
        whole_model: whether the model keeps its own widths.
        max_processes: a plan with more ranks is cut to fewer replica groups.

    Raises:
        UserError: the recipe can be planned only or has a guest, the plan is of another, or it needs more processes.
        RunError: the plan cannot be run.
    """
    from mmtrain.planning.artifact.plan_files import with_planned_groups

    require_runnable(recipe, "verify")
    require_own_modules(recipe, "verify")
    index, plan = index_and_plan(recipe, plan_path)
    from mmtrain.runtime.verification.verify_plan import VerifyRequest, verify_plan

    planned = with_planned_groups(recipe, plan)
    return verify_plan(VerifyRequest(planned, plan, index, num_steps, whole_model, max_processes))
