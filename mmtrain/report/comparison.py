"""Compare a run's trace with the simulation of the same steps: per stage, in total and in one timeline."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from mmtrain.errors import UserError
from mmtrain.program import (
    BUBBLE_KINDS,
    Action,
    Backward,
    BubbleKind,
    Dispatch,
    Forward,
    GatherParams,
    Partial,
    Recv,
    ReduceGrads,
    ReduceShared,
    Send,
    Share,
    Timeline,
    chrome_trace,
)
from mmtrain.program.ir.segments import direction
from mmtrain.report.idle_time import idle_text
from mmtrain.report.plain_text import DEFAULT_WIDTH, exact_time_text, render_text

COMPUTE_TID = 0  # the track of a rank that holds its computations, in our Chrome traces
_SECONDS_PER_US = 1e-6
MAX_CRITICAL_PATH_ROWS = 12  # printed; a plan of many model chunks has hundreds of kinds of work

StageDirection = tuple[str, int, str]  # unit, stage, "F" for forward or "B" for backward
# Names of communication by its `kind` in our Chrome traces. Gradients of shared weights are reduced by an all-reduce.
_COMMUNICATION = {
    "p2p": "messages",
    "broadcast": "messages shared in TP groups",
    "reduce_scatter": "gradient reductions",
    "all_reduce": "gradient reductions",
    "all_gather": "parameter gathering",
    "all_to_all": "dispatch of features",
}
_UPPER_BOUNDS_NOTE = (
    "Messages and reductions are measured until their rank needed the result, which is an upper bound of the time that "
    "they took."
)


@dataclass(frozen=True)
class ComparisonRow:
    """Predicted and measured seconds per step: of a stage's forwards or backwards, a kind of action, or the whole step.

    The time of a stage or kind is summed over microbatches, replicas and ranks.
    """

    what: str  # `llm.0 forward`, `all forwards`, `messages`, or `step`
    measured_s: float | None
    predicted_s: float

    @property
    def error(self) -> float | None:
        """The prediction error relative to the measured time; None where nothing was measured."""
        return None if not self.measured_s else self.predicted_s / self.measured_s - 1

    def to_json(self) -> dict[str, Any]:
        """Return the row for JSON output."""
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True)
class RunTrace:
    """The recorded steps of a run, as Chrome trace JSON."""

    content: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path) -> "RunTrace":
        """Read a trace. Raises UserError if the file is missing or is not the trace of a run."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"{path}: cannot read the trace ({error.strerror}); record steps with --set 'train.trace_steps=[2,3]'"
            ) from None
        except ValueError as error:
            raise UserError(f"{path}: not a trace, it is not JSON ({error})") from None
        other_data = content.get("otherData") if isinstance(content, dict) else None
        if not isinstance(other_data, dict) or not other_data.get("steps"):
            raise UserError(f"{path}: not the trace of a run; record one with --set 'train.trace_steps=[2,3]'")
        return cls(content)

    @property
    def steps(self) -> list[int]:
        """The numbers of the recorded steps, counted from 1."""
        return [step["step"] for step in self.content["otherData"]["steps"]]

    @property
    def plan_sha256(self) -> str:
        """The hash of the plan that was run."""
        return str(self.content["otherData"]["plan_sha256"])

    @property
    def step_time_s(self) -> float:
        """The mean step time over the recorded steps."""
        return float(self.content["otherData"]["step_time_us"]) * _SECONDS_PER_US

    def bubble_shares(self) -> dict[str, float] | None:
        """Return idle time by kind as a share of all rank-seconds, averaged over steps; None in traces without it.

        Traces of older versions lack kinds that those did not know.
        """
        steps = self.content["otherData"]["steps"]
        if not all("bubbles" in step for step in steps):
            return None
        return {kind: sum(step["bubbles"].get(kind, 0.0) for step in steps) / len(steps) for kind in BUBBLE_KINDS}

    def stage_seconds(self) -> dict[StageDirection, float]:
        """Return compute seconds per step of each stage and direction."""
        return {key: total / len(self.steps) for key, total in stage_seconds(self.content["traceEvents"]).items()}

    def kind_seconds(self) -> dict[str, float]:
        """Return seconds per step of each kind of action."""
        return {kind: total / len(self.steps) for kind, total in kind_seconds(self.content["traceEvents"]).items()}


