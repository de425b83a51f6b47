"""What a report tells, before it is laid out: the artefacts, and the figures that follow from them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from mmtrain.balance.summary import GroupingScore
from mmtrain.costs.hardware import GIB
from mmtrain.plan.artifact.plan import Plan
from mmtrain.program import BUBBLE_KINDS, Compute, Timeline
from mmtrain.report.comparison import ComparisonRow, RunTrace, critical_path_rows
from mmtrain.report.rank_groups import num_replica_groups, ranks_to_draw
from mmtrain.report.timeline_picture import MAX_DRAWN_RANKS, DrawnStep

IDLE_MEANINGS = {
    "dp_gather": "gathering parameters before they are used",
    "dp_reduce": "reducing gradients, shared weights and the norm",
    "pp_warmup": "waiting for the pipeline to fill",
    "pp_cooldown": "waiting for the pipeline to drain",
    "pp_other": "waiting for other stages in between",
    "tp": "sharing rows inside a TP group",
    "imbalance": "waiting for replicas with more to do",
}


@dataclass(frozen=True)
class ReportContents:
    """A plan, and what is known of it beyond what it says itself. `simulated` is of the trace's steps, if there is one.

    A plan by itself has no steps, rows and scores: those need its recipe and the data.
    """

    name: str
    plan: Plan
    memory_limit_gib: float
    simulated: Sequence[Timeline] = ()
    comparison: Sequence[ComparisonRow] = ()
    grouping_scores: Sequence[GroupingScore] = ()
    grouping_method: str = ""  # the recipe's way of grouping
    trace: RunTrace | None = None
    metrics: Sequence[Mapping[str, Any]] | None = None  # None for a plan that was not run


@dataclass(frozen=True)
class KeyFigure:
    """A number people ask for first; `measured` is None where nothing was."""

    what: str
    unit: str
    predicted: float | None
    measured: float | None
    meaning: str


def key_figures(contents: ReportContents) -> list[KeyFigure]:
    """Step time, MFU, throughput, memory and idle time: predicted for typical batches, measured as medians of a run."""
    plan, measured = contents.plan, _steady_medians(contents.metrics)
    predicted_idle, measured_idle = idle_shares(contents)
    memory = max((m["peak_memory_bytes"] for m in contents.metrics or ()), default=None)
    how = "device memory" if plan.hardware != "cpu-core" else "the whole process with its libraries"
    counted = "" if memory is None else f"; measured: {how}"
    return [
        KeyFigure(
            "Step",
            "s",
            plan.predicted.step_time_s,
            measured.get("step_time_s"),
            "median of the run's steps" if measured else "typical batches of the data",
        ),
        KeyFigure(
            "MFU",
            "%",
            100 * plan.predicted.mfu,
            None if measured.get("mfu") is None else 100 * measured["mfu"],
            "model FLOPs over the peak of the hardware preset: unpadded tokens, no recompute",
        ),
        KeyFigure(
            "LLM tokens",
            "/s",
            plan.predicted.tokens_per_s_per_gpu * plan.world_size,
            measured.get("tokens_per_s"),
            "all ranks together",
        ),
        KeyFigure(
            "Peak memory",
            "GiB",
            max(plan.predicted.peak_memory_gib.values(), default=None),
            None if memory is None else memory / GIB,
            f"fullest rank, limit {contents.memory_limit_gib:.4g} GiB{counted}",
        ),
        KeyFigure(
            "Idle",
            "%",
            100 * sum(predicted_idle.values()),
            None if measured_idle is None else 100 * sum(measured_idle.values()),
            "share of the step in which ranks do not compute",
        ),
    ]


def _steady_medians(metrics: Sequence[Mapping[str, Any]] | None) -> dict[str, float]:
    """Medians over the steps after the first, which also warms up."""
    steps = list(metrics or ())
    steps = steps[1:] or steps
    found = {}
    for key in ("step_time_s", "mfu", "tokens_per_s"):
        values = [m[key] for m in steps if m.get(key) is not None]
        if values:
            found[key] = median(values)
    return found


def idle_shares(contents: ReportContents) -> tuple[dict[str, float], dict[str, float] | None]:
    """Idle time by kind, as shares of the step: of the simulated steps (else as the plan says), and of the recorded."""
    if contents.simulated:
        each = [dict(step.bubble_shares()) for step in contents.simulated]
        predicted = {str(kind): sum(s[kind] for s in each) / len(each) for kind in BUBBLE_KINDS}
    else:
        predicted = {str(kind): contents.plan.predicted.bubbles.get(kind, 0.0) for kind in BUBBLE_KINDS}
    recorded = None if contents.trace is None else contents.trace.bubble_shares()
    return predicted, recorded


def drawn_steps(contents: ReportContents) -> tuple[list[DrawnStep], list[int]]:
    """The first simulated step and, of a run that recorded some, its first one; and the ranks to draw of them."""
    if not contents.simulated:
        return [], []
    simulated, found = contents.simulated[0], []
    ranks = ranks_to_draw(contents.plan, MAX_DRAWN_RANKS, _slowest_group(contents.plan, simulated))
    if contents.trace is None:
        return [DrawnStep.simulated("Simulated step", simulated, ranks)], ranks
    step = contents.trace.content["otherData"]["steps"][0]
    found.append(DrawnStep.simulated(f"Step {step['step']}, simulated", simulated, ranks))
    events = contents.trace.content["traceEvents"]
    found.append(DrawnStep(f"Step {step['step']}, measured", events, step["ts"], step["dur"]))
    return found, ranks


def _slowest_group(plan: Plan, step: Timeline) -> int:
    """The replica group in which most of the critical path lies."""
    spent = [0.0] * num_replica_groups(plan)
    for span in step.critical_path:
        if isinstance(span.action, Compute):
            per_group = plan.units[span.action.stage.unit].dp // len(spent)
            spent[span.action.mb.replica // per_group] += span.duration_s
    return spent.index(max(spent))


def report_json(contents: ReportContents) -> dict[str, Any]:
    """All numbers of a report, for programs."""
    plan, (predicted, measured) = contents.plan, idle_shares(contents)
    return {
        "name": contents.name,
        "plan_sha256": plan.sha256,
        "placement": plan.placement,
        "world_size": plan.world_size,
        "hardware": plan.hardware,
        "cost_source": plan.predicted.cost_source,
        "figures": [asdict(figure) for figure in key_figures(contents)],
        "idle": {"predicted": predicted, "measured": measured},
        "critical": [row.to_json() for row in critical_path_rows(contents.simulated)],
        "memory": {
            "predicted_gib": plan.predicted.peak_memory_gib,
            "kinds_gib": plan.predicted.memory_kinds_gib,
            "limit_gib": contents.memory_limit_gib,
        },
        "seconds": [row.to_json() for row in contents.comparison],
        "grouping": [
            {
                "method": s.method,
                "chosen": s.method == contents.grouping_method,
                "fill": s.fill,
                "dist_ratio": s.dist_ratio,
                "max_over_mean": s.max_over_mean,
            }
            for s in contents.grouping_scores
        ],
        "alternatives": [other.model_dump() for other in plan.alternatives],
        "training": None if contents.metrics is None else _training_json(contents.metrics),
    }


def _training_json(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not metrics:
        return {"steps": 0}
    validated = [m for m in metrics if m.get("val_loss") is not None]
    return {
        "steps": metrics[-1]["step"],
        "first_loss": metrics[0].get("loss"),
        "last_loss": metrics[-1].get("loss"),
        "last_val_loss": validated[-1]["val_loss"] if validated else None,
    }
