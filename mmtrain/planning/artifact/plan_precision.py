"""Decide the precision of a run from its plan."""

from mmtrain.costs import machine_for, precision_for
from mmtrain.costs.hardware import Precision
from mmtrain.planning.artifact.plan import Plan
from mmtrain.recipe.settings.schema import Recipe


def plan_precision(plan: Plan, recipe: Recipe) -> Precision:
    """Return the precision that the plan states, which the runtime must train in.

    A plan file of an older version states none: there the recipe and the plan's hardware decide, as they did when the
    plan was made.
    """
    if plan.precision is not None:
        return plan.precision
    return precision_for(recipe, machine_for(recipe, plan.hardware))
