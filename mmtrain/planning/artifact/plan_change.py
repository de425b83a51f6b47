"""How a run's new plan refers to the plan that the run had, and differs from it; how the data has changed since."""

from collections.abc import Mapping
from dataclasses import asdict

from mmtrain.balance import SampleLengths
from mmtrain.balance.batch_meta import mean_tokens
from mmtrain.balance.grouping.methods import units_of
from mmtrain.costs import TokenLoad
from mmtrain.planning.artifact.layout import Layout
from mmtrain.planning.artifact.plan import Alternative, LargestMicrobatch, Plan, PlannedData

MAX_TOKENS_RATIO = 1.1  # of a unit's mean tokens per sample, then and now; predictions are off by about as much


def describe_plan_change(before: Plan, now: Plan) -> list[str]:
    """Return a line for the ranks, the placement, the mesh of every unit, and the predicted step time."""
    lines = [
        f"ranks: {_change(before.world_size, now.world_size)}",
        f"placement: {_change(before.placement, now.placement)}",
    ]
    for name, unit in now.units.items():
        unit_before = before.units.get(name)
        lines.append(f"{name}: {_change(unit_before.mesh_text if unit_before else 'none', unit.mesh_text)}")
    ratio = now.predicted.step_time_s / before.predicted.step_time_s
    lines.append(
        f"predicted step time: {before.predicted.step_time_s:.3f} s -> {now.predicted.step_time_s:.3f} s ({ratio:.2f}x)"
    )
    return lines


def _change(before: object, now: object) -> str:
    return f"{now}, as before" if before == now else f"{before} -> {now}"


PRESENT_PLAN_REASON = "the plan of the run so far"


def with_present(plan: Plan, present: Plan, present_s: float) -> Plan:
    """Return a plan with the run's present one as its first alternative, predicted with the same costs."""
    peak_gib = max(present.predicted.peak_memory_gib.values(), default=None)
    alternative = Alternative(
        summary=plan_layout(present).summary,
        placement=present.placement,
        step_time_s=present_s,
        peak_memory_gib=peak_gib,
        reason=PRESENT_PLAN_REASON,
    )
    return plan.model_copy(update={"alternatives": (alternative, *plan.alternatives)})


def present_step_s(plan: Plan) -> float:
    """Return the predicted step time of the plan that the run had, by the costs that this one was made with."""
    present = plan.alternatives[0]
    assert present.reason == PRESENT_PLAN_REASON, "a plan from `with_present`"
    assert present.step_time_s is not None
    return present.step_time_s


def plan_layout(plan: Plan) -> Layout:
    """Return the layout of a plan."""
    is_encoder_first = plan.schedule.kind == "encoder_first"
    return Layout(plan.placement, plan.units, plan.schedule.num_microbatches, is_encoder_first)


def summarize_data(
    lengths: SampleLengths, largest_load: Mapping[str, TokenLoad], seq_len: int, step_samples: float
) -> PlannedData:
    """Return what a plan records of the data it is made for, and of the largest microbatches, by unit."""
    largest = {unit: LargestMicrobatch(**asdict(load)) for unit, load in largest_load.items()}
    return PlannedData(
        samples=len(lengths),
        tokens=_mean_tokens(lengths),
        largest_microbatch=largest,
        seq_len=seq_len,
        step_samples=round(step_samples, 1),
    )


def _mean_tokens(lengths: SampleLengths) -> dict[str, float]:
    """Return the mean tokens of a sample, by unit that processes them."""
    return dict(zip(units_of(lengths), mean_tokens(lengths).round(2).tolist(), strict=True))


def describe_data_drift(plan: Plan, lengths: SampleLengths) -> str:
    """Return in words how the data differs from that for which a plan was made; empty if little.

    The plan stays valid: it computes the same whatever the data. But its layer partition, its predicted step time and
    its memory were meant for other lengths.
    """
    planned, current = plan.data.tokens, _mean_tokens(lengths)
    changes = [
        f"{unit}: {tokens:,.0f} tokens per sample instead of {planned.get(unit, 0.0):,.0f}"
        for unit, tokens in current.items()
        if not _is_close(tokens, planned.get(unit, 0.0))
    ]
    return "; ".join(changes)


def _is_close(tokens: float, other: float) -> bool:
    return max(tokens, other) <= MAX_TOKENS_RATIO * min(tokens, other)
