"""One rank executes its program: the executor runs actions in order, units compute, the broker moves data.

`rank_context.build_rank_context` builds all of it from a plan. Start with `executor.Executor`.
"""
