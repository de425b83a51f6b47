"""Plans in the words of other trainers: `emit_plan.emit` writes the file that runs a plan's layout there.

A trainer is a module of this room. What it accepts, with names, types and allowed values of one version of it, is data
in `accepted`, which `scripts/trainer_settings.py` reads from its public source.
"""
