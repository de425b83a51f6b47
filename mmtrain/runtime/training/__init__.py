"""A training run: what happens before the first step, the loop over steps, and the hooks beside it.

Start with `train.run`; `loop.Loop` trains, `hooks` do everything else.
"""
