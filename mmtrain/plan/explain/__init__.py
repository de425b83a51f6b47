"""What the planner says about plans that lost, and problems without a plan; and the baselines it compares plans with.

Start with `why_slower` for why a plan lost and `infeasible` for why no mesh is possible. `suggestions` finds the
smallest change with which a plan would fit, and `baselines` makes the plans of rules of thumb.
"""
