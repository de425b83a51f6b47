"""Execute plans: launch ranks, train, evaluate, profile.

From the bottom up: `execution` runs one rank's program; `resilience` starts ranks, detects failures and explains them;
`evaluation` and `profiling` measure models and machines; `training` is a whole run. Start with
`training.train.start_training`, then read `training.loop` and `execution.executor`.
"""

__all__: list[str] = []
