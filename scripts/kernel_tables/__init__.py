"""Bubble scheduling on fixed tables of kernel times, as the Optimus paper evaluates it (arXiv 2408.03505).

`scripts.bench_colocated` and the tests use it; recipes do not. `kernel_table` reads a table, `interleaved_timeline`
lays out the LLM alone, `encoder_search` searches encoder plans and shares of microbatches. Kernels are placed by the
planner's own `mmtrain.planning.colocated.bubble_schedule`.
"""
