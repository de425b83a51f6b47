"""What a run's trace says beside what was simulated for the same steps: per stage, for the step, and in one picture."""

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
from mmtrain.report.plain_text import DEFAULT_WIDTH, render_text

_COMPUTE_TID, _SECONDS_PER_US = 0, 1e-6
MAX_CRITICAL_PATH_ROWS = 12  # printed; a plan of many chunks has hundreds of kinds


@dataclass(frozen=True)
class ComparisonRow:
    """Seconds a step: of a stage's forwards or backwards, summed over microbatches, replicas and ranks; or of all."""

    what: str
    measured_s: float | None
    predicted_s: float

    @property
    def error(self) -> float | None:
        """How far the prediction is off, as a share of what was measured."""
        return None if not self.measured_s else self.predicted_s / self.measured_s - 1

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True)
class RunTrace:
    """A run's recorded steps, as Chrome trace JSON holds them."""

    content: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path) -> "RunTrace":
        """Read a trace; UserError if there is none or it is none of a run."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"{path}: cannot read the trace ({error.strerror}); record steps with --set 'train.trace=[2,3]'"
            ) from None
        except ValueError as error:
            raise UserError(f"{path}: no trace, it is no JSON ({error})") from None
        other = content.get("otherData") if isinstance(content, dict) else None
        if not isinstance(other, dict) or not other.get("steps"):
            raise UserError(f"{path}: no trace of a run; record one with --set 'train.trace=[2,3]'")
        return cls(content)

    @property
    def steps(self) -> list[int]:
        """Numbers of the recorded steps, counted from 1."""
        return [step["step"] for step in self.content["otherData"]["steps"]]

    @property
    def plan_sha256(self) -> str:
        """Of the plan that was run."""
        return str(self.content["otherData"]["plan_sha256"])

    @property
    def step_time_s(self) -> float:
        """Mean over the recorded steps."""
        return float(self.content["otherData"]["step_time_us"]) * _SECONDS_PER_US

    def bubble_shares(self) -> dict[str, float] | None:
        """Idle time by kind as a share of all rank-seconds, mean over the steps; None in traces that do not say."""
        steps = self.content["otherData"]["steps"]
        if not all("bubbles" in step for step in steps):
            return None
        return {kind: sum(step["bubbles"][kind] for step in steps) / len(steps) for kind in BUBBLE_KINDS}

    def stage_seconds(self) -> dict[tuple[str, int, str], float]:
        """Seconds a step of each (unit, stage, kind)."""
        return {key: total / len(self.steps) for key, total in stage_seconds(self.content["traceEvents"]).items()}


def stage_seconds(events: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, str], float]:
    """Compute seconds of a Chrome trace by (unit, stage, F or B), parts counted with what they are part of."""
    found: defaultdict[tuple[str, int, str], float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X" and event["tid"] == _COMPUTE_TID:
            args = event["args"]
            found[args["unit"], args["stage"], event["name"][0]] += event["dur"] * _SECONDS_PER_US
    return dict(found)


def comparison_rows(simulated: Sequence[Timeline], trace: RunTrace | None) -> list[ComparisonRow]:
    """A row for each stage's forwards and backwards, and one for the step: means over the simulated steps."""
    predicted: defaultdict[tuple[str, int, str], float] = defaultdict(float)
    for timeline in simulated:
        for key, seconds in stage_seconds(chrome_trace(timeline, "")["traceEvents"]).items():
            predicted[key] += seconds / len(simulated)
    measured = {} if trace is None else trace.stage_seconds()
    rows = [
        ComparisonRow(
            f"{unit}.{stage} {'forward' if kind == 'F' else 'backward'}", measured.get((unit, stage, kind)), seconds
        )
        for (unit, stage, kind), seconds in sorted(predicted.items())
    ]
    step = sum(t.step_time_s for t in simulated) / len(simulated)
    return [*rows, ComparisonRow("step", None if trace is None else trace.step_time_s, step)]


@dataclass(frozen=True)
class CriticalPathRow:
    """What work of one kind has of the critical path: seconds a step, and how many actions."""

    what: str  # `llm.0 forward`, `vision.0>llm.0 activation`, `reduce llm`, `optimizer`
    part: str  # a unit, `messages` or `collectives`
    seconds: float
    count: float

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {"what": self.what, "part": self.part, "seconds": self.seconds, "actions": self.count}


