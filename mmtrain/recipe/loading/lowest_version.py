"""The version of mmtrain that a recipe asks for."""

from packaging.version import InvalidVersion, Version

from mmtrain.errors import RecipeError
from mmtrain.recipe.raw_tree import Node, node_at
from mmtrain.version import __version__


def require_new_enough(root: Node) -> None:
    """Reject a file that states a newer version than this one, before its unknown settings hide the cause.

    Raises:
        RecipeError: with both versions.
    """
    stated = node_at(root, ["mmtrain"])
    if stated is None or stated.value is None:
        return
    try:
        lowest = Version(stated.value) if isinstance(stated.value, str) else None
    except InvalidVersion:
        lowest = None
    if lowest is None:
        raise RecipeError(
            f"mmtrain: found {stated.value!r}; allowed: the lowest version that reads the recipe, such as "
            f"{__version__}, as text ({stated.origin})"
        )
    if lowest > Version(__version__):
        raise RecipeError(
            f"{stated.origin}: the recipe asks for mmtrain {lowest} or later, and this is mmtrain {__version__}; "
            f"install it with `pip install 'mmtrain>={lowest}'`"
        )
