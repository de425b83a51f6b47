"""Explain why a plan that fits lost: what takes its ranks longer than those of the chosen plan.

A layout that the user names is put into the ranking in the same way.
"""

import math

from mmtrain.planning.artifact.layout import Layout
from mmtrain.planning.artifact.plan import AS_FAST_RATIO, AS_FAST_TEXT, Alternative, Plan
from mmtrain.planning.space.candidate import Candidate
from mmtrain.program.ir.graph import StageId

MAX_NAMED_STAGES = 2  # with more stages on the busiest ranks only their units are named
MIN_SHOWN_SHARE = 0.005  # of the chosen step: smaller differences are left out of the split


def slower_text(ratio: float) -> str:
    """Say how much slower a step is that takes `ratio` times as long as the chosen one."""
    return f"{ratio:.2f}x slower" if ratio >= AS_FAST_RATIO else AS_FAST_TEXT


def explain_slower(slower: Candidate, chosen: Candidate) -> str:
    """Return one line on a candidate that takes longer than the chosen one.

    A step is the time that ranks compute, on average, and the time that they idle. The line names the part that has
    grown more. Of idle time it names the imbalance between ranks, or else the kind of bubble that has grown most.
    """
    ratio = slower_text(slower.step_time_s / chosen.step_time_s)
    compute_s, chosen_compute_s = _mean_compute_s(slower), _mean_compute_s(chosen)
    if compute_s - chosen_compute_s >= (slower.step_time_s - chosen.step_time_s) / 2:
        compute_ratio = compute_s / chosen_compute_s
        return f"{ratio}: its ranks compute {compute_ratio:.2f}x as long{_cause_of_compute(slower, chosen)}"
    mean_share = compute_s / slower.step_time_s
    if slower.busiest_s - compute_s >= (slower.step_time_s - compute_s) / 2:
        busiest_share = slower.busiest_s / slower.step_time_s
        return (
            f"{ratio}: load imbalance, ranks with {_busiest_layers(slower)} compute {busiest_share:.0%} of the step, "
            f"the mean rank {mean_share:.0%}"
        )
    growth_s = {
        kind: share * slower.step_time_s - chosen.bubbles.get(kind, 0.0) * chosen.step_time_s
        for kind, share in slower.bubbles.items()
        if kind != "tp_layers"  # counted with compute
    }
    grown_most = max(growth_s, key=lambda kind: growth_s[kind])
    # Seconds, because the shares of two steps of different length may be equal.
    idle_s, chosen_idle_s = slower.step_time_s - compute_s, chosen.step_time_s - chosen_compute_s
    return (
        f"{ratio}: its ranks idle {idle_s:.3g} s of the step, the chosen plan's {chosen_idle_s:.3g} s; "
        f"{grown_most} grows most"
    )


def explain_measured_slower(slower: Candidate, chosen: Candidate) -> str:
    """Return one line on a candidate that was run and took longer than the chosen one, or could not be run."""
    assert slower.measured_step_s is not None
    assert chosen.measured_step_s is not None
    if slower.is_out_of_memory:
        ratio = slower.memory_ratio or 0.0
        estimate = f": a rank held {ratio:.2f} of its counted peak" if ratio > 1 else ""
        return f"ran out of memory{estimate}"
    if math.isinf(slower.measured_step_s):
        return "could not be run here"
    measured_ratio = slower.measured_step_s / chosen.measured_step_s
    reason = f"{measured_ratio:.2f}x slower as measured, {slower.step_time_s / chosen.step_time_s:.2f}x as predicted"
    return reason if slower.summary != chosen.summary else f"{reason}; layers by stage: {_layers_by_stage(slower)}"


def _layers_by_stage(candidate: Candidate) -> str:
    """Return what tells apart two partitions of one size: `vision 5, llm 2+4`."""
    counts = {
        name: "+".join(str(hi - lo) for lo, hi in (stage.layers for stage in unit.stages))
        for name, unit in candidate.layout.units.items()
    }
    return ", ".join(f"{name} {text}" for name, text in counts.items())


def _mean_compute_s(candidate: Candidate) -> float:
    """Return the seconds of a step that ranks are inside passes, on average: they compute, or wait inside layers."""
    idle = sum(share for kind, share in candidate.bubbles.items() if kind != "tp_layers")
    return (1 - idle) * candidate.step_time_s


