"""What the planner says about plans that lost, plans by rules of thumb, and problems that have no plan.

Start with `why_slower` for a loser's reason and `infeasible` for why no mesh exists; `suggestions` finds the smallest
change that would fit, and `baselines` makes the plans that rules of thumb make.
"""
