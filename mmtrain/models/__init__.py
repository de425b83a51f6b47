"""Models: shapes without torch for the planner, and the torch modules that compute their stages.

`build_model_shape` describes a recipe's model. This package exports only the shapes, because planning must not wait
for torch. The torch side starts at `mmtrain.models.build_stage`; `stage_inputs` holds the input of a stage.
"""

from mmtrain.models.shapes.model_shape import (
    LayerShape,
    ModelEdge,
    ModelShape,
    UnitShape,
    build_model_shape,
    padded_vocab,
)

__all__ = ["LayerShape", "ModelEdge", "ModelShape", "UnitShape", "build_model_shape", "padded_vocab"]
