"""Reading a plan file back, and refusing one that belongs to another recipe, cluster or version."""

import json
from pathlib import Path

from pydantic import ValidationError

from mmtrain.errors import PlanError
from mmtrain.plan.artifact.plan import PLAN_VERSION, Plan
from mmtrain.recipe.schema import Recipe

REPLAN_HINT = "make a new one with `mmtrain plan`"


def load_plan(path: Path) -> Plan:
    """Read a plan; PlanError if the file is missing, damaged, or of another version."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: cannot read the plan ({error.strerror}); {REPLAN_HINT}") from error
    except ValueError as error:
        raise PlanError(f"{path}: not a plan file, it is no JSON ({error}); {REPLAN_HINT}") from error
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != PLAN_VERSION:
        raise PlanError(
            f"{path}: version {version!r} of the plan file, this mmtrain reads {PLAN_VERSION}; {REPLAN_HINT}"
        )
    try:
        return Plan.model_validate(raw)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise PlanError(f"{path}: damaged plan file: {found}; {REPLAN_HINT}") from error


def ranks_to_start(plan: Plan, recipe: Recipe, available: int) -> int:
    """Ranks of a run of the plan: its own number, where the recipe leaves that open or lets plans use fewer.

    available: ranks of the recipe's cluster, within `parallel.max_gpus`.
    """
    may_use_fewer = recipe.parallel.max_gpus is not None and plan.world_size <= available
    return plan.world_size if recipe.cluster.ranks is None or may_use_fewer else available


def require_match(plan: Plan, recipe_sha256: str, world_size: int, hardware: str) -> None:
    """Refuse a plan made for something else; PlanError names everything that differs."""
    differs = []
    if plan.recipe_sha256 != recipe_sha256:
        differs.append(
            "the recipe: model, data lengths, constraints or batch changed since it was planned "
            f"(plan {plan.recipe_sha256[:12]}, now {recipe_sha256[:12]})"
        )
    if plan.world_size != world_size:
        differs.append(
            f"the number of ranks: plan {plan.world_size}, now {world_size}; {plan.world_size} have to be started"
        )
    if plan.hardware != hardware:
        differs.append(f"the hardware: plan `{plan.hardware}`, now `{hardware}`")
    if differs:
        listed = "\n  ".join(differs)
        raise PlanError(f"the plan does not match this run:\n  {listed}\nUse its own, or {REPLAN_HINT}.")
