"""Shapes of models without torch: what the planner, the costs and the program format know of a model.

Start with `model_shape.build_model_shape`; `layer_shape.LayerShape` is one layer.
"""