def stage_seconds(events: Sequence[Mapping[str, Any]]) -> dict[StageDirection, float]:
    """Sum the compute seconds of a Chrome trace by stage and direction; partial passes count with their pass."""
    seconds: defaultdict[StageDirection, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X" and event["tid"] == COMPUTE_TID:
            args = event["args"]
            seconds[args["unit"], args["stage"], event["name"][0]] += event["dur"] * _SECONDS_PER_US
    return dict(seconds)


def kind_seconds(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sum the seconds of a Chrome trace by kind of action, on all streams of all ranks."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X":
            seconds[_kind_of_event(event)] += event["dur"] * _SECONDS_PER_US
    return dict(seconds)


def _kind_of_event(event: Mapping[str, Any]) -> str:
    if event["tid"] == COMPUTE_TID:
        return "all forwards" if event["name"][0] == "F" else "all backwards"
    return "optimizer and gradient norm" if event["name"] == "step" else _COMMUNICATION[event["args"]["kind"]]


def comparison_rows(simulated: Sequence[Timeline], trace: RunTrace | None) -> list[ComparisonRow]:
    """Return rows for stages and directions, for kinds of actions and for the step: means over the simulated steps."""
    predicted: defaultdict[StageDirection, float] = defaultdict(float)
    predicted_kinds: defaultdict[str, float] = defaultdict(float)
    for timeline in simulated:
        events = chrome_trace(timeline, "")["traceEvents"]
        for key, seconds in stage_seconds(events).items():
            predicted[key] += seconds / len(simulated)
        for kind, seconds in kind_seconds(events).items():
            predicted_kinds[kind] += seconds / len(simulated)
    measured = {} if trace is None else trace.stage_seconds()
    rows = []
    for (unit, stage, letter), seconds in sorted(predicted.items()):
        name = f"{unit}.{stage} {'forward' if letter == 'F' else 'backward'}"
        rows.append(ComparisonRow(name, measured.get((unit, stage, letter)), seconds))
    measured_kinds = {} if trace is None else trace.kind_seconds()
    for kind, seconds in sorted(predicted_kinds.items()):
        measured_s = measured_kinds.get(kind)
        if seconds or measured_s:  # a group of one rank neither reduces nor gathers
            rows.append(ComparisonRow(kind, measured_s, seconds))
    step_time_s = sum(timeline.step_time_s for timeline in simulated) / len(simulated)
    return [*rows, ComparisonRow("step", None if trace is None else trace.step_time_s, step_time_s)]


@dataclass(frozen=True)
class CriticalPathRow:
    """The share of one kind of work in the critical path: seconds per step and number of actions."""

    what: str  # `llm.0 forward`, `vision.0>llm.0 activation`, `reduce llm`, `optimizer`
    part: str  # a unit, `messages` or `collectives`
    seconds: float
    count: float

    def to_json(self) -> dict[str, Any]:
        """Return the row for JSON output."""
        return {"what": self.what, "part": self.part, "seconds": self.seconds, "actions": self.count}


def critical_path_rows(simulated: Sequence[Timeline]) -> list[CriticalPathRow]:
    """Group the critical path by kind of work, longest first, as means over the simulated steps.

    The seconds of all rows add up to the step time.
    """
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    count: defaultdict[tuple[str, str], float] = defaultdict(float)
    for timeline in simulated:
        for span in timeline.critical_path:
            kind_of_work = _kind_of_work(span.action)
            seconds[kind_of_work] += span.duration_s / len(simulated)
            count[kind_of_work] += 1 / len(simulated)
    rows = [CriticalPathRow(*kind_of_work, total, count[kind_of_work]) for kind_of_work, total in seconds.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def _kind_of_work(action: Action) -> tuple[str, str]:
    """Return the name of an action's kind of work, and the part of the step that it belongs to."""
    match action:
        case Forward() | Backward() | Partial():
            return f"{action.stage} {'forward' if direction(action) == 'F' else 'backward'}", action.stage.unit
        case Send(edge, _, _, _, payload) | Recv(edge, _, _, _, payload):
            return f"{edge} {payload}", "messages"
        case Share(edge, _, payload):
            return f"{edge} {payload} shared", "collectives"
        case Dispatch(edge, _, _, payload):
            return f"{edge} {payload} dispatched", "collectives"
        case ReduceGrads(name, _) | ReduceShared(name):
            return f"reduce {name}", "collectives"
        case GatherParams(unit, _):
            return f"gather {unit}", "collectives"
    return "optimizer", "collectives"


def comparison_text(
    rows: Sequence[ComparisonRow],
    bubbles: Mapping[BubbleKind, float],
    path: Sequence[CriticalPathRow],
    width: int = DEFAULT_WIDTH,
) -> str:
    """Write the rows as a table, then the simulated idle time by kind and the critical path."""
    is_measured = any(row.measured_s is not None for row in rows)
    title = "Time per step, predicted and measured" if is_measured else "Predicted time per step"
    table = Table(title=title, title_justify="left")
    for column in ("stage", *comparison_head(is_measured)):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for row in rows:
        table.add_row(*comparison_cells(row, is_measured))
    note = "The time of a stage or kind is the sum over its microbatches, replicas and ranks."
    if is_measured:
        note += f" {_UPPER_BOUNDS_NOTE}"
    idle = f"Simulated ranks are idle for {idle_text({str(kind): share for kind, share in bubbles.items()})}."
    path_parts = ("", *_critical_path_text(path)) if path else ()
    return render_text(table, note, "", idle, *path_parts, width=width)


def comparison_head(is_measured: bool) -> tuple[str, ...]:
    """Return the headings of the columns after the first one."""
    return ("predicted", "measured", "error") if is_measured else ("predicted",)


def comparison_cells(row: ComparisonRow, is_measured: bool) -> list[str]:
    """Write the cells of a row: what, predicted, and if something was measured, the measured time and the error."""
    cells = [row.what, exact_time_text(row.predicted_s)]
    if is_measured:
        cells.append("-" if row.measured_s is None else exact_time_text(row.measured_s))
        cells.append("-" if row.error is None else f"{row.error:+.1%}")
    return cells


def _critical_path_text(path: Sequence[CriticalPathRow]) -> tuple[str, Table]:
    total_s = sum(row.seconds for row in path) or 1.0
    part_seconds: defaultdict[str, float] = defaultdict(float)
    for row in path:
        part_seconds[row.part] += row.seconds
    ranking = sorted(part_seconds.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{part} {seconds / total_s:.1%}" for part, seconds in ranking)
    sentence = f"Shares of the critical path, which adds up to the step time: {shares}."
    table = Table(title="Critical path", title_justify="left")
    for column in ("work", "time", "share", "actions"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for row in path[:MAX_CRITICAL_PATH_ROWS]:
        table.add_row(row.what, exact_time_text(row.seconds), f"{row.seconds / total_s:.1%}", f"{row.count:g}")
    other_rows = path[MAX_CRITICAL_PATH_ROWS:]
    if other_rows:
        seconds = sum(row.seconds for row in other_rows)
        table.add_row(f"{len(other_rows)} others", exact_time_text(seconds), f"{seconds / total_s:.1%}", "")
    return sentence, table


def overlay_trace(simulated: Sequence[Timeline], trace: RunTrace | None, plan_sha256: str) -> dict[str, Any]:
    """Write one Chrome trace: the run's ranks, and below them the simulated ranks of the same steps.

    Without a run, the trace holds the first simulated step.
    """
    simulated_traces = [chrome_trace(timeline, plan_sha256) for timeline in simulated]
    if trace is None:
        return simulated_traces[0]
    steps = trace.content["otherData"]["steps"]
    events = list(trace.content["traceEvents"])
    num_ranks = 1 + max(event["pid"] for event in events)
    for step, simulated_trace in zip(steps, simulated_traces, strict=True):
        for event in simulated_trace["traceEvents"]:
            moved = {**event, "pid": event["pid"] + num_ranks}
            if event["ph"] == "M" and event["name"] == "process_name":
                moved["args"] = {"name": f"{event['args']['name']}, simulated"}
            if event["ph"] == "X":
                moved["ts"] = event["ts"] + step["ts"]
            events.append(moved)
    return {**trace.content, "traceEvents": events}
