"""A training run: the loop over steps, metrics, checkpoints and the run folder.

Start with `train.run`.
"""
