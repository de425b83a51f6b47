"""Models: families as shapes (no torch), and the torch modules that compute their stages.

This package's front exports only the shapes, because planning must not wait for torch: import
`mmtrain.models.build_stage` for `build_stage`, `mmtrain.models.stage_inputs` for what stages compute on.
"""

from mmtrain.models.model_shape import LayerShape, ModelEdge, ModelShape, UnitShape, build_model_shape, padded_vocab

__all__ = ["LayerShape", "ModelEdge", "ModelShape", "UnitShape", "build_model_shape", "padded_vocab"]
