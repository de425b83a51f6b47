"""Trace the steps that `train.trace_steps` names."""

from mmtrain.runtime.execution.activity import TRACING, Activity
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.run_tracer import RunTracer
from mmtrain.runtime.training.step_hook import StepContext, StepHook


class Tracing(StepHook):
    """Adds the step to the run's trace, if it is one of `steps` (from 1)."""

    def __init__(self, tracer: RunTracer, steps: frozenset[int], activity: Activity, records: RunRecords) -> None:
        self._tracer, self._steps = tracer, steps
        self._activity, self._records = activity, records

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        if ctx.step_number not in self._steps:
            return
        self._activity.start(TRACING)
        try:
            self._tracer.add_step(ctx.step_number, ctx.outcome)
        except OSError as error:  # a full disk, on the first rank
            self._records.note(f"step {ctx.step_number}: the trace could not be written: {error}")
