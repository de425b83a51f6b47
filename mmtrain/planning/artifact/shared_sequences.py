"""Reject plans in which ranks share sequences in a way that the model does not allow."""

from mmtrain.errors import PlanError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.program.ir.graph import LLM
from mmtrain.recipe.checks.context_checks import check_context_parallelism
from mmtrain.recipe.settings.parallel_settings import LlmParallel
from mmtrain.recipe.settings.schema import Recipe


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
