"""What a candidate costs: seconds, bytes and lower bounds, on the sampled global batches.

Start with `evaluate.evaluate`, which simulates one layout. `layer_costs.LayerCosts` prices layers,
`step_time_estimator` ranks thousands of layer partitions at once, and `memory_fit` decides what is recomputed.
"""