def _cause_of_compute(slower: Candidate, chosen: Candidate) -> str:
    """Return what may explain that ranks compute longer: there are fewer, or they recompute more layers."""
    ranks, chosen_ranks = slower.graph.world_size, chosen.graph.world_size
    if ranks < chosen_ranks:
        return f": {ranks} ranks, not {chosen_ranks}"
    recomputed, chosen_recomputed = _num_recomputed(slower), _num_recomputed(chosen)
    if recomputed > chosen_recomputed:
        return f": {recomputed} layers are recomputed, not {chosen_recomputed}"
    return ""


def _num_recomputed(candidate: Candidate) -> int:
    return sum(unit.num_recomputed for unit in candidate.layout.units.values())


def _busiest_layers(candidate: Candidate) -> str:
    """Return what the busiest ranks hold: `vision layers 0-7`, or only the units where there are many stages."""
    stages = candidate.busiest_stages
    if len(stages) > MAX_NAMED_STAGES:
        return " and ".join(dict.fromkeys(stage.unit for stage in stages))
    return " and ".join(_name_layers(candidate, stage) for stage in stages)


def _name_layers(candidate: Candidate, stage: StageId) -> str:
    lo, hi = candidate.graph.stage(stage).layers
    return f"{stage.unit} layers {lo}-{hi - 1}" if hi - lo > 1 else f"{stage.unit} layer {lo}"


def with_compared(chosen: Plan, compared: Plan, label: str) -> Plan:
    """Return the faster of two plans for one recipe, with the other among its alternatives.

    label: what the ranking calls the compared one.
    """
    ratio = compared.predicted.step_time_s / chosen.predicted.step_time_s
    if ratio < 1 / AS_FAST_RATIO:
        reason = f"{slower_text(1 / ratio)} than {label}: {explain_split(chosen, compared)}"
        return _ranked(compared, (*chosen.alternatives, _alternative(chosen, "the search's plan", reason)))
    reason = f"{slower_text(ratio)}: {explain_split(compared, chosen)}"
    return _ranked(chosen, (*chosen.alternatives, _alternative(compared, label, reason)))


def with_misfit(chosen: Plan, label: str, reason: str) -> Plan:
    """Return the plan with a compared layout that has no plan among its alternatives."""
    misfit = Alternative(summary=label, placement="unified", step_time_s=None, peak_memory_gib=None, reason=reason)
    return _ranked(chosen, (*chosen.alternatives, misfit))


def explain_split(slower: Plan, faster: Plan) -> str:
    """Say where one plan takes longer than another: `+0.61 s pp_warmup, -0.02 s computing`."""
    seconds, reference = _seconds_by_kind(slower), _seconds_by_kind(faster)
    growth_s = {kind: seconds.get(kind, 0.0) - reference.get(kind, 0.0) for kind in {**seconds, **reference}}
    smallest_s = MIN_SHOWN_SHARE * faster.predicted.step_time_s
    shown = [(kind, grown_s) for kind, grown_s in growth_s.items() if abs(grown_s) >= smallest_s]
    shown.sort(key=lambda item: -item[1])
    return ", ".join(f"{grown_s:+.3g} s {kind}" for kind, grown_s in shown) or "no part of the step differs"


def _seconds_by_kind(plan: Plan) -> dict[str, float]:
    """Divide a plan's step into the seconds that its ranks compute on average, and those that they idle, by kind."""
    predicted = plan.predicted
    computing = {"computing": (1 - sum(predicted.bubbles.values())) * predicted.step_time_s}
    return computing | {kind: share * predicted.step_time_s for kind, share in predicted.bubbles.items()}


def _alternative(plan: Plan, label: str, reason: str) -> Alternative:
    layout = Layout(plan.placement, plan.units, plan.schedule.num_microbatches)
    return Alternative(
        summary=f"{label}, {layout.summary}",
        placement=plan.placement,
        step_time_s=plan.predicted.step_time_s,
        peak_memory_gib=max(plan.predicted.peak_memory_gib.values(), default=None),
        reason=reason,
        balance=plan.predicted.balance,
    )


def _ranked(plan: Plan, alternatives: tuple[Alternative, ...]) -> Plan:
    by_time = sorted(alternatives, key=lambda other: math.inf if other.step_time_s is None else other.step_time_s)
    return plan.model_copy(update={"alternatives": tuple(by_time)})
