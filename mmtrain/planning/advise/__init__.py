"""What the planner says beside the chosen plan: baselines, why others lost, and what would make a plan fit.

Start with `why_slower` for why a plan lost and `infeasible` for why no mesh is possible. `suggestions` finds the
smallest change with which a plan would fit, and `baselines` makes the plans of rules of thumb.
"""
