"""Running a plan: launching, process groups, units, brokers, the executor, the optimizer, saving, evaluation."""

__all__: list[str] = []
