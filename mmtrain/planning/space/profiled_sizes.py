"""The tensor-parallel sizes that are worth measuring before a recipe is planned."""

from collections.abc import Sequence

from mmtrain.costs import preset
from mmtrain.errors import UserError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.space.constraints import unit_choices
from mmtrain.recipe.settings.schema import Recipe


def sizes_to_measure(
    recipe: Recipe, ranks: int, only: Sequence[str] = (), tp_option: str | None = None
) -> dict[str, tuple[int, ...]]:
    """Return by unit the tensor-parallel sizes that the recipe allows on `ranks` local ranks.

    Args:
        recipe: what will be planned.
        ranks: ranks of this machine.
        only: names of units; all by default.
        tp_option: the sizes to measure, like `1,2`; all that are possible by default.

    Raises:
        UserError: a unit does not exist, or no size in `tp_option` is possible.
    """
    hardware = preset(recipe.cluster.hardware) if recipe.cluster.hardware != "auto" else None
    ranks_per_node = recipe.cluster.ranks_per_node or (hardware.ranks_per_node if hardware else ranks)
    model = build_model_shape(recipe)
    choices = unit_choices(recipe, model, ranks_per_node)
    unknown = [unit for unit in only if unit not in choices]
    if unknown:
        raise UserError(f"--only {unknown[0]}: no such unit; allowed: {', '.join(choices)}")
    possible = {
        unit: tuple(tp for tp in choice.tp if tp <= ranks)
        for unit, choice in choices.items()
        if not only or unit in only
    }
    return possible if tp_option is None else _restrict(possible, tp_option, ranks)


def _restrict(possible: dict[str, tuple[int, ...]], tp_option: str, ranks: int) -> dict[str, tuple[int, ...]]:
    """Keep the sizes that `--tp` names."""
    try:
        sizes = {int(part) for part in tp_option.split(",")}
    except ValueError:
        raise UserError(f"--tp {tp_option}: whole numbers with commas are needed, like 1,2") from None
    chosen = {unit: tuple(sorted(sizes & set(of_unit))) for unit, of_unit in possible.items()}
    if not any(chosen.values()):
        allowed = "; ".join(f"{unit}: {', '.join(map(str, of_unit))}" for unit, of_unit in possible.items())
        raise UserError(f"--tp {tp_option}: not possible on {ranks} ranks; allowed: {allowed}")
    return chosen
