"""What a candidate costs in seconds and bytes, by lower bounds, estimates and simulation on the sampled batches.

Start with `evaluator.Evaluator`. `step_time_estimator` compares thousands of layer partitions at once, `memory_fit`
decides what is recomputed, and `layout_simulation` simulates one layout.
"""
