"""Read a plan file, and reject one that belongs to another recipe, cluster or version, or does not suit the model."""

from pathlib import Path

from pydantic import ValidationError

from mmtrain.costs.find_hardware import is_same_hardware
from mmtrain.errors import PlanError
from mmtrain.foreign_json import parse_json
from mmtrain.planning.artifact.plan import PLAN_VERSION, Plan
from mmtrain.program.ir.graph import LLM
from mmtrain.recipe.checks.context_checks import check_context_parallelism
from mmtrain.recipe.loading.recipe_loader import plan_settings, recipe_fingerprint
from mmtrain.recipe.settings.parallel_settings import LlmParallel
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.written_by import WRITTEN_BY, describe_other_format, describe_writer

MAX_SHOWN_SETTINGS = 5  # in a message
REPLAN_HINT = "make a new one with `mmtrain plan`"


def load_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        PlanError: the file is missing, damaged, or of another format; then the message has the version that wrote it.
    """
    try:
        raw = parse_json(path.read_bytes())
    except OSError as error:
        raise PlanError(f"{path}: cannot read the plan ({error.strerror}); {REPLAN_HINT}") from error
    except ValueError as error:
        raise PlanError(f"{path}: not a plan file, since it is not JSON ({error}); {REPLAN_HINT}") from error
    if not isinstance(raw, dict):
        raise PlanError(f"{path}: not a plan file, since it is not a JSON object; {REPLAN_HINT}")
    writer = raw.get(WRITTEN_BY)
    if raw.get("version") != PLAN_VERSION:
        problem = describe_other_format(raw.get("version"), writer, PLAN_VERSION)
        raise PlanError(f"{path}: the plan file {problem}; {REPLAN_HINT}")
    try:
        return Plan.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise PlanError(f"{path}: damaged plan file{describe_writer(writer)}: {problems}; {REPLAN_HINT}") from error


def ranks_to_start(plan: Plan, recipe: Recipe, available: int) -> int:
    """Return how many ranks to start: the plan's number where the recipe leaves it open or allows fewer.

    Otherwise it is the number of ranks of the recipe's cluster within `parallel.max_gpus`, which is `available`.
    """
    may_use_fewer = recipe.parallel.max_gpus is not None and plan.world_size <= available
    return plan.world_size if recipe.cluster.ranks is None or may_use_fewer else available


def require_match(plan: Plan, recipe: Recipe, world_size: int, hardware: str) -> None:
    """Reject a plan that was made for something else.

    Raises:
        PlanError: with everything that differs.
    """
    differs = []
    recipe_sha256 = recipe_fingerprint(recipe)
    if plan.recipe_sha256 != recipe_sha256:
        changed = _changed_settings(plan, recipe) or "model, data lengths, constraints or batch"
        differs.append(
            f"the recipe: {changed} changed since it was planned "
            f"(plan {plan.recipe_sha256[:12]}, now {recipe_sha256[:12]})"
        )
    if recipe.states_groups and plan.num_groups != recipe.train.num_groups:
        differs.append(f"the groups of a step: plan {plan.num_groups}, now {recipe.train.num_groups}")
    if plan.world_size != world_size:
        differs.append(
            f"the number of ranks: plan {plan.world_size}, now {world_size}; start {plan.world_size} (a run that is "
            "resumed with --elastic makes another plan)"
        )
    if not is_same_hardware(plan.hardware, hardware):
        differs.append(f"the hardware: plan `{plan.hardware}`, now `{hardware}`")
    if differs:
        listed = "\n  ".join(differs)
        raise PlanError(f"the plan does not match this run:\n  {listed}\nUse its own, or {REPLAN_HINT}.")


def with_planned_groups(recipe: Recipe, plan: Plan) -> Recipe:
    """Return the recipe with the plan's number and size of groups, where the recipe leaves them to data or planner.

    Raises:
        PlanError: the plan does not state the size.
    """
    if recipe.states_groups:
        return recipe
    size = plan.data.seq_len if recipe.data.seq_len == "auto" else recipe.data.group_tokens
    if size is None:
        raise PlanError(f"data.seq_len: auto, and the plan does not state a size of groups; {REPLAN_HINT}")
    return recipe.with_groups(plan.num_groups, size)


def _changed_settings(plan: Plan, recipe: Recipe) -> str:
    """Write `train.global_batch (plan 8, now 16)`, the first few; empty for a plan that does not record settings."""
    if not plan.settings:
        return ""
    now = plan_settings(recipe)
    keys = [key for key in dict.fromkeys((*plan.settings, *now)) if plan.settings.get(key) != now.get(key)]
    shown = [f"{key} (plan {plan.settings.get(key)}, now {now.get(key)})" for key in keys[:MAX_SHOWN_SETTINGS]]
    more = len(keys) - len(shown)
    return ", ".join(shown) + (f" and {more} more settings" if more else "")


def require_shareable(plan: Plan, recipe: Recipe) -> None:
    """Hold a plan to what a recipe with its degrees would have to fulfil.

    Raises:
        PlanError: a unit other than the LLM shares sequences, or heads, masks or placement do not allow it.
    """
    problems = [
        f"units.{name}.cp: found {unit.cp}, allowed: 1 (only the LLM shares sequences)"
        for name, unit in plan.units.items()
        if unit.cp > 1 and name != LLM
    ]
    llm = plan.units.get(LLM)
    if llm is not None and llm.cp > 1:
        degrees = LlmParallel(tp=llm.tp, cp=llm.cp, cp_method=llm.cp_method or "auto")
        parallel = recipe.parallel.model_copy(update={"llm": degrees, "placement": plan.placement})
        checked = recipe.model_copy(update={"parallel": parallel})
        problems += [
            f"{'.'.join(map(str, problem.where))}: {problem.text}" for problem in check_context_parallelism(checked)
        ]
    if problems:
        listed = "\n  ".join(problems)
        raise PlanError(f"the plan does not suit the model:\n  {listed}\nMake a new one with `mmtrain plan`.")
