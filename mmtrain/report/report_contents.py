"""The contents of a report before layout: the artifacts, and the figures derived from them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from mmtrain.balance.grouping.summary import GroupingScore
from mmtrain.costs.hardware import GIB
from mmtrain.planning.artifact.plan import Plan
from mmtrain.program import BUBBLE_KINDS, Compute, Timeline
from mmtrain.recipe import Recipe
from mmtrain.report.comparison import ComparisonRow, RunTrace, critical_path_rows
from mmtrain.report.expert_loads import ExpertLoads
from mmtrain.report.logged_totals import measured_phases, predicted_phases, sum_sources
from mmtrain.report.metrics_record import steady_steps
from mmtrain.report.rank_groups import num_replica_groups, ranks_to_draw
from mmtrain.report.recorded_spread import recorded_spread
from mmtrain.report.run_cost import RunCost, states_costs
from mmtrain.report.stage_spread import stage_spreads
from mmtrain.report.timeline_picture import MAX_DRAWN_RANKS, DrawnStep


@dataclass(frozen=True)
class ReportContents:
    """A plan and what is known about it from simulation, data and a run.

    Without the recipe and the data, there are no simulated steps, comparison and grouping scores.
    """

    name: str
    plan: Plan
    memory_limit_gib: float
    simulated: Sequence[Timeline] = ()  # the steps that the trace recorded, if there is one
    comparison: Sequence[ComparisonRow] = ()
    grouping_scores: Sequence[GroupingScore] = ()
    grouping_method: str = ""  # the recipe's
    trace: RunTrace | None = None
    metrics: Sequence[Mapping[str, Any]] | None = None  # logged steps; None for a plan that was not run
    recipe: Recipe | None = None


@dataclass(frozen=True)
class KeyFigure:
    """One of the numbers at the top of a report; `measured` is None if nothing was measured."""

    what: str
    unit: str
    predicted: float | None
    measured: float | None
    meaning: str


def key_figures(contents: ReportContents) -> list[KeyFigure]:
    """Return step time, MFU, throughput, memory and idle time.

    Predictions are for typical batches; measured values are medians over the steps of the run.
    """
    plan = contents.plan
    measured = steady_medians(contents.metrics)
    predicted_idle, measured_idle = idle_shares(contents)
    peak_bytes = max((step.get("peak_memory_bytes") or 0 for step in contents.metrics or ()), default=None)
    memory_meaning = f"fullest rank, limit {contents.memory_limit_gib:.4g} GiB"
    if peak_bytes is not None:
        scope = "device memory" if plan.hardware != "cpu-core" else "the whole process with its libraries"
        memory_meaning += f"; measured: {scope}"
    return [
        KeyFigure(
            "Step",
            "s",
            plan.predicted.step_time_s,
            measured.get("step_time_s"),
            "median over the run's steps" if measured else "typical batches of the data",
        ),
        KeyFigure(
            "MFU",
            "%",
            100 * plan.predicted.mfu,
            None if measured.get("mfu") is None else 100 * measured["mfu"],
            "model FLOP/s as a share of the hardware preset's peak, without padding and recomputation",
        ),
        KeyFigure(
            "LLM tokens",
            "/s",
            plan.predicted.tokens_per_s_per_gpu * plan.world_size,
            measured.get("tokens_per_s"),
            "all ranks together",
        ),
        *_text_only_figures(plan, measured.get("tokens_per_s")),
        KeyFigure(
            "Peak memory",
            "GiB",
            max(plan.predicted.peak_memory_gib.values(), default=None),
            None if peak_bytes is None else peak_bytes / GIB,
            memory_meaning,
        ),
        KeyFigure(
            "Idle",
            "%",
            100 * sum(share for kind, share in predicted_idle.items() if kind in (measured_idle or predicted_idle)),
            None if measured_idle is None else 100 * sum(measured_idle.values()),
            "share of the step in which ranks do not compute"
            + ("" if measured_idle is None else ", without tp_layers"),
        ),
        *_dispatch_figures(contents),
    ]


def run_costs(contents: ReportContents) -> dict[str, RunCost]:
    """Return what the recipe's steps are predicted to cost and what the logged ones did; nothing without a recipe.

    As in `plan`, predictions are made only where the recipe states a price or watts.
    """
    recipe, plan = contents.recipe, contents.plan
    costs: dict[str, RunCost] = {}
    if recipe is not None and recipe.train.steps is not None and states_costs(recipe.cluster):
        num_steps = recipe.train.steps
        run_s = num_steps * plan.predicted.step_time_s
        costs["predicted"] = RunCost.of_seconds(recipe.cluster, num_steps, run_s, plan.world_size)
    if recipe is not None and contents.metrics:
        costs["logged"] = RunCost.of_logged(recipe.cluster, contents.metrics, plan.world_size)
    return costs


def steady_medians(metrics: Sequence[Mapping[str, Any]] | None) -> dict[str, float]:
    """Return medians over the logged steps, without the first one, which includes warm-up."""
    steps = steady_steps(metrics)
    medians = {}
    for key in ("step_time_s", "mfu", "tokens_per_s"):
        values = [step[key] for step in steps if step.get(key) is not None]
        if values:
            medians[key] = median(values)
    return medians


def rank_changes(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each step of an elastic run from which on it had another number of ranks."""
    sentences = []
    for before, step in pairwise(metrics):
        if before.get("ranks") is not None and step.get("ranks") not in (None, before["ranks"]):
            seconds = step.get("resume_s")
            pause = "" if seconds is None else f", {seconds:.1f} s after the last step before the restart"
            sentences.append(f"{step['ranks']} ranks instead of {before['ranks']} since step {step['step']}{pause}")
    return sentences


