"""A training run: what happens before the first step, the loop over steps, and the hooks around each step.

Start with `train.start_training`; `loop.Loop` trains, `hooks` do everything else.
"""
