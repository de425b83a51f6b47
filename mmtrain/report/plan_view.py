"""A plan as text: where every layer runs, the predicted step, and the alternatives."""

from collections.abc import Iterator
from itertools import chain

from rich.console import RenderableType
from rich.table import Table

from mmtrain.planning.artifact.plan import AS_FAST_RATIO, AS_FAST_TEXT, Plan, Prediction, UnitPlan, sharding_text
from mmtrain.program.ir.graph import LLM
from mmtrain.program.ir.program import ranges_text
from mmtrain.report.idle_time import idle_text
from mmtrain.report.logged_totals import predicted_phases
from mmtrain.report.metrics_record import compact_number
from mmtrain.report.plain_text import DEFAULT_WIDTH, memory_text, render_text, seconds_text
from mmtrain.report.rank_groups import RankGroup, activation_notes, rank_groups

BALANCE_LEGEND = (
    "Variances of the parameters in billions, of the number of layers, and of the forward of one LLM microbatch in ms; "
    "hidden states sent by the forwards of a step; GPU-days for a million samples."
)
_SPREAD_SOURCES = {
    "recipe": "from the recipe",
    "run": "as the run in `cluster.costs` recorded",
    "default": "the default; `cluster.costs: RUN` takes what a run recorded",
}
PHASE_LEGEND = (
    "Tokens of the fullest rank over those of the mean rank, before and after balancing, of each unit; seconds of a "
    "step in which ranks dispatch."
)


def plan_table(plan: Plan, width: int = DEFAULT_WIDTH, *, with_details: bool = False) -> str:
    """Write a plan as text `width` columns wide: units, ranks, prediction, the reason for the choice, alternatives.

    with_details: also how evenly each plan that was simulated fills its pipeline ranks, and the steps of the closest
        plans under changed costs.
    """
    parts: list[RenderableType] = [
        _unit_table(plan),
        "",
        _rank_table(plan),
        "Layer 0 of a unit is its embedding, the last layer its projector or head.",
        *activation_notes(plan),
        "",
        *_sentences(plan),
    ]
    if plan.alternatives:
        parts += ["", _alternative_table(plan)]
    if with_details:
        parts += ["", _balance_table(plan), BALANCE_LEGEND]
        if (phase_table := _phase_table(plan)).row_count:
            parts += ["", phase_table, PHASE_LEGEND]
    return render_text(*parts, width=width)


def _unit_table(plan: Plan) -> Table:
    title = f"Plan: {plan.placement} on {plan.world_size} x {plan.hardware}"
    if plan.placement == "replicated":
        title += f", {sharding_text(plan.shard, plan.keeps_weights)}"
    if plan.schedule.kind == "encoder_first":
        title += ", encoders first"
    table = Table(title=title, title_justify="left")
    has_context = any(unit.cp > 1 for unit in plan.units.values())
    mesh_column = "tp x cp x pp x dp" if has_context else "tp x pp x dp"
    has_experts = any(unit.ep > 1 for unit in plan.units.values())
    shows_chunks = any(unit.tp_chunks > 1 for unit in plan.units.values())
    chunks_column = ("tp chunks",) if shows_chunks else ()
    experts_column = ("ep",) if has_experts else ()
    for column in (
        "unit",
        mesh_column,
        *experts_column,
        "vpp",
        "sp",
        *chunks_column,
        "microbatches",
        "layers",
        "recomputed",
    ):
        table.add_column(column)
    for name, unit in plan.units.items():
        num_layers = sum(hi - lo for lo, hi in (stage.layers for stage in unit.stages))
        table.add_row(
            name,
            " x ".join(map(str, (unit.tp, *((unit.cp,) if has_context else ()), unit.pp, unit.dp))),
            *((str(unit.ep),) if has_experts else ()),
            str(unit.vpp),
            _sequence_parallelism(unit),
            *((str(unit.tp_chunks),) if shows_chunks else ()),
            str(plan.schedule.num_microbatches[name]),
            str(num_layers),
            _num_recomputed(unit, num_layers),
        )
    return table


