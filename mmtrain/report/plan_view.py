"""A plan for reading: where every layer goes, what that is predicted to cost, and what it beat."""

from collections.abc import Iterator

from rich.table import Table

from mmtrain.plan.plan import Plan
from mmtrain.report.arrangement import layers_text, recompute_text, spans, stage_ranks
from mmtrain.report.text import rendered, seconds_text


def plan_table(plan: Plan, width: int = 120) -> str:
    """Write a plan as text `width` columns wide: stages, prediction, the reason it was chosen, alternatives."""
    beaten = [_alternatives(plan)] if plan.alternatives else []
    return rendered(_stages(plan), "\n".join(_sentences(plan)), *beaten, width=width)


def _stages(plan: Plan) -> Table:
    title = f"{plan.placement} on {plan.world_size} x {plan.hardware}"
    table = Table(title=title, title_justify="left")
    for column in ("unit", "tp x pp x dp", "microbatches", "stage", "layers", "recomputed", "ranks"):
        table.add_column(column)
    for name, unit in plan.units.items():
        mesh = f"{unit.tp} x {unit.pp} x {unit.dp}"
        microbatches = str(plan.schedule.num_microbatches[name])
        for i, stage in enumerate(unit.stages):
            about = (name, mesh, microbatches) if i == 0 else ("", "", "")
            ranks = spans(tuple(sorted(stage_ranks(unit, stage.stage))))
            table.add_row(*about, str(stage.stage), layers_text(stage), recompute_text(stage), ranks)
        table.add_section()
    return table


def _alternatives(plan: Plan) -> Table:
    table = Table(title="What it beat", title_justify="left")
    table.add_column("plan")
    table.add_column("step", justify="right")
    table.add_column("peak GiB", justify="right")
    table.add_column("why it lost")
    for other in plan.alternatives:
        step = "-" if other.step_time_s is None else seconds_text(other.step_time_s)
        peak = "-" if other.peak_memory_gib is None else f"{other.peak_memory_gib:.3g}"
        table.add_row(other.summary, step, peak, other.reason)
    return table


def _sentences(plan: Plan) -> Iterator[str]:
    p = plan.predicted
    peak = max(p.peak_memory_gib.values(), default=0.0)
    yield (
        f"Predicted ({p.cost_source}): {seconds_text(p.step_time_s)} a step, MFU {p.mfu:.1%}, "
        f"{p.tokens_per_s_per_gpu:,.0f} tokens/s a rank, at most {peak:.3g} GiB a rank."
    )
    bubbles = sorted(p.bubbles.items(), key=lambda item: -item[1])
    idle = ", ".join(f"{kind} {share:.1%}" for kind, share in bubbles if share >= 0.0005)
    yield f"Ranks idle {sum(p.bubbles.values()):.1%} of the step" + (f": {idle}." if idle else ".")
    if p.scheduling_efficiency is not None:
        yield f"{p.scheduling_efficiency:.0%} of the encoders' work lies inside the LLM's own step."
    judged = [other for other in plan.alternatives if other.step_time_s is not None]
    slower = next((other for other in judged if other.runnable), None)
    if slower is not None and slower.step_time_s is not None:
        ratio = slower.step_time_s / p.step_time_s
        yield f"Chosen as the fastest that fits; the next, {slower.summary}, takes {ratio:.2f} times as long."
    else:
        yield "Chosen as the only one that fits."
    faster = [other for other in judged if (other.step_time_s or 0.0) < p.step_time_s and not other.runnable]
    if faster:
        yield f"Faster, but beyond what this version can run: {faster[0].summary}."
