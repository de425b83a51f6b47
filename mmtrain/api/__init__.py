"""What the command line does, as functions that return objects: whoever calls them gets the same plans and steps.

Start with `local_cluster.plan_here` for plans and `simulated_steps` for steps of them. Modules import what they need
when they run, so that the command line stays fast.
"""

__all__: list[str] = []
