"""Trace the steps that `train.trace_steps` names."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import cast

from mmtrain.durable_files import write_whole
from mmtrain.program import Collective, StageGraph, StepLoads, Timing
from mmtrain.program.ir.data_dependencies import participants
from mmtrain.program.trace.measured_timeline import MeasuredStep, measured_timeline, run_trace
from mmtrain.program.trace.step_record import StepRecord
from mmtrain.runtime.execution.activity import TRACING, Activity
from mmtrain.runtime.execution.executor import StepOutcome
from mmtrain.runtime.training.clock_offset import ClockOffset, measure_clock_offset
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook
from mmtrain.runtime.world import World


class RunTracer:
    """Gathers the ranks' records of a step on rank 0, which rewrites the trace file with every step added.

    `timing` gives the bytes that a step's collectives move; all times are measured.
    """

    def __init__(
        self, graph: StageGraph, world: World, timing: Callable[[StepLoads], Timing], plan_sha256: str, path: Path
    ) -> None:
        self._graph, self._world, self._timing = graph, world, timing
        self._plan_sha256, self._path = plan_sha256, path
        self._steps: list[MeasuredStep] = []
        self._clock_error_s = 0.0

    def add_step(self, step_number: int, outcome: StepOutcome) -> None:
        """Add a step (counted from 1) to the trace; every rank must call this. Raises OSError on rank 0."""
        assert outcome.loads is not None, "an outcome of a step that was run"
        offset = measure_clock_offset(self._world)
        gathered = self._world.gather_to_first((outcome.record.shifted(-offset.offset_s), offset))
        if not gathered:
            return
        parts = cast(list[tuple[StepRecord, ClockOffset]], gathered)
        records = {rank: record for rank, (record, _) in enumerate(parts)}
        timing = self._timing(outcome.loads)

        def bytes_moved(rank: int, action: Collective) -> int:
            return timing.collective(rank, action, participants(self._graph, rank, action)).nbytes

        tokens: defaultdict[str, list[int]] = defaultdict(list)
        for microbatch, load in outcome.loads.loads.items():
            tokens[microbatch.unit].append(load.tokens)
        start_s = min(record.start_s for record in records.values())
        timeline = measured_timeline(self._graph, records, bytes_moved)
        self._steps.append(MeasuredStep(step_number, start_s, timeline, tokens))
        self._clock_error_s = max(self._clock_error_s, 2 * max(offset.error_s for _, offset in parts))
        trace = run_trace(self._steps, self._plan_sha256, self._clock_error_s)
        write_whole(self._path, json.dumps(trace))


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
