"""Read from the recipe how a unit's optimizer differs from that of the run: rates, decay, and what Muon trains."""

import torch

from mmtrain.models.optim.parameter_specs import UnitRates
from mmtrain.models.shapes.unit_shape import UnitShape
from mmtrain.models.shapes.weight_matrices import weight_matrices
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.modalities import GENERATOR


def unit_rates(recipe: Recipe, unit: UnitShape, dtype: torch.dtype) -> UnitRates:
    """Return the rates of a unit whose weights are computed with in `dtype`.

    Layers of a generator learn alike: those of a U-Net have no order of depth.
    """
    settings, optimizer = recipe.model.unit(unit.name), recipe.train.optimizer
    matrices = {}
    if optimizer.kind == "muon":
        matrices = {
            f"{unit.name}.layers.{index}.{linear}.weight": of_weight
            for index, layer in enumerate(unit.layers)
            for linear, of_weight in weight_matrices(layer).items()
        }
    return UnitRates(
        settings.lr_scale,
        weight_decay=optimizer.weight_decay if settings.weight_decay is None else settings.weight_decay,
        layer_decay=1.0 if unit.name == GENERATOR else optimizer.layer_lr_decay,
        num_blocks=len(unit.layers) - 2,
        matrices=matrices,
        matrix_dtype=dtype,
    )