def _text_only_figures(plan: Plan, measured_tokens_per_s: float | None) -> list[KeyFigure]:
    """Return the share of text-only efficiency that is kept; nothing where the LLM alone was not planned."""
    text_only, predicted_share = plan.predicted.text_only_tokens_per_s_per_gpu, plan.predicted.text_only_share
    if text_only is None or predicted_share is None:
        return []
    measured = None if measured_tokens_per_s is None else 100 * measured_tokens_per_s / (text_only * plan.world_size)
    meaning = "LLM tokens/s as a share of what the LLM alone is predicted to reach on as many tokens of text"
    return [KeyFigure("Text-only efficiency", "%", 100 * predicted_share, measured, meaning)]


def _dispatch_figures(contents: ReportContents) -> list[KeyFigure]:
    """Return the seconds of dispatches; nothing where units are not sharded."""
    predicted, measured = predicted_phases(contents.plan), measured_phases(contents.metrics)
    if predicted is None and measured is None:
        return []
    shares = [
        f"{totals.dispatch_share:.1%} {what}"
        for what, totals in (("predicted", predicted), ("measured", measured))
        if totals is not None
    ]
    return [
        KeyFigure(
            "Dispatches",
            "s",
            None if predicted is None else predicted.dispatch_s,
            None if measured is None else measured.dispatch_s,
            f"moving features between ranks, with waiting for the last of them: {', '.join(shares)} of the step",
        )
    ]


def idle_shares(contents: ReportContents) -> tuple[dict[str, float], dict[str, float] | None]:
    """Return idle time by kind as shares of the step: predicted, and measured if a trace says so.

    Predictions are means over the simulated steps; without such steps, they are those of the plan. Waiting inside
    layers is not measured, so it is missing there.
    """
    if contents.simulated:
        step_shares = [dict(timeline.bubble_shares()) for timeline in contents.simulated]
        predicted = {str(kind): sum(s[kind] for s in step_shares) / len(step_shares) for kind in BUBBLE_KINDS}
    else:
        predicted = {str(kind): contents.plan.predicted.bubbles.get(kind, 0.0) for kind in BUBBLE_KINDS}
    measured = None if contents.trace is None else contents.trace.bubble_shares()
    if measured is not None:
        del measured["tp_layers"]
    return predicted, measured


def drawn_steps(contents: ReportContents) -> tuple[list[DrawnStep], list[int]]:
    """Return the steps to draw and the ranks to draw of them.

    The steps are the first simulated one and, with a trace, the same step as it was measured.
    """
    if not contents.simulated:
        return [], []
    timeline = contents.simulated[0]
    ranks = ranks_to_draw(contents.plan, MAX_DRAWN_RANKS, _critical_replica_group(contents.plan, timeline))
    if contents.trace is None:
        return [DrawnStep.simulated("Simulated step", timeline, ranks)], ranks
    recorded = contents.trace.content["otherData"]["steps"][0]
    events = contents.trace.content["traceEvents"]
    simulated_step = DrawnStep.simulated(f"Step {recorded['step']}, simulated", timeline, ranks)
    measured_step = DrawnStep(f"Step {recorded['step']}, measured", events, recorded["ts"], recorded["dur"])
    return [simulated_step, measured_step], ranks


def _critical_replica_group(plan: Plan, timeline: Timeline) -> int:
    """Return the replica group with the largest part of the critical path."""
    seconds = [0.0] * num_replica_groups(plan)
    for span in timeline.critical_path:
        if isinstance(span.action, Compute):
            replicas_per_group = plan.units[span.action.stage.unit].num_replicas // len(seconds)
            seconds[span.action.mb.replica // replicas_per_group] += span.duration_s
    return seconds.index(max(seconds))


def report_json(contents: ReportContents) -> dict[str, Any]:
    """Return all numbers of a report as JSON."""
    plan = contents.plan
    predicted, measured = idle_shares(contents)
    spread = recorded_spread(contents.trace, contents.simulated, plan)
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
        "stages": [asdict(spread) for spread in stage_spreads(contents.trace, contents.simulated)],
        "time_spread": None if spread is None else asdict(spread),
        "grouping": [
            {
                "method": score.method,
                "chosen": score.method == contents.grouping_method,
                "fill": score.fill,
                "dist_ratio": score.dist_ratio,
                "max_over_mean": score.max_over_mean,
            }
            for score in contents.grouping_scores
        ],
        "phases": {
            what: None if totals is None else {**asdict(totals), "dispatch_share": totals.dispatch_share}
            for what, totals in (
                ("predicted", predicted_phases(plan)),
                ("measured", measured_phases(contents.metrics)),
            )
        },
        "cost": {what: asdict(cost) for what, cost in run_costs(contents).items()},
        "alternatives": [other.model_dump() for other in plan.alternatives],
        "training": None if contents.metrics is None else _training_json(contents.metrics),
    }


def _training_json(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not metrics:
        return {"steps": 0}
    validated = [step for step in metrics if step.get("val_loss") is not None]
    return {
        "steps": metrics[-1]["step"],
        "first_loss": metrics[0].get("loss"),
        "last_loss": metrics[-1].get("loss"),
        "last_val_loss": validated[-1]["val_loss"] if validated else None,
        "rank_changes": rank_changes(metrics),
        "sources": [asdict(source) for source in sum_sources(metrics)],
        "experts": None if (loads := ExpertLoads.of_logged(metrics)) is None else asdict(loads),
    }
