"""Whether activation functions run again in backward, which saves memory where layers would be recomputed."""

from dataclasses import replace

from mmtrain.models.shapes.model_shape import with_recomputed_activations
from mmtrain.planning.space.problem import PlanningProblem


def with_activations_again(problem: PlanningProblem) -> PlanningProblem | None:
    """Return the problem with activation functions that run again in all units for which the recipe allows it.

    None where that changes nothing.
    """
    settings = {
        unit.name: problem.recipe.parallel.of(unit.name).recompute_activation_function
        for unit in problem.shape.units
        if unit.kind != "generator"
    }
    if "auto" not in settings.values():
        return None
    units = [name for name, setting in settings.items() if setting]
    shape = with_recomputed_activations(problem.shape, units)
    return None if shape == problem.shape else replace(problem, shape=shape)
