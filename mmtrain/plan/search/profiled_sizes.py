"""Which tensor-parallel sizes are worth measuring before a recipe is planned."""

from collections.abc import Sequence

from mmtrain.costs import preset
from mmtrain.errors import UserError
from mmtrain.models.model_shape import build_model_shape
from mmtrain.plan.search.constraints import unit_choices
from mmtrain.recipe.schema import Recipe


def sizes_to_measure(
    recipe: Recipe, ranks: int, only: Sequence[str] = (), wanted: str | None = None
) -> dict[str, tuple[int, ...]]:
    """Tensor-parallel sizes of each unit, or of the units `only`, that the recipe allows on `ranks` local ranks.

    wanted: some of them, like `1,2`. Raises UserError for units the model lacks and sizes that are not possible.
    """
    hardware = preset(recipe.cluster.hardware) if recipe.cluster.hardware != "auto" else None
    per_node = recipe.cluster.ranks_per_node or (hardware.ranks_per_node if hardware else ranks)
    model = build_model_shape(recipe)
    shapes = [unit.name for unit in model.units if unit.kind == "generator"]  # there are no modules to measure
    choices = {name: c for name, c in unit_choices(recipe, model, per_node).items() if name not in shapes}
    unknown = [name for name in only if name not in choices]
    if unknown:
        raise UserError(f"--only {unknown[0]}: no such unit; allowed: {', '.join(choices)}")
    possible = {
        name: tuple(size for size in choice.tp if size <= ranks)
        for name, choice in choices.items()
        if not only or name in only
    }
    if wanted is None:
        return possible
    try:
        sizes = {int(part) for part in wanted.split(",")}
    except ValueError:
        raise UserError(f"--tp {wanted}: whole numbers with commas are needed, like 1,2") from None
    chosen = {name: tuple(sorted(sizes & set(found))) for name, found in possible.items()}
    if not any(chosen.values()):
        allowed = "; ".join(f"{name}: {', '.join(map(str, found))}" for name, found in possible.items())
        raise UserError(f"--tp {wanted}: not possible on {ranks} ranks; allowed: {allowed}")
    return chosen
