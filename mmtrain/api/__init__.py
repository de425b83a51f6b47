"""What the command line does, as functions that return objects: whoever calls them gets the same plans and steps.

Start with `plans.make_plan` for plans and `simulated_steps.simulate_steps` for steps of them. The command line imports
these modules when it runs them, so that its help stays fast.
"""

__all__: list[str] = []
