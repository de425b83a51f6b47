"""What a step does apart from training, one concern per module.

`../open_loop.build_hooks` lists all hooks in the order in which they run; read `../step_hook.py` first.
"""
