"""Groups of one step that are alike, so that ranks side by side finish together (`grouping: matched`).

`step_matching` chooses the samples of a step, `regroup_step` groups them anew for the replicas of a plan.
"""
