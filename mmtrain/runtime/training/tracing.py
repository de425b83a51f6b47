"""Traces: the steps that `train.trace` names, as all ranks saw them, in one file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

from mmtrain.program import Collective, StageGraph, StepLoads, Timing
from mmtrain.program.ir.data_dependencies import participants
from mmtrain.program.trace.measured_timeline import MeasuredStep, measured_timeline, run_trace
from mmtrain.program.trace.step_record import StepRecord
from mmtrain.runtime.execution.executor import StepOutcome
from mmtrain.runtime.training.clock_offset import ClockOffset, clock_offset
from mmtrain.runtime.world import World


class RunTracer:
    """Brings the ranks' records of a step to rank 0, which writes `path` anew with every recorded step.

    `timing` says what collectives of a step move; how long things took is measured.
    """

    def __init__(
        self,
        steps: frozenset[int],
        graph: StageGraph,
        world: World,
        timing: Callable[[StepLoads], Timing],
        plan_sha256: str,
        path: Path,
    ) -> None:
        self._steps, self._graph, self._world, self._timing = steps, graph, world, timing
        self._plan_sha256, self._path = plan_sha256, path
        self._taken: list[MeasuredStep] = []
        self._clock_error_s = 0.0

    def wants(self, step: int) -> bool:
        """Whether the step (counted from 1) is to be recorded."""
        return step in self._steps

    def take(self, step: int, outcome: StepOutcome) -> None:
        """Add a step to the trace; every rank must call this."""
        record, loads = outcome.record, outcome.loads
        assert loads is not None, "an outcome of a step that was run"
        offset = clock_offset(self._world)
        found = self._world.gather_to_first((record.shifted(-offset.offset_s), offset))
        if not found:
            return
        parts = cast(list[tuple[StepRecord, ClockOffset]], found)
        records = {rank: record for rank, (record, _) in enumerate(parts)}
        timing = self._timing(loads)

        def bytes_moved(rank: int, action: Collective) -> int:
            return timing.collective(rank, action, participants(self._graph, rank, action)).nbytes

        begin = min(record.start_s for record in records.values())
        self._taken.append(MeasuredStep(step, begin, measured_timeline(self._graph, records, bytes_moved)))
        self._clock_error_s = max(self._clock_error_s, 2 * max(offset.error_s for _, offset in parts))
        trace = run_trace(self._taken, self._plan_sha256, self._clock_error_s)
        self._path.write_text(json.dumps(trace), encoding="utf-8")
