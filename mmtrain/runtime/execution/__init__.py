"""One rank executing its program: executor, broker, units, optimizer.

Start with `executor.Executor`.
"""
