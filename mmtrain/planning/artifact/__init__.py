"""What a plan is, and everything that follows from it without a search.

The runtime reads plans through this package alone. Start with `plan.Plan`, the saved file. `plan_graph.stage_graph`
turns it into the stage graph from which programs are built, `balancing_targets` into what the loader balances for.
"""