def _num_recomputed(unit: UnitPlan, num_layers: int) -> str:
    """Write how many layers are recomputed, with Megatron-LM's name where the unit is recomputed by one of its ways.

    `full`: every block, whatever the layers at the ends do. `selective`: attention and activation functions alone.
    """
    recomputed = {layer for stage in unit.stages for layer in stage.recompute}
    if recomputed.issuperset(range(1, num_layers - 1)) and recomputed and unit.offload != "all":
        return f"{len(recomputed)} (full)"
    is_selective = unit.recompute_activation_function and not recomputed
    return f"{len(recomputed)}{' (selective)' * is_selective}"


def _sequence_parallelism(unit: UnitPlan) -> str:
    if unit.tp == 1:
        return "-"
    return "yes" if unit.sp else "no"


def _rank_table(plan: Plan) -> Table:
    """Write a row for each group of ranks that hold the same layers."""
    table = Table(title="Layers of each rank", title_justify="left")
    for column in ("ranks", *plan.units, "recomputed", "peak memory"):
        table.add_column(column)
    for group in rank_groups(plan):
        ranks = ranges_text(group.ranks)
        layers = {unit_stages.unit: _layers_text(unit_stages.layer_ranges) for unit_stages in group.units}
        peak_gib = plan.predicted.peak_memory_gib.get(ranks)
        table.add_row(
            ranks,
            *(layers.get(name, "-") for name in plan.units),
            _recomputed_text(group),
            "-" if peak_gib is None else memory_text(peak_gib),
        )
    return table


def _layers_text(layer_ranges: list[tuple[int, int]]) -> str:
    """Write the layers of one or several model chunks: `0-1, 16-17`."""
    return ", ".join(ranges_text(tuple(range(lo, hi))) for lo, hi in layer_ranges if hi > lo) or "-"


def _recomputed_text(group: RankGroup) -> str:
    """Write the recomputed layers by unit: `vision all; llm 18-19`."""
    parts = []
    for unit_stages in group.units:
        recomputed = tuple(chain.from_iterable(stage.recompute for stage in unit_stages.stages))
        if recomputed:
            num_layers = sum(hi - lo for lo, hi in unit_stages.layer_ranges)
            layers = "all" if len(recomputed) == num_layers else ranges_text(recomputed)
            parts.append(f"{unit_stages.unit} {layers}")
    return "; ".join(parts) or "none"


def _alternative_table(plan: Plan) -> Table:
    table = Table(title="Alternatives, fastest first", title_justify="left")
    table.add_column("plan")
    table.add_column("step", justify="right")
    table.add_column("memory", justify="right")
    table.add_column("why not chosen")
    for other in plan.alternatives:
        step = "-" if other.step_time_s is None else seconds_text(other.step_time_s)
        peak = "-" if other.peak_memory_gib is None else memory_text(other.peak_memory_gib)
        table.add_row(other.summary, step, peak, other.reason)
    return table


def _balance_table(plan: Plan) -> Table:
    """Write how evenly the plan and its alternatives fill their pipeline ranks (OmniBal's tables 4 and 5)."""
    table = Table(title="Balance over pipeline ranks", title_justify="left")
    table.add_column("plan")
    for column in ("parameters", "layers", "forward", "sent", "memory left", "GPU-days"):
        table.add_column(column, justify="right")
    rows = [
        ("the chosen plan", plan.predicted.balance),
        *((other.summary, other.balance) for other in plan.alternatives),
    ]
    for name, balance in rows:
        if balance is not None:
            left_gib = balance.memory_left_gib.values()
            table.add_row(
                name,
                f"{balance.parameter_variance:.3g}",
                f"{balance.layer_variance:.3g}",
                f"{balance.forward_variance:.3g}",
                memory_text(balance.sent_gib),
                f"{min(left_gib):.3g} to {max(left_gib):.3g} GiB",
                compact_number(balance.gpu_days_per_million_samples),
            )
    return table


