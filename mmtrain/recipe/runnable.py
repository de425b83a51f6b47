"""What a recipe may hold that can be planned for, and cannot be run."""

from collections.abc import Iterator

from mmtrain.errors import RecipeError
from mmtrain.recipe.schema import Recipe


def require_runnable(recipe: Recipe, command: str) -> None:
    """Raise RecipeError, naming everything that `command` cannot do with this recipe and `mmtrain plan` can."""
    reasons = list(_only_planned(recipe))
    if reasons:
        raise RecipeError(
            f"{command} cannot run this recipe, which is for `mmtrain plan`, `simulate` and `report` alone:\n  "
            + "\n  ".join(reasons)
        )


def is_runnable(recipe: Recipe) -> bool:
    """Whether this recipe can be run, not only planned for."""
    return not any(_only_planned(recipe))


def _only_planned(recipe: Recipe) -> Iterator[str]:
    if recipe.model.generator is not None:
        yield "model.generator: a generator is only a shape so far; remove it"
    for i, source in enumerate(recipe.data.sources):
        if source.states_lengths:
            yield f"data.sources.{i}: {source.path} states lengths; name a file of samples, and data.tokenizer"
