"""Verify that a plan computes what one process computes: the same losses and gradients, for the user's own recipe.

`verify_plan` starts the ranks and collects what they computed, `one_process` computes the same without a plan,
`compare_gradients` finds what differs. `shrink_model` makes a model and `fewer_replicas` a plan of many GPUs small
enough to be tried here.

Read `verify_plan.verify_plan` first.
"""
