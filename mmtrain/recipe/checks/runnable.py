"""Which recipes can be run, and which can only be planned for."""

from collections.abc import Iterator

from mmtrain.errors import RecipeError
from mmtrain.recipe.settings.schema import Recipe


def require_runnable(recipe: Recipe, command: str) -> None:
    """Raise RecipeError if `command` cannot run this recipe; the message names every setting that prevents it."""
    reasons = list(_plan_only_settings(recipe))
    if reasons:
        raise RecipeError(
            f"{command} cannot run this recipe, which is for `mmtrain plan`, `simulate` and `report` only:\n  "
            + "\n  ".join(reasons)
        )


def is_runnable(recipe: Recipe) -> bool:
    """Return whether this recipe can be run; if not, it can only be planned for."""
    return not any(_plan_only_settings(recipe))


def _plan_only_settings(recipe: Recipe) -> Iterator[str]:
    for i, source in enumerate(recipe.data.sources):
        if source.states_lengths:
            yield f"data.sources.{i}: {source.path} holds lengths only; name a file of samples, and set data.tokenizer"
