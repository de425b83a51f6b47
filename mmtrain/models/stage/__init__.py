"""Stages as torch modules: consecutive layers of one unit, and the input of a microbatch that they read.

Start with `stage_module.StageModule` and `stage_inputs`. `generation` runs a stage for text that is generated,
`piecewise` a block in pieces.
"""