def _phase_table(plan: Plan) -> Table:
    """Write a row for the plan and each alternative with sharded units; none where no plan has them."""
    table = Table(title="Balance over the ranks of sharded units", title_justify="left")
    table.add_column("plan")
    for column in (*plan.units, "dispatches"):
        table.add_column(column, justify="right")
    rows = [
        ("the chosen plan", plan.predicted.balance),
        *((other.summary, other.balance) for other in plan.alternatives),
    ]
    for name, balance in rows:
        if balance is not None and balance.phases is not None and balance.dispatch_s is not None:
            ratios = [balance.phases[unit].over_mean for unit in plan.units]
            cells = (f"{before:.2f} -> {after:.2f}" for before, after in ratios)
            table.add_row(name, *cells, seconds_text(balance.dispatch_s))
    return table


def _sentences(plan: Plan) -> Iterator[str]:
    """Write the prediction and the reason for the choice."""
    predicted = plan.predicted
    tokens_per_s = compact_number(predicted.tokens_per_s_per_gpu * plan.world_size)
    peak = memory_text(max(predicted.peak_memory_gib.values(), default=0.0))
    yield (
        f"Predicted step ({predicted.cost_source}): {seconds_text(predicted.step_time_s)}, MFU {predicted.mfu:.1%}, "
        f"{predicted.tokens_per_s_per_gpu:,.0f} LLM tokens/s per rank ({tokens_per_s} in total), peak memory {peak}."
    )
    if plan.settings and "train.global_batch" not in plan.settings:  # but `train.global_batch.samples`, or tokens
        tokens = compact_number(predicted.tokens_per_s_per_gpu * plan.world_size * predicted.step_time_s)
        yield (
            f"A step is {plan.num_groups} groups of at most {plan.data.seq_len} LLM tokens; on average it has "
            f"{plan.data.step_samples:,.0f} samples and {tokens} tokens."
        )
    if plan.measured is not None:
        as_run = f"As run here, a step takes {seconds_text(plan.measured.step_time_s)}"
        ratio = plan.measured.memory_ratio
        yield f"{as_run}." if ratio is None else f"{as_run}, and ranks hold {ratio:.2f} of what is counted: so it fits."
    if predicted.text_only_share is not None:
        yield (
            f"That is {predicted.text_only_share:.0%} of what the LLM alone reaches on as many tokens of text "
            f"({predicted.text_only_tokens_per_s_per_gpu:,.0f} tokens/s per rank)."
        )
    if kinds_gib := _fullest_rank_kinds(predicted):
        yield f"Memory of the fullest rank: {_memory_sum_text(kinds_gib, predicted.memory_gib)}."
    if predicted.muon_s is not None:
        share = predicted.muon_s / predicted.step_time_s
        yield f"Muon moves and orthogonalizes matrices for {seconds_text(predicted.muon_s)} of the step ({share:.1%})."
    if predicted.copies is not None:
        yield (
            f"A copy of the state takes {seconds_text(predicted.copies.seconds)} beside the steps; copies fill at most "
            f"{memory_text(predicted.copies.gib)} of a node's memory for a rank."
        )
    yield f"Ranks are idle for {idle_text(predicted.bubbles)}."
    phases = predicted_phases(plan)
    if phases is not None:
        yield f"Balance over ranks: {phases.to_text()}."
    shared = None if predicted.balance is None else predicted.balance.shared
    if shared is not None:
        yield (
            f"Of the LLM's sequences {shared.sequences:.1%} are cut for {plan.units[LLM].cp} ranks, with "
            f"{shared.tokens:.0%} of the tokens; the fullest of these ranks has {shared.work_over_mean:.2f}x the "
            "attention work of the mean."
        )
        ratios = ", ".join(f"{unit} {ratio:.3f}" for unit, ratio in shared.sp_ratio.items())
        yield f"SP-Ratio, the share of a microbatch for which these ranks wait for the one with most tokens: {ratios}."
    if predicted.scheduling_efficiency is not None:
        inside = f"{predicted.scheduling_efficiency:.0%} of the encoders' work runs inside the LLM's own step"
        coarse = predicted.coarse_scheduling_efficiency
        yield f"{inside}." if coarse is None else f"{inside}; {coarse:.0%} would if all ran before or behind the LLM's."
    yield from _expert_sentences(plan)
    yield from _choice_sentences(plan)
    for choice in predicted.other_choices:
        yield (
            f"With {choice.spread} spread of the ranks' times (cluster.time_spread) the choice would be "
            f"{choice.summary}, {choice.faster:.1%} faster then; `mmtrain profile` measures the spread."
        )


