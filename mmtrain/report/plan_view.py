"""A plan for reading: where every layer goes, what that is predicted to cost, and what it beat."""

from collections.abc import Iterator
from itertools import chain

from rich.table import Table

from mmtrain.plan.artifact.plan import Plan, UnitPlan
from mmtrain.report.metrics_record import compact_number
from mmtrain.report.plain_text import DEFAULT_WIDTH, memory_text, render_text, seconds_text
from mmtrain.report.rank_groups import RankGroup, ranges_text, rank_groups

_EQUAL_STEP_TIME_RATIO = 1.005  # step times that read the same


def plan_table(plan: Plan, width: int = DEFAULT_WIDTH) -> str:
    """Write a plan as text `width` columns wide: units, ranks, prediction, the reason it was chosen, alternatives."""
    beaten = [_alternatives(plan)] if plan.alternatives else []
    return render_text(_units(plan), _ranks(plan), "\n".join(_sentences(plan)), *beaten, width=width)


def _units(plan: Plan) -> Table:
    table = Table(title=f"{plan.placement} on {plan.world_size} x {plan.hardware}", title_justify="left")
    for column in ("unit", "tp x pp x dp", "chunks", "sp", "microbatches", "layers", "recomputed"):
        table.add_column(column)
    for name, unit in plan.units.items():
        table.add_row(
            name,
            f"{unit.tp} x {unit.pp} x {unit.dp}",
            str(unit.vpp),
            _sequence_parallel(unit),
            str(plan.schedule.num_microbatches[name]),
            str(sum(hi - lo for lo, hi in (stage.layers for stage in unit.stages))),
            str(unit.num_recomputed),
        )
    return table


def _sequence_parallel(unit: UnitPlan) -> str:
    return "-" if unit.tp == 1 else "yes" if unit.sp else "no"


def _ranks(plan: Plan) -> Table:
    """A row for all ranks that hold the same layers; 0 is a unit's embedding, the last one its projector or head."""
    table = Table(title="Layers of each rank", title_justify="left")
    for column in ("ranks", *plan.units, "recomputed", "memory"):
        table.add_column(column)
    for part in rank_groups(plan):
        ranks = ranges_text(part.ranks)
        held = plan.predicted.peak_memory_gib.get(ranks)
        layers = {held.unit: [stage.layers for stage in held.stages] for held in part.units}
        table.add_row(
            ranks,
            *(_layers(layers.get(name, [])) for name in plan.units),
            _recomputed(part),
            "-" if held is None else memory_text(held),
        )
    return table


def _layers(stages: list[tuple[int, int]]) -> str:
    """Layers of several chunks: `0-1, 16-17`."""
    return ", ".join(ranges_text(tuple(range(lo, hi))) for lo, hi in stages if hi > lo) or "-"


def _recomputed(part: RankGroup) -> str:
    """Which layers, by unit: `vision all, llm 18-19`."""
    found = []
    for held in part.units:
        again = tuple(chain.from_iterable(stage.recompute for stage in held.stages))
        if again:
            all_layers = len(again) == sum(stage.layers[1] - stage.layers[0] for stage in held.stages)
            found.append(f"{held.unit} {'all' if all_layers else ranges_text(again)}")
    return "; ".join(found) or "none"


def _alternatives(plan: Plan) -> Table:
    table = Table(title="Alternatives, the fastest first", title_justify="left")
    table.add_column("plan")
    table.add_column("step", justify="right")
    table.add_column("memory", justify="right")
    table.add_column("why not")
    for other in plan.alternatives:
        step = "-" if other.step_time_s is None else seconds_text(other.step_time_s)
        peak = "-" if other.peak_memory_gib is None else memory_text(other.peak_memory_gib)
        table.add_row(other.summary, step, peak, other.reason)
    return table


def _sentences(plan: Plan) -> Iterator[str]:
    p = plan.predicted
    tokens_per_s = compact_number(p.tokens_per_s_per_gpu * plan.world_size)
    yield (
        f"Predicted ({p.cost_source}): {seconds_text(p.step_time_s)} a step, MFU {p.mfu:.1%}, "
        f"{p.tokens_per_s_per_gpu:,.0f} LLM tokens/s a rank, {tokens_per_s} in all; "
        f"the fullest rank holds {memory_text(max(p.peak_memory_gib.values(), default=0.0))}."
    )
    bubbles = sorted(p.bubbles.items(), key=lambda item: -item[1])
    idle = ", ".join(f"{kind} {share:.1%}" for kind, share in bubbles if share >= 0.0005)
    yield f"Ranks idle {sum(p.bubbles.values()):.1%} of the step" + (f": {idle}." if idle else ".")
    if p.scheduling_efficiency is not None:
        yield f"{p.scheduling_efficiency:.0%} of the encoders' work lies inside the LLM's own step."
    yield from _choice(plan)


def _choice(plan: Plan) -> Iterator[str]:
    step = plan.predicted.step_time_s
    judged = [(other, other.step_time_s) for other in plan.alternatives if other.step_time_s is not None]
    slower = next(((other, seconds) for other, seconds in judged if other.runnable), None)
    if slower is not None:
        other, ratio = slower[0], slower[1] / step
        if ratio < 1 / _EQUAL_STEP_TIME_RATIO:  # chosen by measuring, or asked for
            yield f"Not the fastest as predicted: {other.summary} takes {ratio:.2f} of its step ({other.reason})."
        else:
            yield f"Chosen as the fastest that fits; the next, {other.summary}, takes {ratio:.2f} times as long."
    elif plan.alternatives:
        yield "Chosen as the fastest that fits; those below do not fit, or cannot be as fast."
    else:
        yield "Chosen as the only one that fits."
    faster = [other for other, seconds in judged if seconds < step and not other.runnable]
    if faster:
        yield f"Faster, but beyond what this version can run: {faster[0].summary}."
