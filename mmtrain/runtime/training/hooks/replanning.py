"""Keep the costs that a run records, and plan again when they are other than the plan's."""

import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from mmtrain.costs import CostTable
from mmtrain.costs.recorded_costs import RECORDED_COSTS_FILE, RecordedRatios
from mmtrain.durable_files import disk_errors_named, set_aside, write_whole
from mmtrain.errors import PlanError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_change import plan_layout, present_step_s
from mmtrain.program import Recv, Send, Timing
from mmtrain.program.trace.step_record import MessageRecord, StepRecord
from mmtrain.report.plain_text import seconds_text
from mmtrain.runtime.execution.activity import TRACING, Activity
from mmtrain.runtime.run_folder import FASTER_PLAN_FILE
from mmtrain.runtime.training.background_planning import BackgroundPlanning, PlanningOutcome
from mmtrain.runtime.training.clock_offset import measure_clock_offset
from mmtrain.runtime.training.cost_drift import CostDrift
from mmtrain.runtime.training.run_records import RunRecords
from mmtrain.runtime.training.step_hook import StepContext, StepHook
from mmtrain.runtime.training.step_metrics import StepMetricsReducer
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import World

# Of the present plan's step time. A restored checkpoint and rebuilt stages must pay off, and predictions of two plans
# with the same costs differ from runs by a few percent of each other (docs/benchmarks.md, Predictions).
MIN_GAIN = 0.03


class PlanWithCosts(Protocol):
    """Plans again as `planning.whatif.plan_again` does, for everything but the costs given; it can be pickled."""

    def __call__(self, *, costs: Path) -> Plan:
        """Return the fastest plan by a cost table, with the present one as its first alternative."""
        ...


class Replanning(StepHook):
    """Writes the recorded costs, makes a plan with them in the background, and says what it would gain.

    After the last step it writes them in any case, for later plans (`cluster.costs`).
    """

    def __init__(
        self,
        plan_with_costs: PlanWithCosts,
        reducer: StepMetricsReducer,
        world: World,
        activity: Activity,
        records: RunRecords,
    ) -> None:
        self._plan_with_costs = plan_with_costs
        self._reducer, self._world, self._activity, self._records = reducer, world, activity, records
        self._planning: BackgroundPlanning | None = None

    def close(self) -> None:
        """See `StepHook`."""
        if self._planning is not None:
            self._planning.close()
            self._planning = None

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`."""
        if ctx.reduction.cost_drift is not None:
            self._act_on_drift(ctx, ctx.reduction.cost_drift)
        ratios = self._reducer.recorded_ratios() if ctx.is_last else None
        if ratios is not None:
            table_text = self._corrected_table(ctx, ratios)
            if self._world.is_first:
                self._records.try_write(RECORDED_COSTS_FILE, lambda: write_whole(self._path, f"{table_text}\n"))
        outcome = self._planning.poll() if self._planning is not None else None
        if outcome is not None:
            self.close()
            self._handle(outcome)

    @property
    def _path(self) -> Path:
        return self._records.run_dir / RECORDED_COSTS_FILE

    def _corrected_table(self, ctx: StepContext, ratios: RecordedRatios) -> str:
        """Return on all ranks the text of the costs as recorded; messages are those of this step."""
        self._activity.start(TRACING)
        loads = ctx.outcome.loads
        assert loads is not None, "an outcome of a step that was run"
        messages = measure_message_ratio(self._world, ctx.outcome.record, self._reducer.timing(loads))
        all_ratios, run = replace(ratios, messages=messages), str(self._records.run_dir)
        return self._world.on_first(
            lambda: self._reducer.corrected_table(all_ratios, loads, run).model_dump_json(indent=1)
        )

    def _act_on_drift(self, ctx: StepContext, drift: CostDrift) -> None:
        """Predict steps with the recorded costs from now on, on all ranks, and start to plan with them."""
        table_text = self._corrected_table(ctx, drift.ratios)
        self._reducer.use_costs(CostTable.model_validate_json(table_text))
        self._records.note(
            f"step {ctx.step_number}: for {drift.num_steps} steps, actions took other times than the plan's costs say "
            f"({drift.to_text()}). {self._path} holds the recorded costs; another plan is made with them beside the "
            "training"
        )
        if not self._world.is_first:
            return
        try:
            write_whole(self._path, f"{table_text}\n")
        except OSError as error:
            self._records.note(f"{self._path} could not be written, so no other plan is made: {error}")
            return
        self.plan_with_recorded_costs()

    def plan_with_recorded_costs(self) -> None:
        """Start to plan in the background with the costs in the run's folder; on the first rank only.

        A run that is resumed does so too, since it may have ended before such a plan was made.
        """
        self.close()
        self._planning = BackgroundPlanning(partial(self._plan_with_costs, costs=self._path))

    def _handle(self, outcome: PlanningOutcome) -> None:
        """Say what the new plan gains, if that is enough to act on."""
        plan = outcome.plan
        if plan is None:
            self._records.note(f"no other plan was made with the recorded costs: {outcome.reason}")
            return
        present_s, new_s = present_step_s(plan), plan.predicted.step_time_s
        if new_s > present_s * (1 - MIN_GAIN):
            return
        text = (
            f"with the recorded costs, a step takes {seconds_text(present_s)} on this plan and {seconds_text(new_s)} "
            f"({1 - new_s / present_s:.0%} less) on another one ({plan_layout(plan).summary})"
        )
        path = self._records.run_dir / FASTER_PLAN_FILE
        self._records.try_write(FASTER_PLAN_FILE, lambda: write_whole(path, plan.file_text()))
        self._records.note(f"{text}; `--resume --plan {path}` continues on it")


def share_recorded_costs(world: World, request: TrainRequest) -> CostTable | None:
    """Return on all ranks the costs that a resumed run has recorded; None if there are none.

    A damaged table is set aside.
    """
    return world.on_first(lambda: _read_recorded_costs(request.run_dir)) if request.resume else None


def _read_recorded_costs(run_dir: Path) -> CostTable | None:
    path = run_dir / RECORDED_COSTS_FILE
    if not path.exists():
        return None
    try:
        return CostTable.load(path)
    except PlanError as error:
        with disk_errors_named(run_dir):
            print(f"mmtrain: {set_aside(path, 'the costs are recorded again')} ({error})", file=sys.stderr)
        return None


def measure_message_ratio(world: World, record: StepRecord, timing: Timing) -> float | None:
    """Return on rank 0 the median ratio of recorded to predicted seconds of a step's messages; None if unknown.

    All ranks call this together; it gathers the record of one step from each. Only messages that their receiver stood
    still for count: for the others it is not known when they came.
    """
    offset = measure_clock_offset(world)
    gathered = cast(list[StepRecord], world.gather_to_first(record.shifted(-offset.offset_s)))
    sent: dict[tuple[int, Send], MessageRecord] = {
        (rank, message.message): message
        for rank, of_rank in enumerate(gathered)
        for message in of_rank.messages
        if isinstance(message.message, Send)
    }
    ratios = []
    for rank, of_rank in enumerate(gathered):
        for received in of_rank.messages:
            message = received.message
            if not isinstance(message, Recv) or received.wait_s <= 0:
                continue
            key = (message.peer, Send(message.edge, message.src, message.dst, rank, message.payload))
            predicted_s = timing.message(*key).seconds
            departed_s = max(sent[key].posted_s, received.posted_s)
            if predicted_s > 0 and received.done_s > departed_s:
                ratios.append((received.done_s - departed_s) / predicted_s)
    return statistics.median(ratios) if ratios else None