def critical_path_rows(simulated: Sequence[Timeline]) -> list[CriticalPathRow]:
    """Where the step time comes from, largest first: means over the simulated steps. The seconds add up to the step."""
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    count: defaultdict[tuple[str, str], float] = defaultdict(float)
    for timeline in simulated:
        for span in timeline.critical_path:
            words = _path_words(span.action)
            seconds[words] += span.duration_s / len(simulated)
            count[words] += 1 / len(simulated)
    return sorted(
        (CriticalPathRow(*words, s, count[words]) for words, s in seconds.items()), key=lambda row: -row.seconds
    )


def _path_words(action: Action) -> tuple[str, str]:
    """What an action is called, and what it is a part of."""
    match action:
        case Forward() | Backward() | Partial():
            return f"{action.stage} {'forward' if direction(action) == 'F' else 'backward'}", action.stage.unit
        case Send(edge, _, _, _, payload) | Recv(edge, _, _, _, payload):
            return f"{edge} {payload}", "messages"
        case Share(edge, _, payload):
            return f"{edge} {payload} shared", "collectives"
        case ReduceGrads(name) | ReduceShared(name):
            return f"reduce {name}", "collectives"
        case GatherParams(unit):
            return f"gather {unit}", "collectives"
    return "optimizer", "collectives"


def comparison_text(
    rows: Sequence[ComparisonRow],
    bubbles: Mapping[BubbleKind, float],
    path: Sequence[CriticalPathRow],
    width: int = DEFAULT_WIDTH,
) -> str:
    """The rows as a table, the simulated idle time by kind, and what the step time is made of."""
    measured = any(row.measured_s is not None for row in rows)
    table = Table(title="Seconds a step" + (", predicted and measured" if measured else ""), title_justify="left")
    for column in ("", "predicted", *(("measured", "error") if measured else ())):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        cells = [f"{row.predicted_s * 1e3:.2f} ms"]
        if measured:
            cells.append("-" if row.measured_s is None else f"{row.measured_s * 1e3:.2f} ms")
            cells.append("-" if row.error is None else f"{row.error:+.1%}")
        table.add_row(row.what, *cells)
    idle = ", ".join(f"{kind} {share:.1%}" for kind, share in bubbles.items() if share >= 0.0005)
    told = f"Simulated ranks idle {sum(bubbles.values()):.1%} of the step" + (f": {idle}." if idle else ".")
    return render_text(table, told, *(("", *_path_text(path)) if path else ()), width=width)


def _path_text(path: Sequence[CriticalPathRow]) -> tuple[str, Table]:
    whole = sum(row.seconds for row in path) or 1.0
    parts: defaultdict[str, float] = defaultdict(float)
    for row in path:
        parts[row.part] += row.seconds
    shares = sorted(parts.items(), key=lambda item: -item[1])
    told = "What the step waits for, one after another: " + ", ".join(f"{p} {s / whole:.1%}" for p, s in shares) + "."
    table = Table(title="Critical path", title_justify="left")
    for column in ("", "seconds", "share", "actions"):
        table.add_column(column, justify="left" if not column else "right")
    for row in path[:MAX_CRITICAL_PATH_ROWS]:
        table.add_row(row.what, f"{row.seconds * 1e3:.2f} ms", f"{row.seconds / whole:.1%}", f"{row.count:g}")
    if rest := path[MAX_CRITICAL_PATH_ROWS:]:
        seconds = sum(row.seconds for row in rest)
        table.add_row(f"{len(rest)} others", f"{seconds * 1e3:.2f} ms", f"{seconds / whole:.1%}", "")
    return told, table


def overlay_trace(simulated: Sequence[Timeline], trace: RunTrace | None, plan_sha256: str) -> dict[str, Any]:
    """One Chrome trace: the run's ranks, and under them, one for one, the simulated ones of the same steps."""
    starts = [0.0] * len(simulated)
    if trace is not None:
        starts = [step["ts"] for step in trace.content["otherData"]["steps"]]
    parts = [chrome_trace(timeline, plan_sha256) for timeline in simulated]
    if trace is None:
        return parts[0]
    ranks = 1 + max(event["pid"] for event in trace.content["traceEvents"])
    events = list(trace.content["traceEvents"])
    for start, part in zip(starts, parts, strict=True):
        for event in part["traceEvents"]:
            moved = {**event, "pid": event["pid"] + ranks}
            if event["ph"] == "M" and event["name"] == "process_name":
                moved["args"] = {"name": f"{event['args']['name']}, simulated"}
            if event["ph"] == "X":
                moved["ts"] = event["ts"] + start
            events.append(moved)
    return {**trace.content, "traceEvents": events}