def _memory_sum_text(kinds_gib: dict[str, float], memory_gib: float) -> str:
    """Write `66 GiB counted + 8 GiB margin of 74.5 GiB: parameters 10 GiB, ...`."""
    margin_gib = kinds_gib.get("margin", 0.0)
    counted_gib = sum(kinds_gib.values()) - margin_gib
    kinds = ", ".join(f"{kind} {memory_text(gib)}" for kind, gib in kinds_gib.items() if gib and kind != "margin")
    return (
        f"{memory_text(counted_gib)} counted + {memory_text(margin_gib)} margin of {memory_text(memory_gib)}: {kinds}"
    )


def _fullest_rank_kinds(predicted: Prediction) -> dict[str, float]:
    """Return GiB by kind of memory on the fullest rank; nothing for plans that no search has made."""
    if not predicted.peak_memory_gib:
        return {}
    fullest = max(predicted.peak_memory_gib, key=lambda ranks: predicted.peak_memory_gib[ranks])
    return predicted.memory_kinds_gib.get(fullest, {})


def _expert_sentences(plan: Plan) -> Iterator[str]:
    """Say what unequal loads of experts cost, and why so many ranks hold them together."""
    experts, ep = plan.predicted.experts, plan.units[LLM].ep
    if experts is None:
        return
    if experts.spread:
        yield (
            f"Experts are loaded unevenly (parallel.llm.expert_spread {experts.spread:.3g}, "
            f"{_SPREAD_SOURCES[experts.source]}): the fullest of {ep} ranks computes {experts.fullest_rank:.2f}x the "
            f"mean, so that a step takes {experts.slower:.1%} longer."
        )
    found = {number: seconds for number, seconds in experts.steps_s.items() if seconds is not None}
    if not experts.steps_s:
        return
    listed = ", ".join(f"{number}: {seconds_text(seconds)}" for number, seconds in found.items())
    rest = [str(number) for number in experts.steps_s if number not in found]
    no_faster = f"; on {', '.join(rest)} ranks nothing fits or is as fast" if rest else ""
    quick = f"a quick search found, by ep, steps of {listed}{no_faster}" if found else "no quick search found a plan"
    yield f"Experts lie on {ep} ranks (ep): {quick}."


def _choice_sentences(plan: Plan) -> Iterator[str]:
    """Compare the plan with the best alternative."""
    step_time_s = plan.predicted.step_time_s
    simulated = [(other, other.step_time_s) for other in plan.alternatives if other.step_time_s is not None]
    if simulated:
        next_best, seconds = simulated[0]
        ratio = seconds / step_time_s
        # The planner chooses another plan than the predicted best after measuring plans, or for --baseline.
        if ratio < 1 / AS_FAST_RATIO:
            yield (
                f"Not the fastest by prediction: {next_best.summary} takes {ratio:.2f}x the step time "
                f"({next_best.reason})."
            )
        elif ratio < 1 and next_best.reason.startswith(AS_FAST_TEXT):
            yield (
                f"Chosen because it is the simplest; {AS_FAST_TEXT}: {next_best.summary}, predicted to be "
                f"{1 - ratio:.1%} faster."
            )
        elif ratio < 1:
            yield f"{AS_FAST_TEXT.capitalize()}: {next_best.summary} ({next_best.reason})."
        elif ratio < AS_FAST_RATIO:
            yield f"Chosen because it is the fastest that fits; {AS_FAST_TEXT}: {next_best.summary}."
        else:
            yield f"Chosen because it is the fastest that fits; the next best takes {ratio:.2f}x: {next_best.summary}."
    elif plan.alternatives:
        yield "Chosen because it is the fastest that fits; the alternatives do not fit or cannot be as fast."
    else:
        yield "Chosen because no other plan fits."
